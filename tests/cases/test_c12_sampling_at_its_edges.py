"""C12: sampling parameters at their edges: what is off, what is greedy, and what never reaches the sampler."""

import pytest

from .harness import CHAT, HI, TEXT, serving

pytestmark = pytest.mark.anyio
BODY = {"model": "tiny", "prompt": "x", "max_tokens": 8}


async def greedy(server):
    return await server.text({**BODY, "temperature": 0})


async def test_seeds_do_not_matter_at_temperature_0(tiny, oracle):
    """(a): four equal texts, those of the reference."""
    async with serving(tiny) as server:
        texts = [await server.text({**BODY, "temperature": 0, **seed}) for seed in ({"seed": 1}, {"seed": 2}, {}, {})]
        assert texts == 4 * [server.engine.tokenizer.decode(oracle.greedy([120], 8))]


async def test_top_k_that_is_off(tiny):
    """(b): absent, -1, 0, the whole vocabulary and more than it are the same; another seed is not."""
    async with serving(tiny) as server:
        body = {**BODY, "temperature": 1, "seed": 7}
        texts = [await server.text({**body, **k}) for k in ({}, *({"top_k": k} for k in (-1, 0, 320, 10_000)))]
        assert texts == 5 * [texts[0]]
        assert texts[0] != await server.text({**body, "seed": 8})


@pytest.mark.parametrize("narrow", [{"temperature": 1, "top_k": 1}, {"temperature": 1e-6}])
async def test_what_leaves_one_choice_is_greedy(tiny, narrow):
    """(c), (d): top_k 1, and a temperature that would overflow a division."""
    async with serving(tiny) as server:
        for seed in (1, 2, 3):
            assert await server.text({**BODY, **narrow, "seed": seed}) == await greedy(server)


async def test_top_p(tiny):
    """(e): 1.0 is off, 0 and 1.1 are refused."""
    async with serving(tiny) as server:
        body = {**BODY, "temperature": 1, "seed": 7}
        assert await server.text({**body, "top_p": 1.0}) == await server.text(body)
        for wrong in (0, 1.1):
            assert (await server.refused(TEXT, {**body, "top_p": wrong}))["param"] == "top_p"


async def test_temperatures(tiny):
    """(f): five are refused, on both routes; null is the default."""
    async with serving(tiny) as server:
        for wrong in ("-1", "NaN", "1e999", '"hot"', "true"):
            for path, fields in ((TEXT, '"prompt": "x"'), (CHAT, '"messages": [{"role": "user", "content": "x"}]')):
                await server.refused(path, raw='{"model": "tiny", ' + fields + ', "temperature": ' + wrong + "}")
        body = {**BODY, "seed": 7}
        assert await server.text({**body, "temperature": None}) == await server.text(body)
        assert await server.text(body) == await server.text({**body, "temperature": 1})


async def test_the_rest_of_the_edges(tiny):
    """(g), (h), (i): repetition penalty 0, seeds -5 and 2^70, top_k -2."""
    async with serving(tiny) as server:
        for wrong in ({"repetition_penalty": 0}, {"seed": 2**70}, {"top_k": -2}):
            (name,) = wrong
            assert (await server.refused(TEXT, {**BODY, **wrong}))["param"] in (name, None)
            await server.refused(CHAT, {**HI, **wrong})
        seeded = {**BODY, "temperature": 1, "seed": -5}
        assert await server.text(seeded) == await server.text(seeded)
