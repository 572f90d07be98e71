"""A whole server per case: real app, engine, scheduler, runner and sampler around a scripted or a tiny random model.

async with serving(tiny()) as server:
    whole, stream = await server.both(TEXT, {"prompt": "x"})        # G3 - G6 are checked on the way
                                                                     # G1, G2 when the block ends
"""

import json
import math
import re
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers
from attrs import define, field, frozen
from tokenizers import processors

from tests.scripted import BOS, CONTEXT, EOS, TEMPLATE, VOCAB, ScriptModel, byte_tokenizer
from tests.served import eventually, in_process, listening, strict
from tinyserve import config
from tinyserve.checkpoint.source import resolve
from tinyserve.engine.engine import Engine
from tinyserve.engine.parts import Parts, choose_parsing
from tinyserve.server.face import Service
from tinyserve.text.generation import GenerationDefaults
from tinyserve.text.template import ChatTemplate
from tinyserve.text.tokenizer import Tokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
CONTROL = {"model": "tiny", "prompt": "control", "temperature": 0, "max_tokens": 2}
SAME_GAP = 1e-4  # below this difference of the two best logits, greedy answers may differ by rounding


# ---- answers


def check_error(body: Any) -> dict[str, Any]:
    """The error object of a body, in OpenAI's shape (G4)."""
    assert set(body) == {"error"}, body
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str) and error["type"]
    return error


@frozen
class Reply:
    """A JSON answer. seconds: from sending to having it."""

    status: int
    body: Any
    seconds: float = 0.0

    @property
    def error(self) -> dict[str, Any]:
        return check_error(self.body)

    @property
    def choices(self) -> list[dict[str, Any]]:
        assert self.status == 200, self.body
        return self.body["choices"]

    @property
    def usage(self) -> dict[str, int]:
        assert self.status == 200, self.body
        return self.body["usage"]

    @property
    def counts(self) -> tuple[int, int, int]:
        """Prompt, completion and total tokens."""
        return tuple(self.usage[f"{name}_tokens"] for name in ("prompt", "completion", "total"))

    @property
    def texts(self) -> list[str]:
        return [choice_text(choice) for choice in self.choices]

    @property
    def text(self) -> str:
        (text,) = self.texts
        return text

    @property
    def reasons(self) -> list[str]:
        return [choice["finish_reason"] for choice in self.choices]

    @property
    def reason(self) -> str:
        (reason,) = self.reasons
        return reason

    @property
    def logprobs(self) -> dict[str, Any]:
        return self.choices[0]["logprobs"]


def choice_text(choice: dict[str, Any]) -> str:
    """The text of a choice of either route, whole or streamed."""
    if "text" in choice:
        return choice["text"]
    return (choice["message"] if "message" in choice else choice["delta"]).get("content") or ""


@define
class Streamed:
    """A stream whose rules were checked (G5). error: of the error event that ended it, or None."""

    chunks: list[dict[str, Any]]
    error: dict[str, Any] | None = None
    deltas: dict[int, list[str]] = field(factory=dict)
    reasons: dict[int, str] = field(factory=dict)

    @classmethod
    def parse(cls, text: str) -> "Streamed":
        assert "\r" not in text
        blocks = text.split("\n\n")
        assert blocks.pop() == ""
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
        assert blocks.pop() == "data: [DONE]"
        found = [strict(block.removeprefix("data: ")) for block in blocks]
        stream = cls(found)
        if found and "error" in found[-1]:
            stream.error = check_error(stream.chunks.pop())
        stream._check()
        return stream

    def _check(self) -> None:
        assert len({(c["id"], c["created"], c["model"], c["object"]) for c in self.chunks}) <= 1
        for number, chunk in enumerate(self.chunks):
            if not chunk["choices"]:
                assert number == len(self.chunks) - 1 and chunk["usage"]
            for choice in chunk["choices"]:
                index = choice["index"]
                assert index not in self.reasons, "a choice went on after its finish reason"
                if "delta" in choice:
                    assert ("role" in choice["delta"]) == (index not in self.deltas), "the role comes first, once"
                self.deltas.setdefault(index, []).append(choice_text(choice))
                if choice["finish_reason"] is not None:
                    self.reasons[index] = choice["finish_reason"]
        if self.error is None:
            assert set(self.reasons) == set(self.deltas)

    @property
    def texts(self) -> list[str]:
        return ["".join(self.deltas[index]) for index in sorted(self.deltas)]

    @property
    def text(self) -> str:
        (text,) = self.texts
        return text

    @property
    def usage(self) -> dict[str, int] | None:
        return self.chunks[-1].get("usage")

    def logprobs(self, name: str, index: int = 0) -> list[Any]:
        """One of the lists of completions' logprobs, joined over the chunks."""
        found = [c for chunk in self.chunks for c in chunk["choices"] if c["index"] == index and c["logprobs"]]
        return [value for choice in found for value in choice["logprobs"][name]]


