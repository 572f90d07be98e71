"""Grammars over the byte tokenizer, and matchers driven by hand."""

import numpy as np

from tests.scripted import EOS, VOCAB, byte_tokenizer
from tinyserve.grammar.compile import Grammars
from tinyserve.grammar.matcher import Matcher
from tinyserve.grammar.trial import PARENT_STACK
from tinyserve.request import Request, SamplingParams
from tinyserve.runner.workers import Workers
from tinyserve.structured import StructuredOutputsParams
from tinyserve.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(byte_tokenizer())
QUICK, SLOW = (Workers(name, stack=PARENT_STACK) for name in ("test-grammar", "test-slow-grammar"))
GRAMMARS = Grammars(TOKENIZER, VOCAB, {EOS}, quick=QUICK, slow=SLOW)


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def matcher(thought=None, *, stop=(), min_tokens=0, constraint=None, **form) -> Matcher:
    """A matcher whose grammar is compiled."""
    from attrs import evolve

    wanted = constraint or evolve(StructuredOutputsParams(**form).constraint(), thought=thought)
    sampling = SamplingParams(stop_token_ids=stop, min_tokens=min_tokens, max_tokens=None)
    request = Request(id="x", prompt_ids=(1,), sampling=sampling, eos_ids={EOS}, constraint=wanted)
    GRAMMARS.compiled(wanted).result(20)
    return GRAMMARS.constrain(request)


def allowed(match) -> set[int]:
    """The tokens that may come next."""
    row = np.full(match.width, -1, dtype=np.int32)
    library = match.compiled()
    if library is not None:
        row = np.frombuffer(library.compute_bitmask(), dtype=np.int32).copy()
    match.finish(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def takes(text, **form) -> bool:
    """Whether a whole text satisfies a grammar: every token is allowed, and then the end."""
    match = matcher(**form)
    for token in [*ids(text), EOS]:
        if token not in allowed(match):
            return False
        match.advance(token)
    return match.ended
