"""`bench serve`: load on any server that speaks OpenAI's API, with vLLM's names for options and figures.

    python -m tinyserve bench serve --num-prompts 200 --max-concurrency 32 --input-len 512 --output-len 128
    python -m tinyserve bench serve --base-url http://host:8000 --endpoint chat --dataset-path chats.jsonl
    python -m tinyserve bench serve --request-rate 10 --burstiness 0.5 --goodput ttft:200 tpot:30

It waits until the server is ready, sends one request to see that all is well, then the load. Ctrl-C or SIGTERM ends it
and shows what was measured until then. The client's own processor time is shown too: near one core, it is what is
measured.

Before: load.py, figures.py.  After: cli/bench.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import orjson
from attrs import asdict

from ..config import client_api_key
from ..errors import ConfigError, EngineError
from ..options import nearest
from .client import Broken, Server
from .figures import METRICS, NAMES, check_writable, summary, table
from .load import Run, load, progress_bar, send_times
from .progress import sigterm_cancels
from .prompts import RANDOM_IDS, Prompt, random_prompts, read_prompts, size
from .requests import Endpoint, Record, ask

BACKENDS = {"openai": "completions", "vllm": "completions", "openai-chat": "chat"}
BUSY = 0.9  # share of a core at which the client, not the server, may be what is measured
SHOWN = 10  # errors


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"tinyserve bench serve: {message}")


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The options. Raises: ConfigError."""
    parser = _Parser(prog="tinyserve bench serve", description=__doc__.partition("\n")[0], allow_abbrev=False)
    where = parser.add_argument_group("server")
    where.add_argument("--base-url", metavar="URL", help="of the server, without /v1 [made of host and port]")
    where.add_argument("--host", default="127.0.0.1", help="[%(default)s]")
    where.add_argument("--port", type=int, default=8000, help="[%(default)s]")
    where.add_argument("--endpoint", help="chat, completions, or their path [completions]")
    where.add_argument("--backend", choices=BACKENDS, default="openai", help="vLLM's word: openai-chat means the chat")
    where.add_argument("--model", help="name to ask for [the first that is served]")
    where.add_argument("--api-key", help="[TINYSERVE_API_KEY]")
    where.add_argument("--header", nargs="*", default=[], metavar="NAME=VALUE", help="sent with every request")
    where.add_argument("--extra-body", type=json.loads, default={}, metavar="JSON", help="more fields of every request")
    where.add_argument(
        "--ready-check-timeout-sec", type=float, default=600, help="wait so long [%(default)s]; 0: do not"
    )
    what = parser.add_argument_group("requests")
    what.add_argument("--dataset-name", choices=("random", "custom"), help="custom: a file [random without one]")
    what.add_argument("--dataset-path", type=Path, metavar="FILE", help="JSONL with prompts or messages [random ids]")
    what.add_argument("--num-prompts", type=int, help="requests [1000, or the lines of the file]")
    lengths = {"type": size, "metavar": "N or N:M"}
    what.add_argument("--input-len", "--random-input-len", default=1024, help="tokens of a prompt [1024]", **lengths)
    what.add_argument("--output-len", "--random-output-len", default=128, help="tokens of an answer [128]", **lengths)
    what.add_argument("--random-text", action="store_true", help="random words in place of random token ids")
    what.add_argument("--random-vocab", type=int, default=RANDOM_IDS, help="random ids are below it [%(default)s]")
    what.add_argument("--ignore-eos", action="store_true", help="every answer gets its full length")
    what.add_argument("--temperature", type=float, help="0 is greedy [the server's default]")
    what.add_argument("--seed", type=int, default=0, help="of the prompts and their times [%(default)s]")
    when = parser.add_argument_group("load")
    when.add_argument("--request-rate", type=float, default=math.inf, help="requests a second [inf: all at once]")
    when.add_argument("--burstiness", type=float, default=1.0, help="shape of the gaps: 1 is Poisson [%(default)s]")
    when.add_argument("--max-concurrency", type=int, help="most requests that are open together")
    when.add_argument("--num-warmups", type=int, default=0, help="requests before it that are not measured")
    shown = parser.add_argument_group("figures")
    shown.add_argument("--goodput", nargs="*", default=[], metavar="ttft:MS", help="limits of ttft, tpot, e2el")
    shown.add_argument("--percentile-metrics", default="ttft,tpot,itl,e2el", help="to print [%(default)s]")
    shown.add_argument("--metric-percentiles", default="90,99", help="[%(default)s]")
    shown.add_argument("--output-json", type=Path, metavar="FILE", help="for the figures")
    shown.add_argument("--save-detailed", action="store_true", help="each request's times go there too")
    shown.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    options, rest = parser.parse_known_args(argv)
    if rest:
        close = nearest(
            rest[0].partition("=")[0], [name for action in parser._actions for name in action.option_strings]
        )
        parser.error(f"unrecognized argument {rest[0]}" + (f": did you mean {close}?" if close else "."))
    _check(options)
    return options


