"""parts.py: how long the context is, what a start-up says about itself; the whole way in with a random checkpoint."""

import pytest

from tinyserve.engine.parts import Phases, context
from tinyserve.errors import ConfigError


def test_the_context_is_what_all_agree_on():
    """The checkpoint promises 8192, its tokenizer 4096: 4096; asked 2048: 2048; asked 16384: refused."""
    assert context(None, 8192, None) == 8192
    assert context(-1, 8192, 4096) == 4096
    assert context(2048, 8192, 4096) == 2048
    with pytest.raises(ConfigError, match="8192"):
        context(16384, 8192, None)


def test_phases_add_up():
    phases = Phases()
    for _ in range(2):
        with phases("weights"):
            pass
    with phases("cache"):
        pass

    assert list(phases.seconds) == ["weights", "cache"]
    assert phases.report().startswith("weights 0.00 s, cache 0.00 s, together")
