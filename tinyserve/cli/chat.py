"""`tinyserve chat` and `tinyserve complete`: talk to a running server from a terminal, with the answer streamed.

Before: any server that speaks OpenAI's API.  After: a person.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from ..config import client_api_key
from ..errors import ConfigError, EngineError

HELP = "/reset forgets the conversation, /system TEXT sets the system prompt, /exit or Ctrl-D leaves."
TIMEOUT = 600.0  # seconds without a byte; a busy server may queue a request for long


class Client:
    """A minimal client of one server. Args: url: up to and including /v1.   model: None takes the first one served."""

    def __init__(self, url: str, api_key: str | None, model: str | None) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        if not self._url.startswith(("http://", "https://")):
            raise ConfigError(f"--url must begin with http:// or https://, got {url!r}.")
        self.model = model or self._first_model()

    def _first_model(self) -> str:
        with self._open("models", None) as response:
            return json.load(response)["data"][0]["id"]

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
                    if "error" in chunk:
                        raise EngineError(chunk["error"]["message"])
                    yield chunk
        except (OSError, HTTPException) as error:
            raise EngineError(f"the connection to the server broke: {error}") from None
        raise EngineError("the connection to the server ended before the answer did")

    def _open(self, path: str, body: bytes | None) -> Any:
        """Send a request and return the response, to be read piece by piece."""
        try:
            return urlopen(Request(f"{self._url}/{path}", body, self._headers), timeout=TIMEOUT)
        except HTTPError as error:
            raise EngineError(f"the server answered {error.code}: {_message(error.read())}") from None
        except (URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise EngineError(f"no server answers at {self._url} ({reason}). Start one: python -m tinyserve") from None


def _message(body: bytes) -> str:
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")


def run_chat(argv: Sequence[str]) -> int:
    """The chat command. Returns the exit code."""
    parser = _parser("chat", "Chat with a running server.")
    parser.add_argument("--system-prompt", metavar="TEXT", help="first message of the conversation")
    parser.add_argument("question", nargs="?", help="ask this, print the answer and leave")
    options = parser.parse_args(argv)
    client = Client(options.url, options.api_key or client_api_key(), options.model_name)
    question = options.quick or options.question
    conversation = Conversation(client, options.system_prompt, _limits(options))
    if question:
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
    client = Client(options.url, options.api_key or client_api_key(), options.model_name)
    text = options.quick or options.text
    for prompt in [text] if text else _lines("\ncontinue> "):
        if prompt == "/exit":
            break
        _show(c["text"] for chunk in client.stream("completions", {"prompt": prompt, **_limits(options)})
              for c in chunk["choices"])  # fmt: skip
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
            answer = _show(
                c["delta"].get("content") or ""
                for chunk in self._client.stream("chat/completions", body)
                for c in chunk["choices"]
            )
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
            print(f"\nerror: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print("\n(stopped)")


def _show(pieces: Iterator[str]) -> str:
    """Print pieces as they come; return them joined."""
    found = []
    for piece in pieces:
        found.append(piece)
        print(piece, end="", flush=True)
    print()
    return "".join(found)


def _lines(prompt: str) -> Iterator[str]:
    """Lines that are not empty, until the end of input or Ctrl-C at the prompt."""
    while True:
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
    parser = _Parser(prog=f"tinyserve {command}", description=description)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="address of the server [%(default)s]")
    parser.add_argument("--api-key", metavar="KEY", help="key of the server [TINYSERVE_API_KEY]")
    parser.add_argument("--model-name", metavar="NAME", help="model to ask [the first one served]")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="send this, print the answer and leave")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")
    parser.add_argument("--temperature", type=float, metavar="X", help="0 is greedy [the model's own]")
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigError(message)
