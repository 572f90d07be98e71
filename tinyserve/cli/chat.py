"""`tinyserve chat` and `tinyserve complete`: talk to a running server from a terminal, with the answer streamed.

    python -m tinyserve chat --url http://host:8000/v1 --api-key KEY
    python -m tinyserve chat --url unix:/run/tinyserve.sock

Before: parse.py; any server that speaks OpenAI's API.  After: a person.
"""

from __future__ import annotations

import argparse
import json
import socket
import ssl
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPHandler, OpenerDirector, ProxyHandler, Request, build_opener

from ..config import client_api_key
from ..errors import ConfigError, EngineError
from .parse import Parser

HELP = "/reset forgets the conversation, /system TEXT sets the system prompt, /exit or Ctrl-D leaves."
TIMEOUT = 600.0  # seconds without a byte; a busy server may queue a request for long
# What moves a terminal's cursor, or worse, is shown as a box: it may come from a server that somebody else runs.
CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\N{REPLACEMENT CHARACTER}")


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str, host: str, timeout: float) -> None:
        super().__init__(host, timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class _OverUnix(HTTPHandler):
    """Sends requests to a socket in the file system, whatever host they name."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def http_open(self, request: Request) -> Any:
        return self.do_open(partial(_UnixConnection, self._path), request)


class Client:
    """A minimal client of one server.

    Args: url: up to and including /v1, or unix:PATH.   model: None takes the first one served.
    """

    def __init__(self, url: str, api_key: str | None, model: str | None) -> None:
        self._shown = url.rstrip("/")
        self._url, self._opener = _reached(self._shown)
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            if not (api_key.isascii() and api_key.isprintable()):
                raise ConfigError("--api-key must be printable ASCII text: a header carries it.")
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.model = model or self._first_model()

    def _first_model(self) -> str:
        try:
            with self._open("models", None) as response:
                return str(json.load(response)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise EngineError(
                f"{self._shown} does not answer as OpenAI's API does; is it the address of /v1?"
            ) from None
        except (OSError, HTTPException) as error:
            raise EngineError(f"the connection to the server broke: {error}") from None

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed answer. Raises: EngineError: the server refused, failed or went away."""
        body = {"model": self.model, "stream": True, **body}
        try:
            with self._open(path, json.dumps(body).encode()) as response:
                for line in response:
                    if line.strip() == b"data: [DONE]":
                        return
                    if not line.startswith(b"data: "):
                        continue
                    chunk = json.loads(line.removeprefix(b"data: "))
                    if not isinstance(chunk, dict) or "error" in chunk:
                        raise EngineError(_message(line.removeprefix(b"data: ")))
                    yield chunk
        except ValueError:
            raise EngineError(f"{self._shown} does not answer as OpenAI's API does") from None
        except (OSError, HTTPException) as error:
            raise EngineError(f"the connection to the server broke: {error}") from None
        raise EngineError("the connection to the server ended before the answer did")

    def _open(self, path: str, body: bytes | None) -> Any:
        """Send a request and return the response, to be read piece by piece."""
        try:
            return self._opener.open(Request(f"{self._url}/{path}", body, self._headers), timeout=TIMEOUT)
        except HTTPError as error:
            text = f"the server answered {error.code}: {_message(error.read())}"
            raise EngineError(text + _cure(error.code, self._shown, "Authorization" in self._headers)) from None
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, ssl.SSLError) and reason.reason == "WRONG_VERSION_NUMBER":
                plain = self._shown.replace("https", "http", 1)
                raise EngineError(f"{self._shown} is no TLS server. If it speaks plain HTTP: --url {plain}") from None
            raise EngineError(
                f"no server answers at {self._shown} ({reason}). Start one: python -m tinyserve"
            ) from None


def _reached(url: str) -> tuple[str, OpenerDirector]:
    """The address to ask, and what sends requests there. Raises: ConfigError: it is none."""
    if url.startswith("unix:"):
        path = url.removeprefix("unix:")
        return "http://localhost/v1", build_opener(ProxyHandler({}), _OverUnix(path.removeprefix("//")))
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url must begin with http://, https:// or unix:, got {url!r}.")
    return url, build_opener()