# ---- the server


class Client:
    """Talks to one server, in process or over its socket."""

    def __init__(self, engine: Engine, http: httpx.AsyncClient) -> None:
        self.engine = engine
        self.http = http

    @property
    def scheduler(self) -> Any:
        return self.engine.machine.scheduler

    async def ask(self, path: str, body: Any = None, *, content: bytes | str | None = None) -> Reply:
        """POST a body, or raw bytes called JSON; the answer is strict JSON, an error has the right shape."""
        start = time.monotonic()
        data = json.dumps(body) if content is None else content
        response = await self.http.post(path, content=data, headers={"content-type": "application/json"})
        return self.read(response, time.monotonic() - start)

    @staticmethod
    def read(response: httpx.Response, seconds: float = 0.0) -> Reply:
        assert response.headers["content-type"].startswith("application/json"), response.text
        reply = Reply(response.status_code, strict(response.content), seconds)
        assert reply.status == 200 or reply.error
        return reply

    async def stream(self, path: str, body: dict[str, Any]) -> Streamed:
        """POST with stream: true."""
        response = await self.http.post(path, json={**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return Streamed.parse(response.text)

    async def both(self, path: str, body: dict[str, Any]) -> tuple[Reply, Streamed]:
        """The same request whole and streamed: equal texts and finish reasons (G6)."""
        whole, stream = await self.ask(path, body), await self.stream(path, body)
        assert whole.texts == stream.texts
        assert whole.reasons == [stream.reasons[index] for index in sorted(stream.reasons)]
        assert [choice["index"] for choice in whole.choices] == list(range(len(whole.choices)))
        return whole, stream

    async def text(self, body: dict[str, Any]) -> str:
        """The text of the one choice, equal in both modes."""
        return (await self.both(TEXT, {"model": "tiny", **body}))[0].text

    async def refused(
        self, path: str, body: dict[str, Any] | None = None, status: int = 400, *, raw: str | None = None
    ) -> dict[str, Any]:
        """The error with which a request is refused, the same whole and streamed: no stream begins (G4).

        Args: raw: the body as JSON text, for what json.dumps cannot write.
        """
        text = json.dumps(body) if raw is None else raw
        streaming = re.sub(r"\}$", ', "stream": true}', text)
        errors = [await self.ask(path, content=content) for content in (text, streaming)]
        assert [reply.status for reply in errors] == [status, status], errors
        assert errors[0].error == errors[1].error
        return errors[0].error

    async def prompt_text(self, body: dict[str, Any], path: str = "/tokenize") -> str:
        """What a conversation looks like as a prompt."""
        ids = (await self.ids(body, path))["tokens"]
        return (await self.ask("/detokenize", {"model": "tiny", "tokens": ids})).body["prompt"]

    async def ids(self, body: dict[str, Any], path: str = "/tokenize") -> dict[str, Any]:
        reply = await self.ask(path, {"model": "tiny", **body})
        assert reply.status == 200, reply.body
        return reply.body

    async def metric(self, name: str, **labels: str) -> float:
        """The value of a metric, summed over all series with these labels."""
        found = [
            float(line.rsplit(" ", 1)[1])
            for line in (await self.http.get("/metrics")).text.splitlines()
            if re.match(rf"tinyserve:{name}(_total)?\{{", line)
            and all(f'{label}="{value}"' in line for label, value in labels.items())
        ]
        assert found, f"no metric {name}"
        return sum(found)

    def idle(self) -> bool:
        """Nothing runs or waits, every block is free (G2)."""
        scheduler, cache = self.scheduler, self.engine.machine.cache
        return (
            not scheduler.has_work
            and len(self.engine.streams) == 0
            and (scheduler.num_running, scheduler.num_waiting) == (0, 0)
            and cache.num_free == cache.num_blocks
        )

    async def settled(self, seconds: float = 1.0) -> None:
        """Wait until idle, then check that queues, rows and cache agree."""
        await eventually(self.idle, seconds)
        self.scheduler.check_integrity()

    async def control(self) -> str:
        """A request whose answer never changes (G1)."""
        return (await self.ask(TEXT, CONTROL)).text


OPTIONS = {
    "device": "cpu",
    "block_size": 16,
    "num_gpu_blocks_override": 101,
    "max_num_seqs": 8,
    "disable_log_stats": True,
    "use_tqdm_on_load": False,
    "served_model_name": ("tiny",),
    "enable_prompt_tokens_details": True,
}


@asynccontextmanager
async def serving(model: ScriptModel | Path, folder: Path | None = None, *, socket: bool = False, **options: Any):
    """A server, as a Client.

    Args:
        model: a scripted model, or the folder of a checkpoint.
        folder: where a scripted model's tokenizer and generation defaults are read from.
        socket: talk over a real socket (`client.address`), not in process.
    """
    if isinstance(model, Path):
        settings = config.build({"model": str(model), "port": 0, **OPTIONS, **options})
        engine = await Engine.start(settings)
    else:
        settings = config.build({"port": 0, **OPTIONS, **options})
        engine = await Engine.start(settings, parts=scripted_parts(model, folder, settings))
        model.attach(engine.machine.runner)
    try:
        async with _front(Service(engine.config, engine), socket) as http:
            client = Client(engine, http)
            usual = await client.control()
            await client.settled()
            yield client
            await client.settled()
            assert await client.control() == usual
            await client.settled()
    finally:
        await engine.close()


@asynccontextmanager
async def _front(service: Service, socket: bool):
    if not socket:
        async with in_process(service, timeout=60) as http:
            yield http
        return
    async with listening(service) as server, httpx.AsyncClient(base_url=server.address, timeout=60) as http:
        yield http


def recorded(client: Client) -> list[Any]:
    """Every step that is launched from now on."""
    steps: list[Any] = []
    runner = client.engine.machine.runner
    launch = runner.launch

    def wrapped(step: Any) -> Any:
        steps.append(step)
        return launch(step)

    runner.launch = wrapped
    return steps


# ---- models


def write_tokenizer(
    folder: Path,
    *,
    template: str = TEMPLATE,
    end: str = "<|eos|>",
    config_ends: Any = EOS,
    generation_ends: Any = EOS,
    add_bos: bool = False,
) -> Path:
    """TOK, the template and the end ids, as the files of a checkpoint."""
    tokenizer = byte_tokenizer()
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing("<|bos|> $A", special_tokens=[("<|bos|>", BOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {"bos_token": "<|bos|>", "eos_token": end, "chat_template": template}
    files = {
        "tokenizer_config.json": {**facts, "tokenizer_class": "PreTrainedTokenizerFast"},
        "generation_config.json": {} if generation_ends is None else {"eos_token_id": generation_ends},
    }
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values))
    path = folder / "config.json"
    known = json.loads(path.read_text()) if path.exists() else {"model_type": "scripted"}
    path.write_text(json.dumps({**known, "eos_token_id": config_ends}))
    return folder


def scripted_parts(model: ScriptModel, folder: Path, settings: config.EngineConfig) -> Parts:
    """Parts with a scripted model, and everything else read from the folder's files."""
    source = resolve(str(folder))
    tokenizer = Tokenizer.load(source)
    defaults = GenerationDefaults.load(source, tokenizer)
    return Parts(
        model=model,
        tokenizer=tokenizer,
        template=ChatTemplate(tokenizer.chat_template, special_tokens=tokenizer.facts.special_tokens),
        parsing=choose_parsing(settings, tokenizer),
        served_names=settings.model.served_model_name,
        max_model_len=CONTEXT,
        eos_ids=defaults.eos_ids,
        extra_eos_ids=defaults.extra_eos_ids,
        default_sampling=defaults.sampling,
    )


def write_tiny(folder: Path, **changes: Any) -> Path:
    """TINY: a random Llama in float32, seed 0, with TOK. Weights are large enough for clear winners."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.25,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**sizes | changes), dtype=torch.float32
    )
    model.save_pretrained(folder)
    return write_tokenizer(folder)


class Oracle:
    """TINY as transformers runs it."""

    def __init__(self, folder: Path) -> None:
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()

    def logits(self, ids: list[int]) -> torch.Tensor:
        """[T, V]"""
        with torch.inference_mode():
            return self.model(torch.tensor([ids])).logits[0]

    def logprob(self, ids: list[int], at: int) -> float:
        """Log-probability of ids[at] after those before it."""
        return self.logits(ids[:at]).log_softmax(-1)[-1, ids[at]].item()

    def greedy(self, ids: list[int], count: int) -> list[int]:
        """The `count` most likely next tokens; every step must have a clear winner, or the fixture is bad."""
        ids, start = list(ids), len(ids)
        for _ in range(count):
            best = self.logits(ids)[-1].topk(2)
            assert best.values[0] - best.values[1] > SAME_GAP, f"no clear winner after {ids}"
            ids.append(best.indices[0].item())
        return ids[start:]


def close(a: float, b: float) -> bool:
    return math.isclose(a, b, abs_tol=1e-4)
