"""detokenize.py: joined pieces equal the whole, no character is cut, nothing waits without need."""

import random
import time

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from tests.scripted import byte_tokenizer
from tests.text.test_tokenizer import real, sentencepiece_metadata, sentencepiece_model
from tinyserve.text.detokenize import Detokenizer
from tinyserve.text.gguf_vocab import build
from tinyserve.text.tokenizer import Tokenizer

TOK = Tokenizer(byte_tokenizer())
SPM = Tokenizer(build(sentencepiece_metadata(sentencepiece_model())))


def metaspace_tokenizer():
    """Word pieces whose decoder drops the first space: it looks at neighbours, so the byte table does not apply."""
    letters = ["\u2581a", "\u2581b", "c", "d", "\u2581", "\ufffd", "é"]
    backend = tokenizers.Tokenizer(models.WordLevel({text: index for index, text in enumerate(letters)}, unk_token="c"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    backend.add_tokens([AddedToken("<x>", special=False)])
    return Tokenizer(backend)


META = metaspace_tokenizer()


def pieces(tokenizer, ids, prompt=(), **options):
    detokenizer = Detokenizer(tokenizer, prompt, **options)
    return [*(detokenizer.push([index]) for index in ids), detokenizer.finish()]


def test_characters_split_over_tokens_c01():
    """(a) no half character in any piece; (b) a limit of 3 inside the chilli; (c) an accent; (d) a bad byte."""
    assert pieces(TOK, [97, 240, 159, 140, 182, 195, 169, 46]) == ["a", "", "", "", "\U0001f336", "", "é", ".", ""]
    assert pieces(TOK, [97, 240, 159]) == ["a", "", "", "\ufffd"]
    assert pieces(TOK, [101, 204, 129]) == ["e", "", "\u0301", ""]
    assert pieces(TOK, [97, 255, 98]) == ["a", "\ufffd", "b", ""]


def test_impossible_bytes_do_not_wait_c01_e():
    """50 x byte 255: each comes out at once, 50 in all."""
    assert pieces(TOK, [97] + 50 * [255]) == ["a", *50 * ["\ufffd"], ""]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(0, 275), max_size=40), st.booleans(), st.integers(1, 7))
def test_joined_pieces_equal_the_whole(ids, skip, step):
    """Any ids, bad bytes and ids without a token included, in pushes of 1 to 7."""
    detokenizer = Detokenizer(TOK, skip_special_tokens=skip)
    text = "".join(detokenizer.push(ids[start : start + step]) for start in range(0, len(ids), step))

    assert TOK.backend.decode(ids, skip_special_tokens=skip) == text + detokenizer.finish()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, SPM.vocab_size + 5), max_size=40), st.booleans())
def test_joined_pieces_equal_the_whole_for_sentencepiece(ids, skip):
    assert SPM.decode(ids, skip_special_tokens=skip) == "".join(pieces(SPM, ids, skip_special_tokens=skip))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 12), max_size=30), st.booleans())
def test_joined_pieces_equal_the_whole_for_other_decoders(ids, skip):
    expected = META.decode(ids, skip_special_tokens=skip)

    assert expected == "".join(pieces(META, ids, skip_special_tokens=skip))


@settings(max_examples=300, deadline=None)
@example([237, 160, 97])
@given(st.lists(st.integers(0, 275), max_size=30))
def test_what_waits_is_an_incomplete_character(ids):
    """After each token, text sent + at most 3 bytes = all bytes so far, and those bytes can begin a character."""
    detokenizer, sent = Detokenizer(TOK, skip_special_tokens=False), ""
    for count, index in enumerate(ids, 1):
        sent += detokenizer.push([index])
        whole = b"".join(TOK.token_bytes(i) for i in ids[:count])
        waiting = next(
            (n for n in (3, 2, 1) if n <= len(whole) and begins_a_character(whole[-n:])),
            0,
        )
        assert sent == whole[: len(whole) - waiting].decode("utf-8", "replace")


