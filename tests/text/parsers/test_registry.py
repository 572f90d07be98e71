"""Choosing a parser: by vLLM's names, by import path, from a template, or refused in one line."""

import pytest

from tinyserve.errors import ConfigError
from tinyserve.text.parsers import registry
from tinyserve.text.parsers.events import Parsed

VLLM = """hermes llama3_json llama4_json llama4_pythonic pythonic mistral deepseek_v3 deepseek_v31 glm45 kimi_k2 openai
granite granite-20b-fc phi4_mini_json internlm minimax_m2 seed_oss olmo3 ernie45 hunyuan_a13b step3 jamba xlam
qwen3_coder qwen3_xml functiongemma longcat"""
VLLM_REASONING = """deepseek_r1 qwen3 granite mistral glm45 deepseek_v3 kimi_k2 minimax_m2 seed_oss olmo3 ernie45
hunyuan_a13b step3 openai_gptoss"""

OWN = """
from tinyserve.text.parsers.family import Family, Thinking
from tinyserve.text.parsers.json_families import tagged

MINE = Family(name="mine", thinking=Thinking(begin=("(",), end=(")",)), calls=tagged(("@call",), ("@end",)))
"""


def test_vllm_names_work():
    for name in VLLM.split():
        assert registry.choose(None, tool_parser=name).tools is not None, name
    for name in VLLM_REASONING.split():
        assert registry.choose(None, reasoning_parser=name).reads_thoughts, name
    with pytest.raises(ConfigError, match="hermes"):
        registry.choose(None, tool_parser="hermse")


def test_none_switches_off_what_the_template_tells():
    template = '<think></think><tool_call></tool_call>"name""arguments"'
    assert registry.choose(template).tools.name == "hermes"
    off = registry.choose(template, tool_parser="none", reasoning_parser="none")
    assert (off.tools, off.thoughts) == (None, None)


def test_an_own_family_by_import_path(tmp_path):
    """module:NAME and file.py:NAME; anything else there is refused."""
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    parsing = registry.choose(None, tool_parser=f"{path}:MINE", reasoning_parser=f"{path}:MINE")
    reader = parsing.machine(calls=True)
    parsed = Parsed().add(reader.feed('(hm)Yes. @call{"name": "f", "arguments": {}}@end')).add(reader.finish())
    assert (parsed.thought, parsed.text, parsed.calls[0].name) == ("hm", "Yes. ", "f")
    for wrong in (f"{path}:Family", f"{path}:NOTHING", "no.such.module:X"):
        with pytest.raises(ConfigError):
            registry.choose(None, tool_parser=wrong)


def test_special_tokens_that_are_no_marks_are_not_shown():
    parsing = registry.choose(None, tool_parser="mistral", special=("<s>", "</s>", "[TOOL_CALLS]", "[ARGS]"))
    assert parsing.shows_special(calls=True) and not parsing.shows_special(calls=False)
    reader = parsing.machine(calls=True)
    parsed = Parsed().add(reader.feed("<s>Yes</s>.[TOOL_CALLS]f[ARGS]{}")).add(reader.finish())
    assert (parsed.text, parsed.calls[0].arguments) == ("Yes.", "{}")
