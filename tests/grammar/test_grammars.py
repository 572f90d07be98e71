"""What each kind of grammar takes and refuses; how compiling is bounded, shared and waited for."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest
from attrs import evolve

from tests.scripted import END_THINK, EOS, THINK, VOCAB
from tinyserve.errors import Overloaded, RequestError
from tinyserve.grammar import compile, trial
from tinyserve.grammar.compile import Grammars
from tinyserve.grammar.line import WAIT_SECONDS, Compiled
from tinyserve.grammar.thought import Gate, Mode
from tinyserve.request import Request, SamplingParams
from tinyserve.runner.workers import Workers
from tinyserve.structured import Constraint, StructuredOutputsParams, Thought

from .harness import GRAMMARS, TOKENIZER, allowed, ids, matcher, takes

NUMBERS = {"type": "array", "items": {"type": "integer"}}
NAMED = '{"type": "object", "properties": {"dependencies": {"type": "integer"}}}'  # like a keyword
TAG = {
    "structures": [
        {"begin": "<f>", "schema": {"enum": [1, 2]}, "end": "</f>"},
        {"begin": "<g>", "schema": {}, "end": ""},
    ],
    "triggers": ["<f", "<g>"],
}
CASES = [
    ({"regex": "a+b?"}, ["a", "aaab"], ["", "b", "abb", "ba"]),
    ({"choice": ["yes", "no", 'a "b"\n']}, ["yes", "no", 'a "b"\n'], ["", "ye", "yesno"]),
    ({"grammar": 'start: "x" digits\ndigits: /[0-9]+/'}, ["x1", "x23"], ["x", "1", "x1y"]),
    ({"grammar": 'root ::= "a" tail*\ntail ::= "b" | [0-9]'}, ["a", "ab1"], ["", "b", "ac"]),
    ({"grammar": f"start: %json {NAMED}"}, ['{"dependencies": 1}'], ['{"dependencies": "1"}']),
    ({"grammar": 'start: "%json {" "lenient"'}, ["%json {lenient"], ["%json {"]),
    ({"json_object": True}, ["{}", '{"a": [1, null]}'], ["[]", "1", ""]),
    ({"json": {**NUMBERS, "maxItems": 2}}, ["[]", "[1, 2]"], ["[1,2,3]", "[1.5]"]),
    ({"json": '{"const": "é"}'}, ['"é"'], ['"e"']),
    ({"json": {**NUMBERS, "uniqueItems": False}}, ["[1, 1]"], ["[1.5]"]),
    ({"json": True}, ["1", '{"a":[]}'], ["a"]),
    ({"structural_tag": TAG}, ["free", "x <f>1</f> y <g>{}"], ["<f>3</f>", "<f>1 "]),
    (
        {"structural_tag": {"format": {"type": "sequence", "elements": [
            {"type": "const_string", "value": "say "},
            {"type": "tags_with_separator", "separator": ",", "at_least_one": True, "tags": [
                {"begin": "(", "content": {"type": "regex", "pattern": "[a-c]+"}, "end": ")"}]},
        ]}}},
        ["say (a)", "say (a),(bc)"], ["say ", "(a)", "say (a)(b)"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("form", "good", "bad"), CASES)
def test_what_a_grammar_takes(form, good, bad):
    assert [takes(text, **form) for text in good] == [True] * len(good)
    assert [takes(text, **form) for text in bad] == [False] * len(bad)


def test_blanks_and_digits_are_bounded():
    """One space, or a line break and at most 16 blanks; a number of at most 40 digits, a string of any length."""
    form = {"json": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "string"}}}}
    assert takes('{ "a": 1,\n  "b": "" }', **form)
    assert not takes('{  "a": 1}', **form) and not takes('{\n\n"a": 1}', **form)
    assert takes('{"a": ' + "1" * 40 + "}", **form) and not takes('{"a": ' + "1" * 41 + "}", **form)
    assert takes('{"a": 0.' + "1" * 40 + "}", **form) and not takes('{"a": 0.' + "1" * 41 + "}", **form)
    assert takes('{"b": "' + "1" * 90 + '"}', **form)
    assert takes('{"a": 1}', disable_any_whitespace=True, **form)
    assert not takes('{ "a": 1}', disable_any_whitespace=True, **form)
    closed = {"json": {"type": "object", "properties": {"a": {}}}}
    assert takes('{"z": 1}', **closed) and not takes('{"z": 1}', disable_additional_properties=True, **closed)


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "(?=x)"}, {"json": {"type": "object", "uniqueItems": True}}, {"json": "{"}, {"grammar": "start: a"},
        {"json": {"enum": []}}, {"json": {"type": 5}}, {"structural_tag": {"format": {"type": "nope"}}},
        {"regex": "a" * 300000}, {"grammar": 'start: %json {"type": "array", "unevaluatedItems": false}'},
        {"grammar": 'start: %json {"items": {"dependen\\u0063ies": {}}}'}, {"grammar": "start: %json {'a': 1}"},
        {"grammar": 'start: %json {"x-guidance": {"lenient": true}, "uniqueItems": true}'},
        {"structural_tag": {"structures": [{"begin": "<f>"}], "triggers": ["<g"]}}, {"structural_tag": "{"},
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_its_field(form):
    with pytest.raises(RequestError) as caught:
        GRAMMARS.compiled(StructuredOutputsParams(**form, source="field").constraint()).result(20)
    assert caught.value.param == "field"


def test_deep_schemas_are_refused():
    schema = {"type": "string"}
    for _ in range(70):
        schema = {"type": "array", "items": schema}
    with pytest.raises(RequestError, match="64 levels"):
        GRAMMARS.compiled(StructuredOutputsParams(json=schema).constraint()).result(20)


MANY = [f"a.{{{number}}}b" for number in range(100)]
TOO_MUCH = [
    {"json": {"allOf": [{"type": "string", "pattern": pattern} for pattern in MANY]}},
    {"json": {"type": "integer", "multipleOf": 1234567}},
    {"grammar": "start: X\nX: " + " & ".join(f"/(.|\\n)*{pattern}(.|\\n)*/" for pattern in MANY[:24])},
]


def test_grammars_that_take_too_much_are_refused_and_nobody_waits(monkeypatch):
    """Each took a thread for minutes and up to 20 GB; now none more than its seconds, and others have milliseconds."""
    monkeypatch.setattr(compile, "QUICK_SECONDS", 0.1)
    monkeypatch.setattr(compile, "SECONDS", 0.4)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    waiting = [GRAMMARS.compiled(StructuredOutputsParams(**form, source="field").constraint()) for form in TOO_MUCH]
    for future in waiting:
        with pytest.raises(RequestError, match=r"takes more than 0\.4 seconds or 256 MB") as caught:
            future.result(60)
        assert caught.value.param == "field"
        assert takes("a", choice=["a", f"b{id(future)}"])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 100 * 1024, "KB"


def test_large_grammars_are_no_hostile_ones():
    """8192 choices and 2000 properties, of which a row of the library's parser held 2000; what fails later is told."""
    choices = [f"choice number {number}" for number in range(8192)]
    assert takes(choices[-1], choice=choices) and not takes("choice number", choice=choices)
    wide = {"type": "object", "properties": {f"k{number}": {"type": "string"} for number in range(2000)}}
    assert takes('{"k7": "x", "k1999": ""}', json=wide)
    branches = [{"type": "object", "properties": {f"k{number}": {"type": "integer"}}} for number in range(1500)]
    with pytest.raises(RequestError, match="16500 alternatives may come at one place"):
        GRAMMARS.compiled(StructuredOutputsParams(json={"anyOf": branches}).constraint()).result(20)


