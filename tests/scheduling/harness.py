"""A scheduler over a fake device, small enough to see every number."""

from collections import deque

from attrs import define, field

from tests.fakes import FakeFlight, FakeRunner
from tinyserve.kv.cache import KVCache
from tinyserve.kv.groups import KVGroup
from tinyserve.request import FinishReason, Request, SamplingParams
from tinyserve.scheduling.scheduler import Scheduler, Update

EOS = 1


@define
class Options:
    """The user's choices, with small defaults."""

    max_num_batched_tokens: int = 16
    max_num_seqs: int = 4
    scheduling_policy: str = "fcfs"
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None


@define
class Answer:
    """All that was reported about one request."""

    tokens: list[int] = field(factory=list)
    updates: list[Update] = field(factory=list)

    @property
    def reason(self) -> FinishReason | None:
        return self.updates[-1].finish_reason if self.updates else None


def kv_groups(windows=(None,)):
    """A group of one layer for each window; None: full. A number below 0 means chunks of that size."""
    limits = [(window, None) if window is None or window > 0 else (None, -window) for window in windows]
    return tuple(KVGroup(index, window, (index,), chunk) for index, (window, chunk) in enumerate(limits))


def request(name="a", prompt=5, max_tokens=4, *, salt=None, priority=0, arrival=0.0, eos=(), **sampling):
    """A greedy request; prompt: token ids, or how many (then they are unlike those of any other name)."""
    ids = tuple(prompt) if not isinstance(prompt, int) else tuple((hash_of(name) + i) % 1000 for i in range(prompt))
    params = SamplingParams(temperature=0, max_tokens=max_tokens, **sampling)
    return Request(
        id=name, prompt_ids=ids, sampling=params, eos_ids=eos, cache_salt=salt, priority=priority, arrival=arrival
    )


def hash_of(name: str) -> int:
    return sum((i + 1) * 37 * ord(letter) for i, letter in enumerate(name))


class Lab:
    """Scheduler, cache and fake device, driven by hand or to the end.

    blocks: usable ones (the null block comes on top).   depth: most flights.   device: more arguments of FakeRunner.
    """

    def __init__(
        self, *, blocks=100, block_size=4, windows=(None,), depth=1, context=200, caching=True, device=None, rows=None,
        drafter=None, adapters=None, **options,
    ):  # fmt: skip
        groups = kv_groups(windows)
        self.options = Options(**options)
        self.cache = KVCache(groups, blocks + 1, block_size, enable_prefix_caching=caching)
        self.scheduler = Scheduler(
            self.options, self.cache, max_model_len=context, slots=rows, drafter=drafter, adapters=adapters
        )
        self.runner = FakeRunner(
            groups, blocks + 1, block_size, slots=rows or self.options.max_num_seqs,
            max_tokens=self.options.max_num_batched_tokens, max_seqs=self.options.max_num_seqs, **(device or {}),
        )  # fmt: skip
        self.depth = depth
        self.flying: deque[FakeFlight] = deque()
        self.answers: dict[str, Answer] = {}

    def add(self, *args, **kwargs) -> Request:
        made = args[0] if args and isinstance(args[0], Request) else request(*args, **kwargs)
        self.scheduler.add(made)
        self.answers[made.id] = Answer()
        return made

    def plan(self, *crowd):
        """Plan and launch one step; the step, or None."""
        step = self.scheduler.plan(*crowd)
        self.scheduler.check_integrity()
        if step is not None:
            self.flying.append(self.runner.launch(step))
        return step

    def commit(self) -> list[Update]:
        """Land the oldest flight."""
        updates = self.scheduler.commit(self.flying.popleft().output)
        self.scheduler.check_integrity()
        for update in updates:
            answer = self.answers[update.request_id]
            assert answer.reason is None, "an update after the last one"
            answer.updates.append(update)
            answer.tokens += update.token_ids
        return updates

    def step(self) -> list[Update]:
        """What the engine's loop does in one turn."""
        while len(self.flying) < self.depth and self.plan():
            pass
        return self.commit() if self.flying else []

    def run(self, most=2000) -> dict[str, Answer]:
        """Turn the loop until nothing is left to do."""
        for _ in range(most):
            if not self.scheduler.has_work:
                return self.answers
            self.step()
        raise AssertionError(f"still working after {most} steps: {list(self.scheduler._sequences.values())}")

    def right(self, made: Request) -> list[int]:
        """The answer of `made` when it is alone and nothing is cached."""
        count = min(made.sampling.max_tokens, self.scheduler.max_length - len(made.prompt_ids))
        return self.runner.answer(made.prompt_ids, count, made.end_ids)

    @property
    def preemptions(self) -> int:
        return self.scheduler.stats().preemptions
