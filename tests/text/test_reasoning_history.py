"""An assistant's earlier thought reaches the template, by whichever name the client and the template call it."""

import pytest

from tinyserve.errors import RequestError
from tinyserve.text.messages import normalise


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_a_thought_has_every_name(name):
    (message,) = normalise([{"role": "assistant", "content": "a", name: "hm"}])
    assert {message[key] for key in ("reasoning", "reasoning_content", "thinking")} == {"hm"}
    (user,) = normalise([{"role": "user", "content": "a", name: "hm"}])
    assert "thinking" not in user
    with pytest.raises(RequestError, match=name):
        normalise([{"role": "assistant", "content": "a", name: [1]}])