def begins_a_character(data):
    if data[0] == 0xED and len(data) == 2 and 0xA0 <= data[1] <= 0xBF:
        return True  # half of a surrogate: Python's decoder waits for a third byte that cannot make it right
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start == 0 and error.reason == "unexpected end of data"
    return False


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_real_vocabularies(name):
    """200 random answers of 60 ids each; and a real text in pieces."""
    tokenizer, generator = real(name), random.Random(5)
    for _ in range(200):
        ids = [generator.randrange(tokenizer.vocab_size) for _ in range(60)]
        assert tokenizer.decode(ids) == "".join(pieces(tokenizer, ids))
    text = "Ünïcödé 東京 \U0001f336\U0001f468\u200d\U0001f469 tail"
    assert "".join(pieces(tokenizer, tokenizer.encode(text))) == text


def test_the_first_space_depends_on_the_prompt():
    """SentencePiece: at the start of everything the space is an artefact; after a prompt it is a space."""
    word = SPM.encode("ab", add_special_tokens=False)

    assert "".join(pieces(SPM, word)) == "ab"
    assert "".join(pieces(SPM, word, prompt=[1])) == "ab"  # <s> is hidden: still the start
    assert "".join(pieces(SPM, word, prompt=SPM.encode("cd"))) == " ab"
    assert "".join(pieces(META, [0, 1], prompt=[1])) == " a b"


def test_a_prompt_may_end_inside_a_character():
    assert pieces(TOK, [182, 46], prompt=[97, 240, 159, 140]) == ["\U0001f336", ".", ""]
    assert pieces(TOK, [182], prompt=[240, 159, 140, 182]) == ["\ufffd", ""]


def test_the_prompt_keeps_its_own_half_character():
    """An answer shows no U+FFFD for a character that the prompt began: it would be there twice, or with no token."""
    assert pieces(TOK, [], prompt=[120, 240]) == [""]
    assert pieces(TOK, [97], prompt=[120, 240]) == ["a", ""]
    assert pieces(TOK, [159, 97, 255], prompt=[120, 240]) == ["", "a", "\ufffd", ""]
    assert pieces(TOK, [255, 98], prompt=[120, 240, 159]) == ["\ufffd", "b", ""]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(120, 255), max_size=5), st.lists(st.integers(120, 255), max_size=5))
def test_prompt_and_answer_make_the_whole(prompt, answer):
    """What the prompt shows and what the answer shows are the whole, but for a U+FFFD that a character replaces."""
    whole, head = TOK.decode(prompt + answer), TOK.decode(prompt)
    kept = head if whole.startswith(head) else head[:-1]

    assert whole.startswith(kept)
    assert "".join(pieces(TOK, answer, prompt=prompt)) == whole[len(kept) :]


def test_special_tokens_are_hidden_or_shown():
    assert "".join(pieces(TOK, [97, 261, 262, 98])) == "a<think>b"
    assert "".join(pieces(TOK, [97, 261, 98], skip_special_tokens=False)) == "a<|eot|>b"
    assert "".join(pieces(TOK, [240, 159, 261, 140, 182])) == "\U0001f336"  # a hidden token does not cut a character


def test_spaces_between_special_tokens():
    """A decoder without a rule joins by spaces; neighbouring added tokens can be asked to stand together."""
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    backend.add_tokens([AddedToken("<x>", special=False)])
    tokenizer = Tokenizer(backend)
    ids = [0, 2, 3, 3, 1]

    assert "".join(pieces(tokenizer, ids, skip_special_tokens=False)) == "a <s> <x> <x> b"
    options = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    assert "".join(pieces(tokenizer, ids, **options)) == "a <s><x><x> b"


def test_replacement_characters_do_not_block_other_decoders():
    """A vocabulary with a piece U+FFFD: after 4 tokens without progress it is taken for good."""
    found = pieces(META, [0, 5, 5, 5, 5, 5, 2])

    assert "".join(found) == META.decode([0, 5, 5, 5, 5, 5, 2])
    assert "".join(found[:5]) == "a" + 4 * "\ufffd"


def test_a_token_costs_a_few_microseconds():
    """1 us a token here; the bound of 5 us is taken as CPU time, best of 5, on a warm table."""
    tokenizer = real("smollm2")
    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 200)
    best = min(seconds_for(tokenizer, ids) for _ in range(5))

    assert best / len(ids) < 5e-6


def seconds_for(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer)
    start = time.process_time()
    for index in ids:
        detokenizer.push([index])
    return time.process_time() - start
