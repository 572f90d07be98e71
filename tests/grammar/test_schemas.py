"""A real small model under random schemas, regexes and choices at temperature 1: what ends by itself validates.

A few by default; all of them with TINYSERVE_TEST_SCHEMAS=200.
"""

import json
import os
import random
import re
import time

import jsonschema
import pytest
from attrs import evolve

from tests.real_models import smollm2
from tinyserve import LLM, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(1800)]
COUNT = int(os.environ.get("TINYSERVE_TEST_SCHEMAS", "6"))


def schema(draw: random.Random, depth: int = 0) -> dict:
    """A random schema of what the backend enforces."""
    scalars = [
        lambda: {"type": "boolean"},
        lambda: {"type": "null"},
        lambda: {"type": "integer", "minimum": draw.randint(-50, 0), "maximum": draw.randint(1, 10**6)},
        lambda: {"type": "integer", "multipleOf": draw.choice([2, 5, 10])},
        lambda: {"type": "number", "minimum": draw.uniform(-10, 0), "exclusiveMaximum": draw.uniform(1, 1000)},
        lambda: {"type": "string", "maxLength": draw.randint(1, 20)},
        lambda: {"type": "string", "pattern": draw.choice(["^[A-Z]{2}-[0-9]{3}$", "^(ab|cd)+$", "^x?y{2,4}$"])},
        lambda: {"type": "string", "format": draw.choice(["date", "uuid", "ipv4", "email"])},
        lambda: {"enum": draw.sample(["α", 'b"c', 7, None, True, 1.5, "\n"], 3)},
        lambda: {"const": draw.choice(["x", 3, None, [1, {"a": "é"}]])},
    ]
    if depth >= 3 or draw.random() < 0.4:
        return draw.choice(scalars)()
    kind = draw.choice(["object", "object", "array", "tuple", "anyOf", "ref"])
    if kind == "object":
        names = draw.sample(["id", "name", "naïve", "a b", "x", "kids"], draw.randint(1, 4))
        required = draw.sample(names, draw.randint(0, len(names)))
        properties = {name: schema(draw, depth + 1) for name in names}
        extra = draw.choice([False, {"type": "integer", "minimum": 0, "maximum": 9}])
        found = {"type": "object", "properties": properties, "required": required, "additionalProperties": extra}
        return found | ({"maxProperties": len(names)} if extra and len(required) == len(names) else {})
    if kind == "array":
        return {"type": "array", "items": schema(draw, depth + 1), "minItems": draw.randint(0, 1), "maxItems": 3}
    if kind == "tuple":
        parts = [schema(draw, depth + 1) for _ in range(2)]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": 2}
    if kind == "anyOf":
        return {"anyOf": [schema(draw, depth + 1) for _ in range(2)]}
    node = {"type": "object", "properties": {"v": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["v"]}
    node["properties"]["next"] = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
    node["additionalProperties"] = False
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"} if depth == 0 else {"type": "object", "maxProperties": 0}


@pytest.fixture(scope="module")
def llm():
    with LLM(str(smollm2()), max_model_len=512, num_gpu_blocks_override=200, use_tqdm_on_load=False) as made:
        yield made


def test_random_schemas(llm):
    """Every answer that ends with stop validates, and most end."""
    draws = [schema(random.Random(seed)) for seed in range(COUNT)]
    forms = [
        SamplingParams(temperature=1, seed=seed, max_tokens=160, structured_outputs={"json": each})
        for seed, each in enumerate(draws)
    ]
    outputs = llm.generate(["Some JSON: "] * COUNT, forms, use_tqdm=False)
    ended = 0
    for each, output in zip(draws, outputs, strict=True):
        answer = output.outputs[0]
        if answer.finish_reason == "stop":
            ended += 1
            validator = jsonschema.Draft202012Validator(each, format_checker=jsonschema.FormatChecker())
            assert not list(validator.iter_errors(json.loads(answer.text))), (each, answer.text)
    print(f"{ended} of {COUNT} ended")
    assert ended >= COUNT * 0.6


def test_regexes_and_choices(llm):
    forms = [{"regex": "[A-Z][a-z]{2,8}( [A-Z][a-z]{2,8}){1,2}"}, {"choice": ["positive", "negative", "neutral"]},
             {"regex": r"\d{3}-\d{4}"}, {"choice": ["ja", "nein"]}]  # fmt: skip
    for seed, form in enumerate(forms * max(1, COUNT // 8)):
        params = SamplingParams(temperature=1, seed=seed, max_tokens=60)
        (output,) = llm.generate("A name: ", params, use_tqdm=False, structured_outputs=form)
        answer = output.outputs[0]
        assert answer.finish_reason == "stop"
        assert re.fullmatch(form["regex"], answer.text) if "regex" in form else answer.text in form["choice"]


def test_a_constrained_row_leaves_the_others_alone():
    """A batch of 8 with one row in a form: the other seven say what they say without it. Prints what a step costs.

    In float32: a row whose grammar is made first joins later, and in the default precision of a CPU a step of decodes
    beside a prompt rounds otherwise than one of decodes alone.
    """
    options = {"dtype": "float32", "max_model_len": 512, "num_gpu_blocks_override": 200, "use_tqdm_on_load": False}
    prompts = [f"Story number {number}: once upon a time" for number in range(8)]
    free = [SamplingParams(temperature=1, seed=seed, max_tokens=24, ignore_eos=True) for seed in range(8)]
    held = [*free[:7], evolve(free[7], structured_outputs={"json": {"type": "array", "minItems": 50}})]
    seconds, said = [], []
    with LLM(str(smollm2()), **options) as llm:
        for params in (held, free, held, free, held):  # the first one makes the vocabulary
            start = time.process_time()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds.append(time.process_time() - start)
            said.append([tuple(output.outputs[0].token_ids) for output in outputs])
    print(f"a step with the form costs {min(seconds[2::2]) / min(seconds[1::2]):.2f} of one without")
    assert said[0][:7] == said[1][:7] == said[2][:7] and said[0][7] != said[1][7]