def _check(options: argparse.Namespace) -> None:
    """Turn lists into their values. Raises: ConfigError: one is wrong."""
    wrong = [
        name
        for name in ("num_prompts", "max_concurrency")
        if (number := getattr(options, name)) is not None and number < 1
    ]
    wrong += [name for name in ("request_rate", "burstiness", "random_vocab") if not getattr(options, name) > 0]
    if wrong:
        raise ConfigError(f"--{wrong[0].replace('_', '-')} must be above 0.")
    if not options.ready_check_timeout_sec >= 0:
        raise ConfigError("--ready-check-timeout-sec must be a number from 0 on.")
    if options.dataset_name and (options.dataset_name == "custom") != (options.dataset_path is not None):
        raise ConfigError("--dataset-name custom and --dataset-path FILE go together.")
    options.endpoint = options.endpoint or BACKENDS[options.backend]
    options.base_url = options.base_url or f"http://{options.host}:{options.port}"
    if bare := [pair for pair in options.header if "=" not in pair]:
        raise ConfigError(f"--header takes NAME=VALUE, got {bare[0]!r}.")
    if not all(text.isprintable() for text in (*options.header, options.api_key or "")):
        raise ConfigError("--header and --api-key must be printable text: a line of the request carries them.")
    if not isinstance(options.extra_body, dict):
        raise ConfigError("--extra-body must be a JSON object.")
    options.metrics = [name for name in options.percentile_metrics.split(",") if name]
    if unknown := set(options.metrics) - set(METRICS):
        raise ConfigError(f"--percentile-metrics: {sorted(unknown)[0]!r} is none of {', '.join(METRICS)}.")
    try:
        options.points = [float(point) for point in options.metric_percentiles.split(",") if point]
        pairs = [pair.split(":") for pair in options.goodput]
        options.limits = {name: float(value) for name, value in pairs}
    except ValueError:
        raise ConfigError("--metric-percentiles takes 50,99 and --goodput ttft:200 tpot:30 (milliseconds).") from None
    if not all(0 <= point <= 100 for point in options.points):
        raise ConfigError("--metric-percentiles must be between 0 and 100.")
    if unknown := set(options.limits) - set(NAMES):
        raise ConfigError(f"--goodput: {sorted(unknown)[0]!r} is none of {', '.join(NAMES)}.")


def prompts(options: argparse.Namespace) -> list[Prompt]:
    """What is to be asked, in order."""
    if options.dataset_path:
        length = options.output_len if isinstance(options.output_len, int) else options.output_len[1]
        return read_prompts(options.dataset_path, options.num_prompts, length)
    text = options.random_text or options.endpoint.endswith("chat/completions") or options.endpoint == "chat"
    count, sizes = options.num_prompts or 1000, (options.input_len, options.output_len)
    return random_prompts(count, *sizes, seed=options.seed, ids=options.random_vocab, text=text)


