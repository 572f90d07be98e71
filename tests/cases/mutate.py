"""Requests that are nearly right: good ones with values, fields, bytes, headers and paths changed at random."""

import json
import random

from attrs import frozen

HI = [{"role": "user", "content": "Hi"}]
WEATHER = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"c": {}}}}}
GOOD = [
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 3}),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 3, "stream": True, "n": 2, "logprobs": True}),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 5, "tools": [WEATHER], "tool_choice": "auto"}),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 5, "response_format": {"type": "json_object"}}),
    ("/v1/completions", {"prompt": "ab", "max_tokens": 3, "echo": True, "logprobs": 1}),
    ("/v1/completions", {"prompt": [[97, 98], [99]], "max_tokens": 3, "stream": True, "stop": ["xyz"]}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 4, "structured_outputs": {"regex": "[ab]{1,3}"}}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 3, "stream": True}),
    ("/v1/messages", {"messages": HI, "max_tokens": 3, "model": "tiny"}),
    ("/v1/messages/count_tokens", {"messages": HI, "model": "tiny"}),
    ("/inference/v1/generate", {"token_ids": [97], "sampling_params": {"max_tokens": 3}}),
    ("/tokenize", {"messages": HI}),
    ("/detokenize", {"tokens": [97, 98]}),
]
FIELDS = {
    *("temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids", "min_tokens", "max_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "allowed_token_ids"),
    *("logprobs", "top_logprobs", "prompt_logprobs", "echo", "suffix", "stream", "stream_options", "user", "model"),
    *("response_format", "structured_outputs", "tools", "tool_choice", "messages", "prompt", "input", "tokens"),
    *("truncate_prompt_tokens", "priority", "cache_salt", "use_beam_search", "length_penalty", "stream_interval"),
    *("chat_template", "chat_template_kwargs", "continue_final_message", "add_generation_prompt", "reasoning_effort"),
    *("return_token_ids", "repetition_detection", "thinking_token_budget", "request_id", "sampling_params", "system"),
    *("documents", "max_completion_tokens", "previous_response_id", "store", "background", "metadata", "content"),
}  # fmt: skip
NUMBERS = [0, 1, -1, 2, 7, 20, 64, 0.5, -0.0, 1e-9, 1e300, 16384, 2**31, 2**63, 2**64, -(2**63), 10**30]
RAW = ["NaN", "-Infinity", "1e999", "01", "tru", '"\\ud83c"', "{", "[" * 2000, "[" * 900 + "]" * 900, "'x'", "\x00", ""]
TEXTS = [
    "",
    "a",
    "user",
    "assistant",
    "auto",
    "tiny",
    "none",
    "\u0000",
    "\ud7ff",
    "京🌶",
    "a\r\nb: c",
    "../etc",
    "{{ 7*7 }}",
]
TEXTS += ["x" * 300, "<|eos|>", "data: [DONE]\n\n", "%s%n", "(a{1,500}){1,500}", "[", "(?<=x)y", '{"type": "strnig"}']
HEADERS = [
    ("content-type", "text/plain"),
    ("authorization", "Bearer x"),
    ("x-request-id", "a" * 300),
    ("origin", "http://x"),
]
HEADERS += [
    ("content-length", "5"),
    ("transfer-encoding", "chunked"),
    ("expect", "100-continue"),
    ("host", ""),
    ("x", "é"),
]
PATHS = [
    "/",
    "//v1//models",
    "/v1/models/%00",
    "/v1/models/../x",
    "/%",
    "/health?x=1",
    "/metrics",
    "/v1/responses/x",
    "/docs",
]


@frozen
class Sent:
    """What goes over the wire. tame: whether it is HTTP that a server has to answer."""

    head: bytes
    body: bytes
    tame: bool = True


def value(rng, depth=0):
    """Anything that JSON can hold, small mostly."""
    kind = rng.randrange(9)
    if kind < 3:
        return rng.choice(NUMBERS)
    if kind < 5:
        return rng.choice(TEXTS)
    if kind < 6:
        return rng.choice([None, True, False])
    if kind == 6 and depth < 3:
        return [value(rng, depth + 1) for _ in range(rng.choice([0, 1, 2, 2, 50]))]
    if kind == 7 and depth < 3:
        return {rng.choice([*FIELDS, *TEXTS]): value(rng, depth + 1) for _ in range(rng.randrange(4))}
    return rng.choice(
        [[97] * 300, ["a"] * 100, [[97]] * 60, {str(i): 1 for i in range(400)}, nested(rng.randrange(60))]
    )


def nested(depth):
    found = []
    for _ in range(depth):
        found = [found]
    return found


def places(thing, path=()):
    """Paths of all values inside of a JSON value."""
    yield path
    inner = thing.items() if isinstance(thing, dict) else enumerate(thing) if isinstance(thing, list) else ()
    for key, one in inner:
        yield from places(one, (*path, key))


def mutated(rng, body):
    """The body with one to three changes."""
    body = json.loads(json.dumps(body))
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        *path, last = rng.choice([path for path in places(body) if path] or [("x",)])
        where = body
        for key in path:
            where = where[key]
        if rng.random() < 0.5:
            body[rng.choice(sorted(FIELDS))] = value(rng)
        elif rng.random() < 0.2 and isinstance(where, dict):
            where.pop(last, None)
        else:
            where[last] = value(rng)
    return body


def request(seed):
    """The request with this number."""
    rng = random.Random(seed)
    path, good = rng.choice(GOOD)
    body = json.dumps(mutated(rng, good)).encode()
    method, tame, headers = "POST", True, {"content-type": "application/json"}
    if rng.random() < 0.15:
        body = _damaged(rng, body)
    if rng.random() < 0.05:
        path, method = rng.choice(PATHS), rng.choice(["GET", "HEAD", "OPTIONS", "DELETE", "PUT", "TRACE", "X"])
    headers["content-length"] = str(len(body))
    if rng.random() < 0.08:
        name, text = rng.choice(HEADERS)
        headers[name] = text
        tame = name not in ("content-length", "transfer-encoding", "host")
    lines = [f"{method} {path} HTTP/1.1", "host: x", "connection: close", *(f"{k}: {v}" for k, v in headers.items())]
    return Sent("\r\n".join(lines).encode() + b"\r\n\r\n", body, tame and method != "HEAD")


def _damaged(rng, body):
    """Bytes that are no JSON any more, or JSON that says what JSON cannot."""
    data = bytearray(body)
    kind = rng.randrange(4)
    if kind == 0:
        del data[rng.randrange(len(data)) :]
    elif kind == 1:
        for _ in range(rng.randrange(1, 9)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == 2:
        at = rng.randrange(len(data))
        data[at:at] = rng.choice(RAW).encode("utf-8", "surrogatepass")
    else:
        data += bytes(data)
    return bytes(data)