@pytest.mark.parametrize(
    "endless", [{"json": {"$ref": "#"}}, {"grammar": "root ::= root"}, {"json": {"allOf": [{"$ref": "#"}]}}]
)
def test_a_grammar_that_leads_back_to_itself_is_told_so(endless):
    """It was "NoExtensionBias"."""
    with pytest.raises(RequestError, match="leads back to itself"):
        GRAMMARS.compiled(StructuredOutputsParams(**endless).constraint()).result(20)


def test_an_error_shows_nothing_of_the_grammar_made_for_it():
    """It went on with "2 | start: part_4 3 | FREE: ...", which nobody had sent."""
    for wrong, told in (
        ({"json": {"type": "nope"}}, "type is 'nope'; it must be one of"),
        ({"regex": "["}, "character class$"),
    ):
        with pytest.raises(RequestError, match=told):
            GRAMMARS.compiled(StructuredOutputsParams(**wrong).constraint()).result(20)


def test_the_cache_is_bounded_in_bytes(monkeypatch):
    """A grammar of some megabytes makes older ones leave."""
    monkeypatch.setattr(compile, "CACHED_BYTES", 4 * 2**20)
    first = StructuredOutputsParams(choice=["first"]).constraint()
    kept = GRAMMARS.compiled(first)
    kept.result(20)
    large = GRAMMARS.compiled(StructuredOutputsParams(json={"enum": [f"v{n}" for n in range(20000)]}).constraint())
    large.result(20)
    assert large.bytes > 4 * 2**20
    GRAMMARS.compiled(StructuredOutputsParams(choice=["last"]).constraint()).result(20)
    assert GRAMMARS.compiled(first) is not kept