def _message(body: bytes) -> str:
    """What a refusal says: OpenAI's error object, or whatever else there is."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(body[:200].decode("utf-8", "replace").split())


def _cure(status: int, url: str, with_key: bool) -> str:
    """What to do about a refusal, where that is known."""
    if status == 401:
        another = "another" if with_key else "its"
        return f" Give {another} key with --api-key KEY, or set TINYSERVE_API_KEY."
    if status == 404 and not url.endswith("/v1") and not url.startswith("unix:"):
        return f" The address mostly ends with /v1: --url {url}/v1"
    return ""


def run_chat(argv: Sequence[str]) -> int:
    """The chat command. Returns the exit code."""
    parser = _parser("chat", "Chat with a running server.")
    parser.add_argument("--system-prompt", metavar="TEXT", help="first message of the conversation")
    parser.add_argument("question", nargs="?", help="ask this, print the answer and leave")
    options = parser.parse_args(argv)
    client = _client(options)
    question = options.quick if options.quick is not None else options.question
    conversation = Conversation(client, options.system_prompt, _limits(options))
    if question is not None:
        conversation.ask(question)
        return 0
    print(f"Chatting with {client.model}. {HELP}")
    for line in _lines("\n> "):
        _obey_or_ask(conversation, line)
        if line == "/exit":
            break
    return 0


def run_complete(argv: Sequence[str]) -> int:
    """The complete command: each line is continued on its own. Returns the exit code."""
    parser = _parser("complete", "Let a running server continue texts.")
    parser.add_argument("text", nargs="?", help="continue this and leave")
    options = parser.parse_args(argv)
    client = _client(options)
    text, asked = options.quick if options.quick is not None else options.text, False
    for prompt in [text] if text is not None else _lines("\ncontinue> "):
        if prompt == "/exit":
            break
        asked = True
        _show(choice.get("text") for choice in _choices(client, "completions", {"prompt": prompt, **_limits(options)}))
    if not asked and not (sys.stdin and sys.stdin.isatty()):
        print("tinyserve: no text came in: give one, or a line for each on standard input", file=sys.stderr)
    return 0


class Conversation:
    """The messages so far; every answer becomes part of them."""

    def __init__(self, client: Client, system: str | None, limits: dict[str, Any]) -> None:
        self._client = client
        self._limits = limits
        self.reset(system)

    def reset(self, system: str | None = None) -> None:
        """Forget everything; keep or replace the system prompt."""
        kept = [m for m in getattr(self, "messages", []) if m["role"] == "system"]
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else kept

    def ask(self, text: str) -> None:
        """Send a message and show the answer as it comes. A failed turn is taken back."""
        self.messages.append({"role": "user", "content": text})
        try:
            body = {"messages": self.messages, **self._limits}
            choices = _choices(self._client, "chat/completions", body)
            answer = _show((choice.get("delta") or {}).get("content") for choice in choices)
        except BaseException:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": answer})


def _obey_or_ask(conversation: Conversation, line: str) -> None:
    command, _, rest = line.partition(" ")
    if command == "/help":
        print(HELP)
    elif command == "/reset":
        conversation.reset()
    elif command == "/system":
        conversation.reset(rest.strip() or None)
    elif command.startswith("/") and command != "/exit":
        print(f"There is no command {command}. {HELP}")
    elif command != "/exit":
        try:
            conversation.ask(line)
        except EngineError as error:
            print(f"error: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print("(stopped)")


def _choices(client: Client, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for chunk in client.stream(path, body):
        yield from chunk.get("choices") or ()


def _show(pieces: Iterator[str | None]) -> str:
    """Print pieces as they come; return them joined."""
    found, terminal = [], sys.stdout is not None and sys.stdout.isatty()
    try:
        for piece in filter(None, pieces):
            found.append(piece)
            print(piece.translate(CONTROLS) if terminal else piece, end="", flush=True)
    except (EngineError, KeyboardInterrupt):
        if found:
            print()  # what is said of it begins a line
        raise
    print()
    return "".join(found)


def _client(options: argparse.Namespace) -> Client:
    host = f"[{options.host}]" if ":" in options.host else options.host
    url = options.url or f"http://{host}:{options.port}/v1"
    return Client(url, options.api_key or client_api_key(), options.model_name)


def _lines(prompt: str) -> Iterator[str]:
    """Lines that are not empty, until the end of input or Ctrl-C at the prompt."""
    while sys.stdin is not None:
        try:
            line = input(prompt if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line:
            yield line


def _limits(options: argparse.Namespace) -> dict[str, Any]:
    values = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    return {name: value for name, value in values.items() if value is not None}


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = Parser(prog=f"tinyserve {command}", description=description)
    parser.add_argument("--url", help="address of /v1, or unix:PATH [made of host and port]")
    parser.add_argument("--host", default="127.0.0.1", help="[%(default)s]")
    parser.add_argument("--port", type=int, metavar="N", default=8000, help="[%(default)s]")
    parser.add_argument("--api-key", metavar="KEY", help="key of the server [TINYSERVE_API_KEY]")
    parser.add_argument("--model-name", metavar="NAME", help="model to ask [the first one served]")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="send this, print the answer and leave")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")
    parser.add_argument("--temperature", type=float, metavar="X", help="0 is greedy [the model's own]")
    return parser
