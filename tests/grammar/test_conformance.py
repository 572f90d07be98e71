"""The public JSON-Schema-Test-Suite, draft 2020-12, on compiled matchers: what is not enforced is refused.

Nothing that a schema forbids is let through. What it allows can be written, except where a grammar is narrower on
purpose: properties in the schema's order, integers without a fraction of zero, `format` as a rule and not as a remark.
"""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from tests.scripted import EOS
from tinyserve.errors import RequestError
from tinyserve.structured import StructuredOutputsParams

from .harness import GRAMMARS, ids

SUITE = Path(
    os.environ.get("JSON_SCHEMA_TEST_SUITE")
    or Path(__file__).parents[2].parent / "shared" / "data" / "json-schema-test-suite"
)
NARROWER = {
    "const": {"same object with different property order is valid", "float"},
    "enum": {"is valid"},
    "type": {"a float with zero fractional part is an integer"},
    "allOf": {"allOf", "valid"},
    "format": {"is only an annotation by default"},
}


def narrower(file, description):
    return any(part in description for part in NARROWER.get(file, ()))


@pytest.mark.skipif(not SUITE.is_dir(), reason=f"the suite is not at {SUITE}")
def test_the_suite():
    counts, wrong = Counter(), []
    for path in sorted((SUITE / "tests" / "draft2020-12").glob("*.json")):
        for group in json.loads(path.read_text()):
            schema = {"not": {}} if group["schema"] is False else group["schema"]
            try:
                compiled = GRAMMARS.compiled(StructuredOutputsParams(json=schema).constraint()).result(20)
            except RequestError as error:
                counts["refused"] += 1
                assert error.param == "structured_outputs"
                continue
            for test in group["tests"]:
                match = compiled.deep_copy()
                tokens = ids(json.dumps(test["data"], ensure_ascii=False))
                taken = match.try_consume_tokens(tokens) == len(tokens) and match.consume_token(EOS)
                counts["right" if taken == test["valid"] else "wrong"] += 1
                if taken != test["valid"] and (taken or not narrower(path.stem, test["description"])):
                    wrong.append((path.stem, group["description"], test["description"], taken))
    assert wrong == []
    assert counts["right"] > 550 and counts["wrong"] < 30 and counts["refused"] < 250, counts
