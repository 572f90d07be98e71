"""block.py: two blocks have one name exactly when they hold the same."""

from tinyserve.kv.block import NameChain
from tinyserve.request import Media, Request


def names(tokens, *, size=4, adapter="", **request):
    made = Request(id="a", prompt_ids=tokens, **request)
    return list(NameChain(made, size, adapter).grow(tokens, len(tokens) // size))


TOKENS = tuple(range(12))


def test_equal_beginnings_have_equal_names_up_to_the_first_difference():
    other = (*TOKENS[:9], 99, 99, 99)

    assert names(TOKENS)[:2] == names(other)[:2]
    assert names(TOKENS)[2] != names(other)[2]


def test_a_name_depends_on_all_tokens_before_its_block():
    assert names(TOKENS)[2] != names((77, *TOKENS[1:]))[2]


def test_only_full_blocks_have_names():
    assert len(names(TOKENS[:11])) == 2


def test_a_salt_changes_the_whole_chain():
    plain, salted = names(TOKENS), names(TOKENS, cache_salt="x")

    assert not set(plain) & set(salted)
    assert salted == names(TOKENS, cache_salt="x") != names(TOKENS, cache_salt="y")


def test_an_empty_salt_is_a_salt():
    assert names(TOKENS)[0] != names(TOKENS, cache_salt="")[0]


def test_an_adapter_changes_every_block():
    assert not set(names(TOKENS)) & set(names(TOKENS, adapter="lora"))


def test_salt_and_adapter_of_one_text_differ():
    assert names(TOKENS, adapter="x")[0] != names(TOKENS, cache_salt="x")[0]


def image(content, offset, length):
    return Media(kind="image", hash=content, offset=offset, length=length)


def test_media_change_the_blocks_from_the_first_that_they_overlap():
    """Positions 5..6 lie in block 1: block 0 stays shared, 1 and (through the chain) 2 do not."""
    plain, first, second = (
        names(TOKENS),
        names(TOKENS, media=[image(b"1", 5, 2)]),
        names(TOKENS, media=[image(b"2", 5, 2)]),
    )

    assert plain[0] == first[0] == second[0]
    assert len({plain[1], first[1], second[1]}) == len({plain[2], first[2], second[2]}) == 3


def test_media_at_another_offset_are_another_content():
    assert names(TOKENS, media=[image(b"1", 5, 2)])[1] != names(TOKENS, media=[image(b"1", 6, 2)])[1]


def test_names_of_grown_tokens_continue_the_chain():
    chain = NameChain(Request(id="a", prompt_ids=TOKENS), 4)
    tokens = list(TOKENS[:5])
    first = list(chain.grow(tokens, 1))
    tokens += TOKENS[5:]

    assert chain.grow(tokens, 3) == names(TOKENS)
    assert first == names(TOKENS)[:1]
