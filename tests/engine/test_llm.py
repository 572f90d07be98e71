"""llm.py: vLLM's arguments in, vLLM's result objects out; a thread and a loop of its own underneath."""

import asyncio
import contextlib
import copy
import gc
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest

from tinyserve.engine.engine import Engine
from tinyserve.engine.llm import LLM, prompt_list
from tinyserve.errors import ConfigError, ContextLengthExceeded, EngineDead, RequestError, TinyserveError
from tinyserve.request import BeamSearchParams, SamplingParams
from tinyserve.text.template import ChatTemplate

from .toy import EOS, ToyRunner, letters, machine, make_parts, script, tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=6)
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def make(rule=letters, *, runner=None, **options):
    parts = make_parts(template=ChatTemplate(TEMPLATE), default_sampling={"temperature": 0.0})
    _, made = machine(rule, runner=runner, **options)
    return LLM("toy", parts=parts, machine=made)


def quiet(llm, prompts, params=GREEDY, **options):
    return llm.generate(prompts, params, use_tqdm=False, **options)


def test_results_come_in_the_order_of_the_prompts():
    """Three prompts in one call equal the three alone, field by field."""
    with make() as llm:
        prompts = ["one", [97, 98], {"prompt": "three", "cache_salt": "s"}]
        together = quiet(llm, prompts)
        alone = [quiet(llm, prompt)[0] for prompt in prompts]

    assert [r.outputs[0].text for r in together] == [r.outputs[0].text for r in alone]
    assert [r.prompt for r in together] == ["one", None, "three"]
    assert [r.prompt_token_ids for r in together][1] == [97, 98]
    first = together[0]
    assert first.finished and first.outputs[0].finished()
    assert (first.outputs[0].finish_reason, len(first.outputs[0].token_ids)) == ("length", 6)
    assert first.metrics.num_generation_tokens == 6 and first.num_cached_tokens == 0


def test_parameters_for_each_prompt_or_for_all():
    with make() as llm:
        each = quiet(llm, ["a", "b"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3)])
        assert [len(r.outputs[0].token_ids) for r in each] == [1, 3]
        assert len(quiet(llm, "a", None)[0].outputs[0].token_ids) == 16
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0)
        with pytest.raises(RequestError, match="2 prompts, but 1"):
            quiet(llm, ["a", "b"], [GREEDY])
        assert llm.get_tokenizer() is tokenizer()