def letter(which):
    return Constraint(kind="regex", value=which)


def test_a_child_that_was_killed_while_idle_is_nobodys_fault():
    """The first grammar after an interrupt from the terminal was "more than 3 seconds or 256 MB", and stayed so."""
    tried = trial.Trial(VOCAB, {}, (EOS,))
    try:
        assert tried.run(letter("a"), 3.0).error == ""
        before = tried._child
        assert os.getpgid(before.pid) != os.getpgid(0)  # where such an interrupt does not reach it
        before.kill()
        before.wait()
        assert tried.run(letter("b"), 3.0).error == ""
        assert tried._child is not before
    finally:
        tried.close()


def test_a_limit_of_addresses_that_is_there_already_stays(monkeypatch):
    """Raising it is forbidden, and macOS refuses any: each grammar was "more than 256 MB" then."""
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 200))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append((kind, limits)))
    trial._bound(300)
    assert asked == [(resource.RLIMIT_AS, (200, 200)), (resource.RLIMIT_CORE, (0, 0))]

    def refuse(kind, limits):
        if kind == resource.RLIMIT_AS:
            raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    trial._bound(150)


def test_what_needs_a_deep_stack_ends_the_child():
    """2,500 rules that lead to each other passed, and the process of the parent ended where its threads have 2 MB.

    They pass now, where they are compiled with more stack than in the trial; more end the trial.
    """
    tried = trial.Trial(VOCAB, {}, (EOS,))
    chains = ["\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(n)), f'r{n}: "a"']) for n in (2000, 6000)]
    try:
        assert tried.run(Constraint(kind="grammar", value=chains[0]), 3.0).error == ""
        assert GRAMMARS.compiled(StructuredOutputsParams(grammar=chains[0]).constraint()).result(60)
        with pytest.raises(trial.TooMuch, match="too deep"):
            tried.run(Constraint(kind="grammar", value=chains[1]), 3.0)
        assert tried.run(letter("a"), 3.0).error == ""
    finally:
        tried.close()


def test_the_child_finds_its_libraries_and_no_secrets(monkeypatch):
    """Its environment was empty: Python built with shared libraries elsewhere, or on Windows, did not start."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/lib")
    monkeypatch.setenv("TINYSERVE_API_KEY", "sesame")
    tried = trial.Trial(VOCAB, {}, (EOS,))
    try:
        assert tried.run(letter("a"), 3.0).error == ""
        told = Path(f"/proc/{tried._child.pid}/environ").read_bytes()
        assert b"LD_LIBRARY_PATH=/opt/lib" in told and b"sesame" not in told
    finally:
        tried.close()


def test_a_system_that_bounds_no_process_tries_grammars_too(monkeypatch):
    """Windows has neither `resource` nor timers of signals nor polls of pipes; importing the engine failed there."""
    code = "import sys; sys.modules['resource'] = None; import tinyserve.grammar.compile"
    subprocess.run([sys.executable, "-c", code], check=True)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "resource", None)
        patched.delattr(trial.signal, "setitimer")
        trial._alarm(1.0), trial._bound(100)
        assert trial._memory() >= 0


def test_a_child_that_does_not_answer_is_ended(monkeypatch):
    """The parent's patience is all there is where a process cannot bound itself: 0.2 s here, and the next one works."""
    tried = trial.Trial(VOCAB, {}, (EOS,))
    try:
        assert tried.run(letter("a"), 3.0).error == ""
        os.killpg(tried._child.pid, signal.SIGSTOP)
        monkeypatch.setattr(trial, "START_SECONDS", 0.2)
        monkeypatch.setattr(trial, "PATIENCE", 0.0)
        with pytest.raises(trial.TooMuch):
            tried.run(letter("b"), 3.0)
        monkeypatch.undo()
        assert tried.run(letter("c"), 3.0).error == ""
    finally:
        tried.close()


def test_another_twin_is_ready_behind_a_grammar_that_went_too_far():
    """Each hostile grammar cost the next one the start of a process, too: 0.3 s in the one queue of all."""
    tried = trial.Trial(VOCAB, {}, (EOS,))
    hostile = Constraint(kind="json", value={"type": "integer", "multipleOf": 1234567})
    try:
        assert tried.run(letter("a"), 3.0).error == ""
        before = tried._child
        for text in "bcd":
            with pytest.raises(trial.TooMuch, match=r"more than 0\.05 seconds"):
                tried.run(hostile, 0.05)
            assert tried.run(letter(text), 3.0).error == "" and tried._child is before
        (twin,) = Path(f"/proc/{before.pid}/task/{before.pid}/children").read_text().split()
    finally:
        tried.close()
    assert before.poll() is not None
    ended(twin)


def ended(number):
    """Wait until a process has ended."""
    end = time.monotonic() + 30
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it is gone, perhaps just now
        while Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX":
            assert time.monotonic() < end
            time.sleep(0.01)


def test_a_twin_ends_with_its_child_and_with_the_pipe():
    """Nobody but the child knows of it: where that is killed, the end of the pipe tells."""
    tried = trial.Trial(VOCAB, {}, (EOS,))
    try:
        for end in (lambda child: child.kill(), lambda child: child.stdin.close()):
            assert tried.run(letter("a"), 3.0).error == ""
            before = tried._child
            (twin,) = Path(f"/proc/{before.pid}/task/{before.pid}/children").read_text().split()
            end(before)
            before.wait(30)
            assert tried.run(letter("b"), 3.0).error == "" and tried._child is not before
            ended(twin)
    finally:
        tried.close()


def test_a_twin_that_was_killed_while_idle_is_nobodys_fault():
    """What the child said of it was the answer of the next grammar, and that one's the answer of the one behind it."""
    tried = trial.Trial(VOCAB, {}, (EOS,))
    try:
        for text in "qxz":
            found = tried.run(letter(text), 3.0)
            assert found.error == "" and text in found.text
            twins = Path(f"/proc/{tried._child.pid}/task/{tried._child.pid}/children")
            (twin,) = twins.read_text().split()
            os.kill(int(twin), signal.SIGKILL)
            ended(twin)
    finally:
        tried.close()


def test_a_child_that_cannot_make_another_twin_is_started_again(monkeypatch):
    """It ends; that is no grammar's fault."""
    monkeypatch.setattr(trial, "_CODE", "import os, itertools; fork, count = os.fork, itertools.count()\n"
                        "os.fork = lambda: fork() if not next(count) else [][0]\n" + trial._CODE)  # fmt: skip
    tried = trial.Trial(VOCAB, {}, (EOS,))
    try:
        for _ in range(2):
            with pytest.raises(trial.TooMuch):
                tried.run(Constraint(kind="json", value={"type": "integer", "multipleOf": 1234567}), 0.05)
            with contextlib.suppress(trial.NoChild):  # it may be about to end
                tried.run(letter("a"), 3.0)
            tried._child is None or tried._child.wait(30)
            assert tried.run(letter("b"), 3.0).error == ""
    finally:
        tried.close()


def test_what_waited_for_others_is_not_to_blame():
    """A grammar that had not begun, or just had, was "make it simpler"."""
    wanted = StructuredOutputsParams(choice=["a"]).constraint()
    compiled = Compiled()
    assert isinstance(compiled.late(wanted), Overloaded)
    compiled.begun = time.monotonic() - 1.0
    assert isinstance(compiled.late(wanted), Overloaded)
    compiled.begun = time.monotonic() - WAIT_SECONDS
    assert isinstance(compiled.late(wanted), RequestError)


@pytest.mark.parametrize("wrong", ["/bin/false", "/nothing/there"])
def test_what_is_no_grammars_fault_is_tried_again(monkeypatch, wrong):
    """A process that ends at once, and one that cannot be started: a 503 for who waited, and the next one's grammar is
    compiled. Both were a 500, and the second one was told it as well."""
    wanted = StructuredOutputsParams(choice=["never seen before"]).constraint()
    request = Request(id="x", prompt_ids=(1,), sampling=SamplingParams(), eos_ids={EOS}, constraint=wanted)
    own = Grammars(TOKENIZER, VOCAB, {EOS}, quick=Workers("own-grammar"), slow=Workers("own-slow-grammar"))
    try:
        with monkeypatch.context() as patched:
            patched.setattr(trial.sys, "executable", wrong)
            with pytest.raises(Overloaded, match=f"cannot be tried now: .*{wrong}"):
                own.compiled(wanted).result(20)
        assert own.constrain(request) is not None and own.compiled(wanted).result(20) is not None
    finally:
        own.close()


def test_a_moment_without_memory_ends_with_it(monkeypatch):
    """Each grammar had three threads started: one that died of a lack of memory before it began was waited for for
    ever, and with it each later grammar."""
    own = Grammars(TOKENIZER, VOCAB, {EOS}, quick=Workers("own-grammar"), slow=Workers("own-slow-grammar"))
    wanted = [StructuredOutputsParams(choice=[f"number {number}"]).constraint() for number in range(3)]

    def short(*_, **__):
        raise MemoryError

    try:
        own.compiled(wanted[0]).result(60)
        for place, name in ((compile, "compiled"), (trial.subprocess, "Popen")):
            with monkeypatch.context() as patched:
                patched.setattr(place, name, short)
                own._trial(slow=False)._end()  # as if somebody had killed the child
                other = StructuredOutputsParams(choice=[name]).constraint()
                assert isinstance(own.compiled(other).exception(60), Overloaded), name
        monkeypatch.setattr(threading.Thread, "start", short)
        own.compiled(wanted[1]).result(60)
    finally:
        own.close()


def test_an_error_told_again_and_again_keeps_nothing():
    """The traceback of the one exception grew by a frame, and what that held, with each request."""
    wanted = StructuredOutputsParams(regex="(").constraint()
    request = Request(id="x", prompt_ids=(1,), sampling=SamplingParams(), eos_ids={EOS}, constraint=wanted)
    depths = []
    for _ in range(4):
        with pytest.raises(RequestError) as caught:
            GRAMMARS.compiled(wanted).exception(20)
            GRAMMARS.constrain(request)
        depths.append(len(list(traceback.walk_tb(caught.value.__traceback__))))
    assert depths == [2, 2, 2, 2]


def test_equal_grammars_are_compiled_once():
    one = StructuredOutputsParams(json={"enum": [1]}).constraint()
    other = StructuredOutputsParams(json={"enum": [1]}).constraint()
    assert GRAMMARS.compiled(one) is GRAMMARS.compiled(other)
    compact = StructuredOutputsParams(json={"enum": [1]}, disable_any_whitespace=True).constraint()
    assert GRAMMARS.compiled(compact) is not GRAMMARS.compiled(one)


def test_the_end_comes_only_where_the_grammar_may_end():
    match = matcher(regex="ab*", stop=(99,), min_tokens=3)
    assert allowed(match) == {97}
    match.advance(97)
    assert allowed(match) == {98}, "an end before min_tokens"
    for token in (98, 98):
        match.advance(token)
    assert allowed(match) == {98, 99, EOS}
    short = matcher(regex="a", min_tokens=5)
    short.advance(97)
    assert allowed(short) == {EOS}, "nothing else can come"


@pytest.mark.parametrize("thinks", [True, False])
def test_a_stop_token_that_is_the_only_way_on_is_taken(thinks):
    """Before min_tokens the form stood still at "ab" and asked for the c again; taken back, it stands before it."""
    thought = Thought(begin="<think>", ends=("</think>",)) if thinks else None
    match = matcher(choice=["abcd"], stop=(99,), min_tokens=9, thought=thought)
    for token in ids("abc"):
        assert token in allowed(match)
        match.advance(token)
    assert allowed(match) == {100}
    match.rollback(1)
    assert allowed(match) == {99} and not match.ended
    for token in [*ids("cd"), EOS]:
        match.advance(token)
    assert match.ended and match.error is None


def test_a_model_without_end_tokens_ends_when_nothing_may_follow():
    """It wrote token 0 behind the answer, and whatever came then; a place where it may go on is no end."""
    own = Grammars(TOKENIZER, VOCAB, (), quick=Workers("own-grammar"), slow=Workers("own-slow-grammar"))
    try:
        for form, text, more in (({"regex": "ab"}, "ab", False), ({"json": {"enum": [1, 20]}}, "20", False),
                                 ({"regex": "ab*"}, "ab", True)):  # fmt: skip
            wanted = StructuredOutputsParams(**form).constraint()
            own.compiled(wanted).result(60)
            match = own.constrain(Request(id="x", prompt_ids=(1,), sampling=SamplingParams(), constraint=wanted))
            for token in ids(text):
                assert not match.ended and not match.plain and token in allowed(match) and 0 not in allowed(match)
                match.advance(token)
            assert match.ended is not more and match.error is None
            assert not more or allowed(match) == {98}
            match.rollback(1)
            assert not match.ended and ids(text)[-1] in allowed(match)
    finally:
        own.close()


def test_rollback_takes_tokens_back():
    """Also digits of a number and the place in a thought."""
    match = matcher(json=NUMBERS, thought=Thought(begin="<think>", ends=("</think>",)))
    script = [THINK, *ids("hm"), END_THINK, *ids("[" + "1" * 40)]
    seen = []
    for token in script:
        seen.append(allowed(match))
        match.advance(token)
    last = allowed(match)
    assert 49 not in last and 44 in last
    for back in (1, 5, len(script)):
        match.rollback(back)
        assert allowed(match) == seen[len(script) - back]
        for token in script[len(script) - back :]:
            match.advance(token)
        assert allowed(match) == last


def test_rollback_takes_the_end_of_an_answer_back():
    """The end, with 1 to all tokens before it; the library took one too many back, and the form began a token early."""
    script = ids("[12]")
    match, seen = matcher(json=NUMBERS), []
    for token in script:
        seen.append(allowed(match))
        match.advance(token)
    seen.append(allowed(match))
    assert EOS in seen[-1]
    for back in range(1, len(script) + 2):
        match.advance(EOS)
        assert match.ended
        match.rollback(back)
        assert not match.ended
        assert allowed(match) == seen[len(script) + 1 - back], back
        for token in script[len(script) + 1 - back :]:
            match.advance(token)


def test_a_thought_is_free_and_the_answer_is_not():
    """The model may think first or not; a prompt may have opened the thought."""
    thought = Thought(begin="<think>", ends=("</think>",))
    match = matcher(regex="a", thought=thought)
    assert allowed(match) == {97, THINK}
    match.advance(THINK)
    assert len(allowed(match)) > 250
    for token in [*ids("so a "), END_THINK]:
        match.advance(token)
    assert allowed(match) == {97}
    straight = matcher(regex="a", thought=thought)
    straight.advance(97)
    assert allowed(straight) == {EOS}
    opened = matcher(regex="a", thought=Thought(begin="<think>", ends=("</think>",), opened=True))
    assert len(allowed(opened)) > 250
    for token in ids("hm</thi"):
        opened.advance(token)
    opened.advance(ids("n")[0])
    for token in ids("k>"):
        opened.advance(token)
    assert allowed(opened) == {97}, "an end mark in pieces"


HERE = Thought(begin="Here: ", also=("Hear: ",), ends=("So: ",))


def test_a_thought_may_begin_with_words():
    """As Granite's do: until the mark is whole, what came may also be the answer; rollbacks find out once more."""
    match = matcher(regex="Hello|a", thought=HERE)
    assert allowed(match) == {*b"Ha"}
    for token in b"He":
        match.advance(token)
    assert allowed(match) == {*b"lr"}, "Hello, or Here:"
    match.advance(ord("r"))
    assert allowed(match) == {*b"e"} and match.error is None
    for token in b"e: free {":
        match.advance(token)
    assert len(allowed(match)) > 250
    for token in b" So: ":
        match.advance(token)
    assert allowed(match) == {*b"Ha"}
    match.rollback(len("re: free { So: "))
    assert allowed(match) == {*b"lr"}
    for token in b"llo":
        match.advance(token)
    assert allowed(match) == {EOS}
    match.rollback(4)
    for token in b"ere: hm So: a":
        match.advance(token)
    assert allowed(match) == {EOS} and match.error is None


@pytest.mark.parametrize("mark", ["Here: ", "\n Hear: "])
def test_thoughts_that_begin_with_words_are_counted(mark):
    """Their budget holds, behind blanks and with the second mark, too; all tokens of the marks are of the thought."""
    gate = Gate(evolve(HERE, budget=3), ids)
    for token in ids(mark + "abc"):
        assert gate.mode is not Mode.FORCING
        gate.takes(bytes([token]))
    for token in ids("So: "):
        assert gate.mode is Mode.FORCING and gate.forced == token
        gate.takes(bytes([token]))
    assert gate.mode is Mode.ANSWER and gate.tokens == len(mark) + 3 + 4
    other = Gate(HERE, ids)
    for token in ids("Heap"):
        other.takes(bytes([token]))
    assert (other.mode, other.tokens) == (Mode.ANSWER, 0)


@pytest.mark.parametrize("opened", [True, False])
def test_a_thought_ends_with_its_budget(opened):
    """After 3 tokens the end mark is forced, then the answer goes on."""
    thought = Thought(begin="<think>", ends=("</think>",), opened=opened, budget=3)
    for match in (matcher(regex="a", thought=thought), matcher(constraint=Constraint(kind="thought", thought=thought))):
        for token in ([] if opened else [THINK]) + ids("abc"):
            assert token in allowed(match)
            match.advance(token)
        assert allowed(match) == {END_THINK}
        match.advance(END_THINK)
        assert 97 in allowed(match)


def test_another_mark_that_has_begun_is_not_mixed_with_the_usual_one():
    """Behind "Here'", of another mark, the i of the usual one was offered: an answer that could only fail."""
    thought = Thought(begin="Here is it:", also=("Here's it:",), ends=("So:",))
    match = matcher(regex="Here'?s? a", thought=thought)
    for token in ids("Here"):
        match.advance(token)
    assert set(ids(" ")) <= allowed(match)
    match.advance(*ids("'"))
    assert allowed(match) == {*ids("s"), *ids(" ")}
    gate = Gate(thought, ids)
    gate.takes(b"Here'")
    assert gate.mode is Mode.UNDECIDED and gate.opening == (-1, b"")
