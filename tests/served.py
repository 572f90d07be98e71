"""A server for tests: without a socket, on one in the test's own loop, or in a thread, so that clients may block.

Each ends with its block, and its engine with it.
"""

import asyncio
import json
import threading
import time
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager

import httpx

from tinyserve.server.app import create_app
from tinyserve.server.serve import Server, open_socket

PATIENCE = 200  # seconds for a server in a thread to come and to go; a real model is loaded meanwhile


def in_process(service, *, timeout=20, **scope):
    """An httpx client that calls the app without a socket. scope: of httpx.ASGITransport."""
    transport = httpx.ASGITransport(create_app(service), **scope)
    return httpx.AsyncClient(transport=transport, base_url="http://test", timeout=timeout)


@asynccontextmanager
async def listening(service):
    """The Server of a service, on a socket."""
    server = Server(service, open_socket(service.config.server))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@contextmanager
def in_thread(make):
    """The same in a thread with a loop of its own. make: a coroutine function that runs there and gives the service."""
    begun, over = Future(), Future()

    async def life():
        loop, end = asyncio.get_running_loop(), asyncio.Event()
        async with listening(await make()) as server:
            begun.set_result((server, lambda: loop.call_soon_threadsafe(end.set)))
            await end.wait()

    def run():
        try:
            over.set_result(asyncio.run(life()))
        except BaseException as error:
            (over if begun.done() else begun).set_exception(error)

    thread = threading.Thread(target=run, name="test-server", daemon=True)
    thread.start()
    server, end = begun.result(PATIENCE)
    try:
        yield server
    finally:
        end()
        over.result(PATIENCE)
        thread.join(PATIENCE)


async def connect(server, **options):
    """Reader and writer of a new connection to a Server. options: of asyncio.open_connection."""
    where = httpx.URL(server.address)
    return await asyncio.open_connection(where.host, where.port, **options)


async def eventually(condition, seconds=1.0):
    """Wait until the condition holds, for at most so long."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        await asyncio.sleep(0.005)


def strict(text):
    """Parse JSON; what JSON does not have (NaN, Infinity) is an error."""

    def refuse(constant):
        raise AssertionError(f"{constant} in JSON")

    return json.loads(text, parse_constant=refuse)
