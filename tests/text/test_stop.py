"""stop.py: case C02, and any split of any text against a slow and obvious oracle."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyserve.text.stop import StopFinder


def run(stops, parts, *, include=False):
    """Pieces sent, and the stop string found; like a stream, it ends at the first match."""
    finder, sent = StopFinder(stops, include=include), []
    for part in parts:
        text, stop = finder.push(part)
        sent.append(text)
        if stop is not None:
            return sent, stop
    return [*sent, finder.finish()], None


TOKENS = ["A", "B", "C", "DEF", "G", "H", "I", "J", "K"]


def test_c02_a_over_several_tokens():
    """No piece ever contains D, and A leaves at once: it cannot begin the stop string."""
    assert run(["DEFGHIJ"], TOKENS) == (["A", "B", "C", "", "", "", "", ""], "DEFGHIJ")


def test_c02_b_inclusive_waits_for_nothing():
    sent, stop = run(["DEFGHIJ"], TOKENS, include=True)

    assert (sent, stop) == (["A", "B", "C", "DEF", "G", "H", "I", "J"], "DEFGHIJ")


def test_c02_c_a_near_miss_is_sent():
    sent, stop = run(["DEFGHIJ"], [*TOKENS[:7], "X", "K"])

    assert (sent, stop) == (["A", "B", "C", "", "", "", "", "DEFGHIX", "K", ""], None)


def test_c02_d_inside_a_token():
    assert run(["E"], TOKENS) == (["A", "B", "C", "D"], "E")
    assert run(["E"], TOKENS, include=True) == (["A", "B", "C", "DE"], "E")


def test_c02_f_a_character():
    assert run(["\U0001f336"], ["a", "", "", "", "\U0001f336", "", "é", "."])[0] == ["a", "", "", "", ""]


def test_a_natural_end_loses_nothing():
    assert run(["END"], ["x", "E", "N"]) == (["x", "", "", "EN"], None)
    assert run(["END"], ["x", "E", "N"], include=True) == (["x", "E", "N", ""], None)


def test_no_stop_strings():
    assert run([], ["a", "b"]) == (["a", "b", ""], None)


@pytest.mark.parametrize(
    ("stops", "text", "sent", "found"),
    [
        (["bcd", "c"], "abcd", "ab", "c"),  # ends first
        (["c", "bc"], "abc", "ab", "c"),  # end together: first in the list
        (["bc", "c"], "abc", "a", "bc"),
        (["aab"], "aaab", "a", "aab"),  # begins again inside a failed attempt
    ],
)
def test_which_match_counts(stops, text, sent, found):
    for parts in ([text], list(text)):
        pieces, stop = run(stops, parts)
        assert ("".join(pieces), stop) == (sent, found)


def first_match(stops, text):
    """The obvious way: look at each end in turn."""
    for end in range(len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return end, stop
    return None


def must_wait(stops, text):
    """Length of the longest end of `text` that is a beginning of a stop string."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=1000, deadline=None)
@given(STOPS, st.lists(st.text("abc", max_size=4), max_size=10), st.booleans())
def test_any_split_against_the_oracle(stops, parts, include):
    text = "".join(parts)
    sent, stop = run(stops, parts, include=include)
    match = first_match(stops, text)

    if match is None:
        assert ("".join(sent), stop) == (text, None)
    else:
        end, expected = match
        assert stop == expected
        assert "".join(sent) == text[: end if include else end - len(expected)]


@settings(max_examples=1000, deadline=None)
@given(STOPS, st.lists(st.text("abc", max_size=4), max_size=10))
def test_exactly_the_longest_beginning_waits(stops, parts):
    finder, seen, sent = StopFinder(stops), "", ""
    for part in parts:
        text, stop = finder.push(part)
        if stop is not None:
            return
        seen, sent = seen + part, sent + text
        assert len(seen) - len(sent) == must_wait(stops, seen)


def test_long_stop_strings_stay_quick():
    """64 stop strings of 20000 letters that nearly match at every step: bounded by C-speed comparisons."""
    stops = ["a" * 20_000 + chr(1000 + n) for n in range(64)]
    sent, stop = run(stops, ["a" * 50] * 300)

    assert (len("".join(sent)), stop) == (15_000, None)


@settings(max_examples=500, deadline=None)
@given(STOPS, st.lists(st.text("abc", max_size=4), max_size=10), st.integers(0, 10), st.booleans())
def test_stop_strings_that_end_too_early_do_not_count(stops, parts, quiet, include):
    """The first `quiet` parts are not armed: oracle = the first match that ends behind them."""
    finder, sent, stop = StopFinder(stops, include=include), "", None
    for number, part in enumerate(parts):
        text, stop = finder.push(part, armed=number >= quiet)
        sent += text
        if stop is not None:
            break
    else:
        sent += finder.finish()
    text, floor = "".join(parts), len("".join(parts[:quiet]))
    ends = [
        (end, stops.index(one), one)
        for one in stops
        for end in range(floor + 1, len(text) + 1)
        if text[:end].endswith(one)
    ]

    if not ends:
        assert (sent, stop) == (text, None)
    else:
        end, _, expected = min(ends)
        assert stop == expected
        assert sent == text[: end if include else end - len(expected)]