def test_several_answers_and_logprobs():
    """n=2: two outputs with indexes; cumulative_logprob is the sum over the sampled tokens."""
    with make() as llm:
        result = quiet(llm, "a", SamplingParams(n=2, seed=3, max_tokens=4, logprobs=2, prompt_logprobs=1))[0]

    assert [output.index for output in result.outputs] == [0, 1]
    for output in result.outputs:
        chosen = [entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
        assert output.cumulative_logprob == pytest.approx(sum(chosen))
    assert result.prompt_logprobs == [None]


def test_one_bad_prompt_raises_before_anything_runs():
    runner = ToyRunner(letters)
    with make(runner=runner) as llm:
        with pytest.raises(ContextLengthExceeded):
            quiet(llm, ["fine", "x" * 300])
        assert runner.steps == 0


def test_chat_renders_one_or_many_conversations():
    with make(script(104, 105)) as llm:
        turn = [{"role": "user", "content": "Hi"}]
        one = llm.chat(turn, GREEDY, use_tqdm=False)
        many = llm.chat([turn, turn], GREEDY, use_tqdm=False, add_generation_prompt=False)

    assert (one[0].prompt, one[0].outputs[0].text) == ("[user]Hi[assistant]", "hi")
    assert one[0].outputs[0].token_ids == [104, 105, EOS]
    assert [r.prompt for r in many] == ["[user]Hi"] * 2


def test_beam_search_returns_sequences():
    with make() as llm:
        found = llm.beam_search(["a", "b"], BeamSearchParams(beam_width=2, max_tokens=3), concurrency_limit=1)

    assert [len(one.sequences) for one in found] == [2, 2]
    assert found[0].sequences[0].text.startswith("a") and len(found[0].sequences[0].tokens) == 4


def test_embed_gives_a_vector_for_each_prompt():
    """The toy's hidden state is (last token id, 1)."""
    with make() as llm:
        found = llm.embed(["ab", [98], "ba"], use_tqdm=False)
        (raw,) = llm.embed("b", use_tqdm=False, normalize=False)

    assert list(raw.outputs.embedding) == [98, 1] and raw.prompt_tokens == 1
    vectors = [one.outputs.embedding for one in found]
    assert (vectors[0] == vectors[1]).all() and (vectors[0] != vectors[2]).any()
    assert [float(vector @ vector) for vector in vectors] == pytest.approx([1, 1, 1])


def test_it_works_inside_a_running_loop():
    """As in Jupyter: the calling thread's loop runs already, and nothing is patched."""

    async def notebook():
        with make() as llm:
            return quiet(llm, "a")[0].outputs[0].text

    with make() as llm:
        assert asyncio.run(notebook()) == quiet(llm, "a")[0].outputs[0].text


def test_several_threads_may_call_at_once():
    with make() as llm:
        texts = {}
        threads = [
            threading.Thread(target=lambda n=n: texts.update({n: quiet(llm, f"p{n % 2}")[0].outputs[0].text}))
            for n in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert len(texts) == 6 and texts[0] == texts[2] == texts[4]


@pytest.fixture
def interruptible():
    """Python's own answer to SIGINT: test processes that run in parallel ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_aborts_the_requests_and_leaves_the_engine_usable(interruptible):
    """Ctrl-C after 0.2 s of an answer that would take 4 s: out within 2 s, nothing runs, the next call works."""
    runner = ToyRunner(letters, seconds=0.02)
    with make(runner=runner) as llm:
        main = threading.main_thread().ident
        threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            quiet(llm, "a", SamplingParams(temperature=0, max_tokens=200))
        assert time.monotonic() - start < 2
        time.sleep(0.2)
        assert not llm.engine.machine.scheduler.has_work
        assert len(quiet(llm, "a")[0].outputs[0].token_ids) == 6


def test_an_interrupt_while_loading_leaves_nothing_behind(interruptible, monkeypatch, capfd):
    """Python said "Task was destroyed but it is pending!" of the start under the traceback."""
    loading, main = threading.Event(), threading.main_thread().ident

    async def start(*_, **__):
        loading.set()
        threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
        await asyncio.sleep(60)

    monkeypatch.setattr(Engine, "start", start)
    with pytest.raises(KeyboardInterrupt):
        LLM("nothing")
    assert loading.is_set() and not [t for t in threading.enumerate() if t.name == "tinyserve-llm"]
    gc.collect()
    assert "destroyed" not in capfd.readouterr().err


def test_a_dead_engine_raises_its_cause():
    with make(runner=ToyRunner(letters, fail_at=2)) as llm, pytest.raises(EngineDead, match="fell off the bus"):
        quiet(llm, ["a", "b"])


def test_the_progress_bar_counts_prompts_and_tokens():
    made = []

    class Bar:
        def __init__(self, total, **_):
            self.total, self.n, self.text, self.closed = total, 0, "", False
            made.append(self)

        def set_postfix_str(self, text, refresh):
            self.text = text

        def update(self, count):
            self.n += count

        def close(self):
            self.closed = True

    with make() as llm:
        llm.generate(["a", "b", "c"], GREEDY, use_tqdm=Bar)

    bar = made[0]
    assert (bar.total, bar.n, bar.closed) == (3, 3, True)
    assert "in " in bar.text and "out " in bar.text and "tok/s" in bar.text


def test_close_ends_the_thread_and_frees_the_engine():
    llm = make()
    thread = llm._background._thread
    engine = weakref.ref(llm.engine)
    llm.close()
    gc.collect()

    assert not thread.is_alive() and engine() is None
    with pytest.raises(TinyserveError, match="closed"):
        quiet(llm, "a")
    llm.close()


def test_forgetting_an_llm_closes_it():
    llm = make()
    thread = llm._background._thread
    del llm
    gc.collect()
    thread.join(5)

    assert not thread.is_alive()


def test_an_llm_that_the_collector_finds_in_a_thread_of_its_own_is_closed():
    """It waited for itself there, and nothing was collected any more in the whole process."""
    llm = make()
    thread, loop = llm._background._thread, llm._background._loop
    cycle = [llm]
    cycle.append(cycle)
    gc.collect()
    gc.disable()
    try:
        del llm, cycle
        loop.call_soon_threadsafe(gc.collect)
        thread.join(5)
    finally:
        gc.enable()

    assert not thread.is_alive()


def test_a_call_from_the_engines_own_thread_is_refused():
    """It would wait for itself, and every other call for it. The LLM stays usable, and can be closed."""
    with make() as llm:
        told = queue.SimpleQueue()

        def ask(call):
            try:
                call()
            except TinyserveError as error:
                told.put(str(error))

        for call in (lambda: quiet(llm, "a"), llm.close):
            llm._background._loop.call_soon_threadsafe(ask, call)
            assert "from its own thread" in told.get(timeout=5)
        assert len(quiet(llm, "a")) == 1


LEFT_OPEN = """
import os, sys
from tests.engine.test_llm import make, quiet
llm = make()
print(len(quiet(llm, "a")[0].outputs[0].token_ids), flush=True)
if sys.argv[1] == "raise":
    raise ValueError("the user's mistake")
if sys.argv[1] == "fork":
    child = os.fork()
    if child == 0:
        try:
            quiet(llm, "a")
        except Exception as error:
            print(type(error).__name__, error, flush=True)
        sys.exit(7)
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def left_open(how):
    """A process that uses an LLM and never closes it."""
    return subprocess.run(
        [sys.executable, "-c", LEFT_OPEN, how], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("how", ["end", "raise"])
def test_an_llm_left_open_ends_with_the_interpreter(how):
    """Breaks if anything but the user's own error is printed at exit: executors take no work then."""
    done = left_open(how)

    assert done.stdout == "6\n"
    assert done.stderr.count("Traceback") == (how == "raise") and "futures" not in done.stderr
    assert done.returncode == (how == "raise")


def test_a_forked_process_is_told_that_it_has_no_engine():
    """Breaks if the child waits for a thread that only its parent has, in generate or at its exit."""
    done = left_open("fork")

    assert "TinyserveError This LLM belongs to the process that made it" in done.stdout
    assert done.stdout.endswith("child 7\n") and "Traceback" not in done.stderr


def test_an_llm_cannot_be_pickled_or_copied():
    with make() as llm:
        for misuse in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TinyserveError, match="cannot be pickled or copied"):
                misuse(llm)


def test_what_a_bar_of_ones_own_does_is_the_callers_own_affair():
    """It ran in the engine's thread: leaving the program ended that, and using the LLM waited for itself, for ever."""

    class Bar:
        def __init__(self, **_):
            pass

        def set_postfix_str(self, text, refresh):
            pass

        def update(self, count):
            if count:
                self.act()

        def close(self):
            pass

    with make() as llm:
        Bar.act = lambda self: sys.exit(3)
        with pytest.raises(SystemExit):
            llm.generate(["a", "b"], GREEDY, use_tqdm=Bar)
        inner = []
        Bar.act = lambda self: inner.append(quiet(llm, "a"))
        assert len(llm.generate(["a", "b"], GREEDY, use_tqdm=Bar)) == len(inner) == 2
        Bar.act = lambda self: llm.close()
        with contextlib.suppress(TinyserveError):  # the last answer may have been complete
            llm.generate(["a", "b"], GREEDY, use_tqdm=Bar)


def test_a_call_that_a_close_cuts_off_is_an_error_of_ours():
    """It was a CancelledError, which `except Exception` does not see; and what waits for the loop must not wait on."""
    with make() as llm:
        told, waits = [], threading.Event()

        async def long():
            waits.set()
            await asyncio.sleep(60)

        def ask():
            try:
                llm._background.run(long())
            except Exception as error:
                told.append(str(error))

        thread = threading.Thread(target=ask)
        thread.start()
        waits.wait(5)
        llm.close()
        thread.join(5)
        assert told == ["This LLM was closed."]


@pytest.mark.parametrize("wrong", [{"max_tokens": 3}, "x", 5, [SamplingParams(), {}]])
def test_parameters_of_another_type_are_refused(wrong):
    """They were an AttributeError; of a dict the keys were taken for one set each."""
    with make() as llm, pytest.raises(RequestError, match="must be a SamplingParams, got") as refused:
        quiet(llm, ["a", "b"], wrong)
    assert refused.value.param == "sampling_params"


@pytest.mark.parametrize("wrong", [b"xy", [b"x"], None, 5, [None], bytearray(b"x")])
def test_prompts_of_another_type_are_refused(wrong):
    """Bytes were taken for token ids."""
    with make() as llm, pytest.raises(RequestError, match=r"must be (a list of )?integers|needs a text"):
        quiet(llm, wrong)


def test_prompt_lists():
    assert prompt_list("a") == ["a"]
    assert prompt_list([1, 2]) == [[1, 2]]
    assert prompt_list([[1], [2]]) == [[1], [2]]
    assert prompt_list({"prompt": "a"}) == [{"prompt": "a"}]
    assert prompt_list([]) == []


def test_what_is_not_there_yet_says_so():
    with make() as llm:
        for call in (llm.encode, llm.sleep, llm.wake_up):
            with pytest.raises(TinyserveError, match="yet"):
                call()
        with pytest.raises(TinyserveError, match="lora_request"):
            quiet(llm, "a", lora_request="adapter")
        with pytest.raises(RequestError, match="padding"):
            quiet(llm, "a", tokenization_kwargs={"padding": True})
        assert llm.reset_prefix_cache() is True
    with pytest.raises(ConfigError, match="did you mean --max-model-len"):
        LLM("toy", max_model_length=5)


def test_an_engine_that_cannot_start_leaves_no_thread(monkeypatch):
    async def broken(*_, **__):
        raise ConfigError("no such device")

    monkeypatch.setattr(Engine, "start", broken)
    with pytest.raises(ConfigError, match="no such device"):
        LLM("toy")

    assert not [thread for thread in threading.enumerate() if thread.name == "tinyserve-llm"]


AFTER_MAIN = """
import sys, threading, time
from tests.engine.test_llm import GREEDY, SamplingParams, make, quiet

llm = make()
def work():
    threading.main_thread().join()
    time.sleep(0.1)
    texts = [quiet(llm, "x" * length)[0].outputs[0] for length in (3, 200)]
    print([(text.finish_reason, len(text.token_ids)) for text in texts], flush=True)

threading.Thread(target=work, daemon=len(sys.argv) > 1).start()
if len(sys.argv) > 1:
    threading.Thread(target=lambda: quiet(llm, "y", SamplingParams(max_tokens=200)), daemon=True).start()
    time.sleep(0.05)
"""


@pytest.mark.parametrize(("daemon", "printed"), [((), "[('length', 6), ('length', 6)]"), (("daemon",), "")])
def test_a_thread_may_outlive_the_main_thread(daemon, printed):
    """Python's pools take no work then, so the engine died under it. A daemon's call ends."""
    done = subprocess.run(
        [sys.executable, "-c", AFTER_MAIN, *daemon],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert (done.returncode, done.stdout.strip()) == (0, printed), done.stderr
    assert "EngineDead" not in done.stderr and "loop ended" not in done.stderr  # at most: this LLM was closed
