"""Requests by the thousand, made from the server's own document: mostly right, some bent, some broken.

python -m tests.server.fuzzing 20000 7        (requests, seed) against an engine without a model
"""

import asyncio
import copy
import json
import random
import sys
import time
from collections import Counter

from tests.served import in_process, strict
from tinyserve.server.app import create_app

from .toys import ALL, toy_service

CONTROL = {"prompt": "control", "temperature": 0, "max_tokens": 5}
LEFT_OUT = {"/pause", "/resume", "/abort_requests", "/inference/v1/abort_requests"}  # they act on other requests
JUNK = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 2**64, 1e300, -0.0, 0.5, "", "x", "\u0000", "日本", "a" * 3000,
    [], [[]], [None], {}, {"a": {}}, [1, "x"], [[97], [98]], ["a", "b"], {"type": "text"}, {"type": "function"}, "none",
    list(range(300)), [{"role": "user", "content": "Hi"}], {"role": "user"}, "auto", "required", [-1], [10**9],
]  # fmt: skip
# The document says little of what is inside these; these are what clients put there.
KNOWN = {
    "messages": [
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "a"}]}],
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "begun"}],
    ],
    "tools": [[], [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
              [{"type": "function", "name": "f"}], [{"name": "f", "input_schema": {"type": "object"}}]],
    "logit_bias": [{}, {"97": 5}, {"98": -100, "99": 100}],
    "input": ["Hi", [{"role": "user", "content": "Hi"}]],
    "prompt": ["x", ["a", "b"], [97, 98], [[97], [98, 99]]],
    "token_ids": [[97], [98, 99]],
    "tokens": [[97], []],
    "model": ["toy", "", None],
    "repetition_detection": [{"max_pattern_size": 2, "min_count": 3}],
    "cache_salt": ["a", "b"],
    "tool_choice": ["none", "auto"],
    "stop": ["a", ["b", "cd"]],
    "chat_template_kwargs": [{}, {"enable_thinking": True}],
}  # fmt: skip


def of_schema(schema, rng, name=""):
    """A value that the schema allows."""
    if name in KNOWN and rng.random() < 0.9:
        return copy.deepcopy(rng.choice(KNOWN[name]))
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "anyOf" in schema:
        return of_schema(rng.choice(schema["anyOf"]), rng)
    kinds = schema.get("type", "string")
    kind = rng.choice([k for k in ([kinds] if isinstance(kinds, str) else kinds) if k != "null"] or ["null"])
    if kind in ("integer", "number"):
        low, high = schema.get("minimum", 0), min(schema.get("maximum", 40), 40)
        low = max(low, -40)
        value = rng.choice([low, high, rng.uniform(low, high)])
        return round(value) if kind == "integer" else value
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "array":
        return [of_schema(schema.get("items", {}), rng) for _ in range(rng.choice([0, 1, 1, 2, 4]))]
    if kind == "object":
        return {name: of_schema(part, rng, name) for name, part in schema.get("properties", {}).items()}
    return rng.choice(["a", "ab", "xyz", "Hello"])


def body_of(schema, rng):
    """Needed fields, a few others, and now and then something that does not belong."""
    needed = set(schema.get("required", ())) | {"messages", "prompt", "input", "tokens"} & set(schema["properties"])
    if "input" in needed or "messages" in needed:
        needed -= {"prompt"}
    others = [name for name in schema["properties"] if name not in needed]
    names = [*needed, *rng.sample(others, min(len(others), rng.choice([0, 1, 2, 3, 6, 99])))]
    body = {name: of_schema(schema["properties"][name], rng, name) for name in names}
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if name in schema["properties"] and rng.random() < 0.5:
            body[name] = rng.choice([1, 2, 9])
    for _ in range(rng.choice([0, 0, 0, 1, 1, 2])):
        bend(body, rng)
    return body


