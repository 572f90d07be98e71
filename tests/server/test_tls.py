"""server/tls.py on a real socket. The keys in tests/data/tls are for tests only; nobody else uses or trusts them."""

import asyncio
import shutil
import ssl
from pathlib import Path

import pytest

from tests.served import connect
from tinyserve.errors import ConfigError
from tinyserve.server import spoken, tls

from .conftest import FakeEngine, service_of, serving

ENCRYPTED = """-----BEGIN ENCRYPTED PRIVATE KEY-----
MIGbMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAcBAixCoxJoOdFBwICCAAw
DAYIKoZIhvcNAgkFADAdBglghkgBZQMEAQIEELHXlnf23JtnZFsPkiYyib4EQGqK
w20xCdlPfN2EwnYGTL65j/6sGqs0f013YmXg6Itckvz8QUtz0RpEHa0b0LzmvoFk
T3y0rUrPZdvXfiw0rRk=
-----END ENCRYPTED PRIVATE KEY-----
"""  # with the passphrase "x"
KEYS = Path(__file__).parent.parent / "data" / "tls"


def install(number, folder, key=None):
    shutil.copy(KEYS / f"cert{number}.pem", folder / "cert.pem")
    shutil.copy(KEYS / f"key{key or number}.pem", folder / "key.pem")


def options(folder):
    return {"ssl_certfile": str(folder / "cert.pem"), "ssl_keyfile": str(folder / "key.pem")}


async def shown(server):
    """The certificate that a new connection gets, and the answer to a request over it."""
    context = ssl.create_default_context(cafile=KEYS / "cert1.pem")
    context.load_verify_locations(KEYS / "cert2.pem")
    reader, writer = await connect(server, ssl=context, server_hostname="localhost")
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    status = (await reader.read()).split()[1]
    writer.close()
    return found, status


def binary(number):
    return ssl.PEM_cert_to_DER_cert((KEYS / f"cert{number}.pem").read_text())


def test_a_new_certificate_is_shown_without_a_restart(run, tmp_path, monkeypatch):
    """The first, then one whose key does not fit (the first stays), then the second."""
    monkeypatch.setattr(tls, "LOOK_SECONDS", 0.05)

    async def go():
        install(1, tmp_path)
        async with serving(FakeEngine(), **options(tmp_path)) as server:
            assert server.address.startswith("https://")
            assert await shown(server) == (binary(1), b"200")
            install(2, tmp_path, key=1)
            await asyncio.sleep(0.3)
            assert await shown(server) == (binary(1), b"200")
            install(2, tmp_path)
            while (found := await shown(server))[0] == binary(1):
                await asyncio.sleep(0.05)
            assert found == (binary(2), b"200")

    run(go())


def test_only_http_1_is_offered_and_what_is_none_is_told_so(run, tmp_path, caplog, monkeypatch):
    """HTTP/2 was offered by ALPN; half of a TLS connection cannot be closed, which no answer may fail at."""
    monkeypatch.setattr(spoken, "SWALLOW_SECONDS", 0.2)

    async def go():
        context = ssl.create_default_context(cafile=KEYS / "cert1.pem")
        context.set_alpn_protocols(["h2", "http/1.1"])
        install(1, tmp_path)
        async with serving(FakeEngine(), **options(tmp_path)) as server:
            reader, writer = await connect(server, ssl=context, server_hostname="localhost")
            assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
            writer.write(b"hello\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 400")
            writer.close()

    run(go())
    assert not caplog.records


def test_files_that_do_not_fit_are_refused_at_the_start(tmp_path):
    install(1, tmp_path, key=2)
    with pytest.raises(ConfigError, match="ssl-certfile"):
        tls.Certificates(service_of(None, **options(tmp_path)).config.server)
    (tmp_path / "key.pem").write_text(ENCRYPTED)
    with pytest.raises(ConfigError, match="the key is encrypted"):  # OpenSSL asks the terminal, and waits
        tls.Certificates(service_of(None, **options(tmp_path)).config.server)
    (tmp_path / "key.pem").unlink()
    with pytest.raises(ConfigError, match="ssl-certfile"):
        tls.Certificates(service_of(None, **options(tmp_path)).config.server)