async def first_model(server: Server, seconds: float) -> str:
    """The first model that is served; waits until the server is ready. Raises: EngineError: it is not in time."""
    deadline = time.monotonic() + seconds
    told = False
    while True:
        body: list[bytes] = []
        try:
            head = await server.send("/v1/models", None, body.append)
            if head.status == 200:
                return orjson.loads(b"".join(body))["data"][0]["id"]
            problem = f"{head.status}: {b''.join(body)[:200].decode('utf-8', 'replace')}"
            if head.status in (401, 403):
                cure = " Give a key with --api-key, or set TINYSERVE_API_KEY." if head.status == 401 else ""
                raise EngineError(f"{server.url} refuses: {problem}{cure}")
        except Broken as error:
            problem = str(error)
        except (ValueError, LookupError, TypeError):
            problem = "/v1/models does not answer as OpenAI's API does"
        if time.monotonic() >= deadline:
            raise EngineError(f"{server.url} is not ready: {problem}")
        if not told:
            told = True
            print(f"waiting for {server.url}, {seconds:g} s at most ({problem}); Ctrl-C ends it", file=sys.stderr)
        await asyncio.sleep(0.5)


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure. Returns the figures. Raises: ConfigError; EngineError: the server is not there or refuses."""
    asked = prompts(options)
    key = options.api_key or client_api_key()
    headers = dict(pair.partition("=")[::2] for pair in options.header)
    if key:
        headers.setdefault("Authorization", f"Bearer {key}")
    server = Server(options.base_url, headers)
    model = options.model or await first_model(server, options.ready_check_timeout_sec)
    more = {"ignore_eos": True} if options.ignore_eos else {}
    if options.temperature is not None:
        more["temperature"] = options.temperature
    endpoint = Endpoint.of(options.endpoint, {"model": model, **more, **options.extra_body})
    bodies = [endpoint.body(prompt) for prompt in asked]
    if options.ready_check_timeout_sec:
        await ask(server, endpoint, bodies[0], first := Record())
        if first.error:
            raise EngineError(f"the first request failed, nothing was measured: {first.error}")
    warm = [ask(server, endpoint, bodies[i % len(bodies)], Record()) for i in range(options.num_warmups)]
    await asyncio.gather(*warm)
    times = send_times(len(bodies), options.request_rate, options.burstiness, options.seed)
    bar = progress_bar(len(bodies), shown=not options.disable_tqdm)
    with sigterm_cancels():
        found = await load(server, endpoint, bodies, times, limit=options.max_concurrency, bar=bar)
    server.close()
    return _result(options, model, len(bodies), found)


def _result(options: argparse.Namespace, model: str, count: int, found: Run) -> dict[str, Any]:
    rate = options.request_rate
    result: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "model_id": model,
        "num_prompts": count,
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": "inf" if math.isinf(options.burstiness) else options.burstiness,
        "max_concurrency": options.max_concurrency,
        "stopped": found.stopped,
        **summary(found.records, found.seconds, goodput=options.limits, points=options.points),
        "client_cpu_share": found.cpu / found.seconds,
        "errors": sorted({record.error for record in found.records if record.error})[:SHOWN],
    }
    if options.save_detailed:
        result["requests"] = [asdict(record) for record in found.records]
    return result


def main(argv: Sequence[str]) -> int:
    """Measure and report. Returns the exit code: 1 when no answer was whole, 130 after Ctrl-C."""
    options = arguments(argv)
    check_writable(options.output_json)
    result = asyncio.run(run(options))
    for error in result["errors"]:
        print(f"failed: {error}", file=sys.stderr)
    print(table(result, options.metrics))
    if result["client_cpu_share"] > BUSY:
        print("This client was busy all the time: the server may be able to do more than it measured.")
    if options.output_json is not None:
        options.output_json.write_text(json.dumps(result, indent=1) + "\n")
    return 130 if result["stopped"] else int(not result["completed"])
