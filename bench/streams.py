"""How many streamed tokens a second one process can send, when the model costs nothing.

    python -m bench.streams [--connections 256] [--tokens 200] [--stream-interval 1] [--each] [--profile]

A real engine, scheduler and HTTP server around a runner that gives the same token to everybody at once, and clients in
another process that only count events. What remains is the front: scheduling, text, JSON, HTTP, sockets. The figure
that can be compared between machines is the processor time of the server per token. Because nothing is faster than this
runner, the loop soon sends the tokens of several steps together (engine/pace.py); with --each every token is an event.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import pstats
import sys
import time
from concurrent.futures import Future

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tinyserve import config
from tinyserve.cli.process import SWITCH_INTERVAL, keep_loaded
from tinyserve.engine.assemble import Machine
from tinyserve.engine.engine import Engine
from tinyserve.engine.parts import Parts
from tinyserve.kv.cache import KVCache
from tinyserve.kv.groups import KVGroup
from tinyserve.runner.flight import Flight
from tinyserve.scheduling.scheduler import Scheduler
from tinyserve.server.face import Service
from tinyserve.server.serve import Server, open_socket
from tinyserve.step import SliceOutput, StepOutput
from tinyserve.text.template import ChatTemplate
from tinyserve.text.tokenizer import Tokenizer as Words
from tinyserve.text.tokenizer import TokenizerFacts

CONTEXT, BLOCK = 4096, 64
WORD = 97


class Instant:
    """A runner whose every step is done when it is launched."""

    def launch(self, step):
        done: Future[StepOutput] = Future()
        pieces = tuple(SliceOutput(piece.slot, (WORD,) if piece.samples else ()) for piece in step.slices)
        done.set_result(StepOutput(step.step_id, pieces))
        return Flight(step.step_id, done)

    def improve(self):
        return False

    def close(self):
        pass


def words() -> Words:
    """A byte-level tokenizer, as most models have one."""
    letters = {chr(byte if 33 <= byte < 127 else 256 + byte): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return Words(tokenizer, TokenizerFacts(special_tokens={"eos_token": "<|end|>"}))


async def engine_of(settings: config.EngineConfig, template: ChatTemplate | None = None) -> Engine:
    resolved = settings.resolve("cpu")
    cache = KVCache((KVGroup(0, None, (0,)),), 256 * CONTEXT // BLOCK + 1, BLOCK, enable_prefix_caching=True)
    machine = Machine(
        scheduler=Scheduler(resolved.scheduler, cache, max_model_len=CONTEXT),
        runner=Instant(),
        cache=cache,
        vocab_size=320,
        max_model_len=CONTEXT,
        depth=1,
    )
    parts = Parts(
        model=None,
        tokenizer=words(),
        max_model_len=CONTEXT,
        eos_ids={256},
        served_names=("script",),
        template=template,
    )
    return await Engine.start(settings, parts=parts, machine=machine)


async def one_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> int:
    """Events of one stream. Reads whatever is there, and looks only for what marks an event."""
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
    )
    events = 0
    while data := await reader.read(2**16):
        events += data.count(b"data: ")
    writer.close()
    return events - 1  # [DONE]


def clients(port: int, connections: int, tokens: int, pipe) -> None:
    """What the other process does."""

    async def work():
        body = json.dumps({"prompt": "x", "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
        ends = [await asyncio.open_connection("127.0.0.1", port, limit=2**20) for _ in range(connections)]
        begin = time.monotonic()
        events = sum(await asyncio.gather(*(one_client(*end, body) for end in ends)))
        return events, time.monotonic() - begin

    pipe.send(asyncio.run(work()))


async def measure(connections: int, tokens: int, interval: int, each: bool, profile: bool) -> None:
    options = {"model": "script", "port": 0, "max_num_seqs": 256, "max_num_batched_tokens": 2048}
    settings = config.build({**options, "disable_log_stats": True, "stream_interval": interval})
    engine = await engine_of(settings)
    if each:
        engine.streams.pace.note = lambda *_: None
    server = Server(Service(settings, engine), open_socket(settings.server))
    await server.start()
    port = int(server.address.rsplit(":", 1)[1])
    ours, theirs = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(target=clients, args=(port, connections, tokens, theirs))
    other.start()
    profiler = cProfile.Profile() if profile else None
    while not engine.streams:
        await asyncio.sleep(0.001)
    begin, used = time.monotonic(), time.process_time()
    if profiler:
        profiler.enable()
    while not ours.poll():
        await asyncio.sleep(0.05)
    seconds, used = time.monotonic() - begin, time.process_time() - used
    if profiler:
        profiler.disable()
    events, wall = ours.recv()
    sent = connections * tokens
    other.join()
    await server.stop()
    print(
        f"{sent} tokens in {events} events over {connections} connections in {wall:.2f} s: {sent / wall:,.0f} a second"
    )
    print(
        f"the server took {used:.2f} s of processor time ({100 * used / seconds:.0f} %), {used / sent * 1e6:.1f} us a "
        f"token: {sent / used:,.0f} tokens a second with a core of its own"
    )
    if profiler:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--connections", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--stream-interval", type=int, default=1)
    parser.add_argument("--each", action="store_true")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL)
    keep_loaded()
    asyncio.run(measure(options.connections, options.tokens, options.stream_interval, options.each, options.profile))


if __name__ == "__main__":
    main()
