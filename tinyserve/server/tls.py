"""TLS: the certificate, and the new one that replaces it while the server runs.

Certificates live for weeks, servers longer. The files are looked at every few seconds; when they have changed and fit
together, connections from then on get the new ones. What is open stays open, and a half-written file changes nothing.

Before: config.py (--ssl-*).  After: serve.py.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from ..config import ServerOptions
from ..errors import ConfigError

logger = logging.getLogger("tinyserve.server")
LOOK_SECONDS = 10.0


class Certificates:
    """The files of --ssl-certfile and --ssl-keyfile, and the context that shows them.

    Raises: ConfigError: they cannot be read, or do not belong to each other.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._seen = self._state()
        try:
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        except (OSError, ValueError) as error:  # SSLError is an OSError
            raise ConfigError(f"--ssl-certfile and --ssl-keyfile cannot be used: {error}") from None
        self.context: ssl.SSLContext | None = None

    def attach(self, context: ssl.SSLContext) -> ssl.SSLContext:
        """Note the context in use, so that it can be given new certificates."""
        self.context = context
        return context

    async def watch(self) -> None:
        """Look for new files until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.refresh()

    def refresh(self) -> bool:
        """Load the files again if they have changed. Returns whether new ones are shown now."""
        state = self._state()
        if state == self._seen or None in state or self.context is None:
            return False
        self._seen = state
        try:
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # a trial: a pair that does not fit stays outside
            self._load(self.context)
        except (OSError, ValueError) as error:
            logger.error("the new TLS certificate cannot be used, the old one stays: %s", error)
            return False
        logger.info("the TLS certificate was loaded anew")
        return True

    def _load(self, context: ssl.SSLContext) -> None:
        context.load_cert_chain(self._options.ssl_certfile, self._options.ssl_keyfile, password=_no_password)
        if self._options.ssl_ca_certs:
            context.load_verify_locations(self._options.ssl_ca_certs)

    def _state(self) -> tuple[tuple[int, int, int] | None, ...]:
        """What changes when a file is written or replaced; None: it is not there now."""
        found = []
        for name in (self._options.ssl_certfile, self._options.ssl_keyfile):
            try:
                facts = Path(name).stat()
                found.append((facts.st_mtime_ns, facts.st_ino, facts.st_size))
            except OSError:
                found.append(None)
        return tuple(found)


def _no_password() -> str:
    """Asked for what opens an encrypted key; OpenSSL would ask the terminal, and all connections would wait."""
    raise ValueError("the key is encrypted: write it without a passphrase (openssl pkey -in KEY -out NEW)")