def bend(value, rng, depth=0):
    """Put junk somewhere into a body, or take something away."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    if not keys:
        return
    key = rng.choice(keys)
    if isinstance(value[key], (dict, list)) and value[key] and depth < 4 and rng.random() < 0.6:
        bend(value[key], rng, depth + 1)
    elif rng.random() < 0.15:
        del value[key]
    else:
        value[key] = copy.deepcopy(rng.choice(JUNK))


def raw_of(body, rng):
    """Its bytes; a few of them broken."""
    data = bytearray(json.dumps(body).encode())
    kind = rng.random()
    if kind < 0.03:
        data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind < 0.05:
        del data[rng.randrange(len(data)) :]
    elif kind < 0.06:
        place = rng.randrange(len(data))
        data[place:place] = rng.choice([b"NaN", b"1e999", b"\\ud800", b"[" * 5000, b"\xff", b'"'])
    return bytes(data)


class Fuzz:
    """Sends random requests to one app and checks every answer against the document."""

    def __init__(self, app, client, document, seed):
        self.app, self.client, self.document = app, client, document
        self.rng = random.Random(seed)
        self.statuses = Counter()
        self.routes = [
            (method.upper(), path, told)
            for path, ways in document["paths"].items()
            for method, told in ways.items()
            if path not in LEFT_OUT
        ]

    def request(self):
        """method, path, expected statuses, body."""
        rng = self.rng
        posts = [route for route in self.routes if "requestBody" in route[2]]
        method, path, told = rng.choice(posts if rng.random() < 0.9 else self.routes)
        path = path.replace("{name}", rng.choice(["toy", "no/such"])).replace("{response_id}", "resp_x")
        if "requestBody" not in told:
            return method, path, told["responses"], b""
        name = told["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        body = body_of(self.document["components"]["schemas"][name], rng)
        if rng.random() < 0.3 and "stream" in self.document["components"]["schemas"][name]["properties"]:
            body["stream"] = True
        return method, path, told["responses"], raw_of(body, rng)

    async def one(self):
        """Send a request; one in ten leaves early."""
        method, path, expected, body = self.request()
        if self.rng.random() < 0.1:
            await self.leave(method, path, body)
            self.statuses["left"] += 1
            return
        response = await self.client.request(method, path, content=body, headers={"content-type": "application/json"})
        self.statuses[response.status_code] += 1
        assert str(response.status_code) in expected, (method, path, body, response.text[:500])
        assert response.status_code != 500, (method, path, body, response.text[:500])
        kind = response.headers.get("content-type", "")
        if kind.startswith("application/json"):
            strict(response.text)
        elif kind.startswith("text/event-stream"):
            for line in response.text.splitlines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    assert "Internal" not in json.dumps(strict(line[6:])), (path, body, line)

    async def leave(self, method, path, body):
        """A client whose connection ends after a moment."""
        sent, turns = False, self.rng.choice([0, 1, 3, 10])

        async def receive():
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": body}
            for _ in range(turns):
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        async def send(message):
            await asyncio.sleep(0)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b""}
        await self.app(scope, receive, send)


async def fuzz(count, seed, *, at_once=8):
    """Run it; returns the statuses, and the largest gap of the loop in seconds."""
    async with toy_service(template=ALL, max_num_seqs=32) as service, in_process(service, timeout=60) as client:
        engine, machine = service.engine, service.engine.machine
        document = (await client.get("/openapi.json")).json()
        usual = (await client.post("/v1/completions", json=CONTROL)).json()["choices"]
        run = Fuzz(create_app(service), client, document, seed)
        engine.metrics.reset_lag()

        async def some(number):
            for _ in range(number):
                await run.one()

        await asyncio.gather(*(some(count // at_once) for _ in range(at_once)))
        gap = engine.metrics.reset_lag()
        for kept in list(service.responses.kept.values()):
            if kept.run is not None:
                await kept.run.ended()
        again = (await client.post("/v1/completions", json=CONTROL)).json()["choices"]
        await asyncio.sleep(0.05)
        assert again == usual
        assert service.inflight == 0 and len(engine.streams) == 0 and not machine.scheduler.has_work
        assert machine.cache.num_free == machine.cache.num_blocks
        machine.scheduler.check_integrity()
    return run.statuses, gap


if __name__ == "__main__":
    begun = time.monotonic()
    found, largest = asyncio.run(fuzz(int(sys.argv[1]), int(sys.argv[2])))
    print(dict(found), f"largest gap {1000 * largest:.0f} ms, {time.monotonic() - begun:.0f} s")
