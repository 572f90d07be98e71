"""repetition.py: the running counts find what a look at the whole answer finds, and end a sequence for it."""

import time

from hypothesis import given
from hypothesis import strategies as st

from tinyserve.request import FinishReason
from tinyserve.scheduling.repetition import RepetitionFinder

from .harness import EOS, Lab


def repeats(tokens, shortest, longest, count):
    """By definition: some pattern of allowed length stands `count` times at the end."""
    for size in range(shortest, longest + 1):
        pattern = tokens[len(tokens) - size :]
        if len(tokens) >= size * count and tokens[len(tokens) - size * count :] == pattern * count:
            return True
    return False


@given(
    st.lists(st.integers(0, 2), max_size=60),
    st.integers(1, 5),
    st.integers(0, 6),
    st.integers(2, 4),
)
def test_every_token_is_judged_as_by_definition(tokens, shortest, more, count):
    finder = RepetitionFinder(shortest, shortest + more, count)

    found = [finder.push(token) for token in tokens]

    assert found == [repeats(tokens[:end], shortest, shortest + more, count) for end in range(1, len(tokens) + 1)]


def test_the_price_of_a_token_does_not_grow_with_the_answer():
    """200 000 tokens, patterns up to 1024: 0.3 s; a comparison of all patterns at each token takes minutes."""
    finder = RepetitionFinder(1, 1024, 3)
    start = time.perf_counter()
    for token in range(200_000):
        finder.push(token * 7919 % 5003)

    assert time.perf_counter() - start < 5
    assert len(finder._window) == 1024 and sum(map(len, finder._places.values())) == 1024


def ended(script, depth=1, most=20, **sampling):
    """The answer to a prompt of 5 tokens, when the device gives `script`, then 40, 41, 42 ..."""

    def choose(tokens, hashed):
        step = len(tokens) - 5
        return script[step] if step < len(script) else 40 + step

    lab = Lab(depth=depth, device={"choose": choose, "vocab": 1000})
    lab.add("a", 5, most, eos=(EOS,), **sampling)
    answer = lab.run()["a"]
    last = answer.updates[-1]
    return len(answer.tokens), last.finish_reason, last.stop_reason


TWICE_THREE = {"repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 2, "min_count": 3}}
CIRCLE = (9, 2, 3, 2, 3, 2, 3, 2, 3)


def test_a_circle_ends_the_answer():
    """`2 3` stands three times after 7 tokens; with two steps in flight the one after it is dropped."""
    for depth in (1, 2, 3):
        assert ended(CIRCLE, depth, **TWICE_THREE) == (7, FinishReason.REPETITION, "repetition_detected")
    assert ended(CIRCLE) == (20, FinishReason.LENGTH, None)


def test_what_beats_a_repetition():
    """The limit on the same token; an end token in the pattern; min_tokens, which only delay it."""
    assert ended(CIRCLE, most=7, **TWICE_THREE) == (7, FinishReason.LENGTH, None)
    assert ended((2, EOS, 2, EOS), **TWICE_THREE)[:2] == (2, FinishReason.STOP)
    assert ended(CIRCLE, min_tokens=8, **TWICE_THREE) == (8, FinishReason.REPETITION, "repetition_detected")


def test_an_ignored_end_token_may_be_the_pattern():
    pattern = {"max_pattern_size": 1, "min_count": 4}
    assert ended((EOS,) * 9, ignore_eos=True, repetition_detection=pattern) == (
        4, FinishReason.REPETITION, "repetition_detected",
    )  # fmt: skip


def test_no_pattern_size_is_off():
    assert ended((5,) * 9, most=9, repetition_detection={"max_pattern_size": 0, "min_count": 2})[0] == 9


def test_a_preempted_answer_is_judged_as_one():
    """Two requests in a pool of 5 blocks; both go round in circles from their first token."""
    lab = Lab(blocks=5, device={"choose": lambda tokens, hashed: 7})
    for name in ("a", "b"):
        lab.add(name, 5, 12, repetition_detection={"max_pattern_size": 2, "min_pattern_size": 2, "min_count": 5})
    answers = lab.run()

    assert lab.preemptions
    assert [(len(one.tokens), one.reason) for one in answers.values()] == [(10, FinishReason.REPETITION)] * 2
