"""Bodies that come in chunks: as h11 reads them, and quickly."""

import json
import time

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases.lag import watched
from tests.served import connect
from tinyserve.server.spoken import HEADER_BYTES, Heard

from .conftest import FakeEngine, serving

HI = {"messages": [{"role": "user", "content": "Hi"}]}
CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
CHUNKED += b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("extension", [b"", b";a=b\r", b" \t"])
def test_a_body_in_tiny_chunks_is_read_quickly(run, extension):
    """60,000 chunks of a byte took the loop 4 s, and up to 0.7 s between two turns of everybody else."""
    body = json.dumps(HI).encode()
    filled = body + b" " * (60_000 - len(body))
    sent = b"".join(b"1%b\r\n%c\r\n" % (extension, byte) for byte in filled) + b"0\r\n\r\n"

    async def go():
        async with serving(FakeEngine()) as server:
            reader, writer = await connect(server)
            start = time.process_time()
            async with watched() as lag:
                writer.write(CHUNKED + sent)
                assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            assert time.process_time() - start < 1.5 and lag.worst < 0.2, lag
            writer.close()

    run(go())


def test_a_body_that_goes_on_in_tiny_chunks_is_refused(run):
    """2^16 chunks may be of any size; 16 MB of one byte each would be 16 million."""

    async def go():
        async with serving(FakeEngine()) as server:
            reader, writer = await connect(server)
            writer.write(CHUNKED + b"2\r\n  \r\n" * 70_000)
            answer = await reader.read()
            assert b" 413 " in answer and b"chunks" in answer
            writer.close()

    run(go())


def test_blanks_in_a_chunk_without_end_hold_nobody():
    """60,000 of them behind a semicolon, as an extension that goes on: 5 s, as each may begin a match."""
    heard = Heard(h11.SERVER, max_incomplete_event_size=HEADER_BYTES)
    heard.receive_data(CHUNKED + b"1;" + b" " * 60_000)
    start = time.process_time()
    assert isinstance(heard.next_event(), h11.Request) and heard.next_event() is h11.NEED_DATA
    assert time.process_time() - start < 0.3


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=12), st.data())
def test_chunks_are_those_of_h11_however_they_arrive(pieces, data):
    """Joined as they are in the body, whatever cuts there are between the reads; the next request stays whole."""
    wire = b"".join(b"%x%b\r\n%b\r\n" % (len(p), data.draw(st.sampled_from([b"", b";e", b" "])), p) for p in pieces)
    wire = CHUNKED + wire + b"0\r\na: b\r\n\r\nGET / HTTP/1.1"
    heard, found = Heard(h11.SERVER), b""
    while wire:
        cut = data.draw(st.integers(1, 60))
        heard.receive_data(wire[:cut])
        wire = wire[cut:]
        while (event := heard.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            found += event.data if isinstance(event, h11.Data) else b""
    assert found == b"".join(pieces) and heard.trailing_data[0] == b"GET / HTTP/1.1"


@pytest.mark.parametrize(
    "head", [b"0x1\r\nab", b"+1\r\na\r\n", b"1_0\r\n", b"1\r\nabc", b"-1\r\n", b"g\r\n", b" 1\r\na\r\n"]
)
def test_chunks_that_are_none_are_refused(run, head):
    """What int() takes and HTTP does not would let a second request be smuggled in."""

    async def go():
        engine = FakeEngine()
        async with serving(engine) as server:
            reader, writer = await connect(server)
            writer.write(CHUNKED + b"1\r\n{\r\n" + head)
            assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
            writer.close()

    run(go())
