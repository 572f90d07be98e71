"""What a server prints when it is ready: each line does what it says, as it is pasted, in every setting."""

import ast
import asyncio
import contextlib
import re
import shlex
import shutil
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from tinyserve.__main__ import main
from tinyserve.cli.serve import _python, _url, _welcome
from tinyserve.config import ServerOptions
from tinyserve.server.serve import Server, open_socket

from .server.conftest import FakeEngine, service_of

TLS = Path(__file__).parent / "data" / "tls"
CERTIFICATE = {"ssl_certfile": str(TLS / "cert1.pem"), "ssl_keyfile": str(TLS / "key1.pem")}


@contextlib.contextmanager
def greeted(**options):
    """The banner of a server that runs in a thread with a loop of its own."""
    ready, told, stop = threading.Event(), [], []

    async def serve():
        service = service_of(FakeEngine(b"Paris"), **options)
        running = Server(service, open_socket(service.config.server))
        await running.start()
        told.append(_welcome(running.address, service, 1.0))
        stop.extend((asyncio.get_running_loop(), asyncio.Event()))
        ready.set()
        await stop[1].wait()
        await running.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(30)
    yield told[0]
    stop[0].call_soon_threadsafe(stop[1].set)
    thread.join(30)


def lines_of(banner, first, last):
    """The lines from one that begins so to one that begins so, as they stand there."""
    lines = banner.splitlines()
    start = next(number for number, line in enumerate(lines) if line.lstrip().startswith(first))
    end = next(number for number in range(start, len(lines)) if lines[number].lstrip().startswith(last))
    return "\n".join(lines[start : end + 1])


def ipv6():
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as bound:
        bound.bind(("::1", 0))
        return True
    return False


SETTINGS = {
    "plain": {},
    "key": {"api_key": "s3cret"},
    "socket": {"uds": "a b/s.sock"},
    "socket and key": {"uds": "s.sock", "api_key": ["s3cret", "other"]},
    "below a proxy": {"root_path": "/api", "api_key": "s3cret"},
    "other names": {"allowed_hosts": ["*.example.org", "localhost"]},
    "IPv6": {"host": "::1"},
    "every address": {"host": "0.0.0.0"},
    "TLS": CERTIFICATE,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_each_line_works_as_it_is_pasted(name, tmp_path, monkeypatch, capsys):
    """curl, OpenAI's client and our own: `chat` was shown without a key, and no line but curl's knew of the socket."""
    if name == "IPv6" and not ipv6():
        pytest.skip("this machine has no IPv6")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b").mkdir()
    with greeted(port=0, **SETTINGS[name]) as banner:
        assert "s3cret" not in banner and ("TINYSERVE_API_KEY" in banner) == ("key" in name or "proxy" in name)
        pasted = banner.replace("<key>", "s3cret")
        curl = lines_of(pasted, "curl", "-d ")
        if name == "TLS":
            monkeypatch.setenv("SSL_CERT_FILE", CERTIFICATE["ssl_certfile"])
            curl = curl.replace("curl ", f"curl --cacert {CERTIFICATE['ssl_certfile']} ").replace(
                "127.0.0.1", "localhost"
            )
            pasted = pasted.replace("127.0.0.1", "localhost")
            assert "--cacert" in banner and "SSL_CERT_FILE" in banner
        if shutil.which("curl"):
            found = subprocess.run(["sh", "-c", f"{curl} -s --noproxy '*'"], capture_output=True, text=True, timeout=60)
            assert '"Paris"' in found.stdout, found
        monkeypatch.setenv("no_proxy", "*")
        pytest.importorskip("openai")
        exec(lines_of(pasted, "import httpx" if "socket" in name else "from openai", "print("), {})
        assert capsys.readouterr().out == "Paris\n"
        command = shlex.split(lines_of(pasted, "python -m tinyserve", "python -m"))[3:]
        assert main([*command, "-q", "Hello"]) == 0
        assert capsys.readouterr().out == "Paris\n"
        if "socket" not in name:
            assert re.search(r"Chat in a browser: \S+:\d+/ ", banner)


def test_a_name_of_any_letters_is_pasted_whole():
    """A model called `it's "x"`, with an escape: quotes of the shell and of Python hold, and no terminal is moved."""
    service = service_of(FakeEngine())
    service.engine.served_names = ('it\'s "x" \x1b[2J',)
    banner = _welcome("http://127.0.0.1:1", service, 1.0)
    words = shlex.split(lines_of(banner, "curl", "-d ").replace("\\\n", ""))

    assert "\x1b" not in banner and 'it\'s \\"x\\" \\u001b[2J' in words[-1]
    compile(lines_of(banner, "from openai", "print("), "banner", "exec")


@pytest.mark.parametrize(
    ("hosts", "address", "url"),
    [
        (["api.example.org"], "http://10.0.0.1:80", "http://api.example.org:80"),
        (["api.example.org:8080"], "http://10.0.0.1:80", "http://api.example.org:8080"),
        (["fd00::1"], "http://10.0.0.1:80", "http://[fd00::1]:80"),
        (["a", "::1"], "http://[::1]:80", "http://[::1]:80"),
        (["a", "*"], "http://10.0.0.1:80", "http://10.0.0.1:80"),
        (["*.example.org"], "http://10.0.0.1:80", "http://10.0.0.1:80"),
    ],
)
def test_the_banner_says_a_name_that_is_answered(hosts, address, url):
    """With --allowed-hosts it named the address, under which the server answers 403."""
    assert _url(address, ServerOptions(allowed_hosts=hosts)) == url


def test_who_needs_a_certificate_is_not_sent_to_a_client_without():
    service = service_of(FakeEngine(), ssl_ca_certs=str(TLS / "cert1.pem"), **CERTIFICATE)
    banner = _welcome("https://127.0.0.1:1", service, 1.0)

    assert "tinyserve chat" not in banner and "--cert FILE --key FILE" in banner


@pytest.mark.parametrize("name", ["tiny", "mód😀", "a'b\"c\\", "m\u202eod"])
def test_python_reads_the_name_of_a_model_as_it_is(name):
    """JSON writes a letter beyond 16 bits as two halves: pasted, the client could not send it."""
    text = _python(name)
    assert ast.literal_eval(text) == name and text.isprintable()
