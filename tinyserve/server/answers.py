"""What answers look like, as JSON Schema, for the document. The writers of the protocol files make them.

Before: nothing.  After: the protocol files (their `facts`), openapi.py.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def of(kind: str, help: str = "") -> Schema:
    """A schema of one type. A question mark at its end: or null."""
    names = [kind[:-1], "null"] if kind.endswith("?") else kind
    return {"type": names, **({"description": help} if help else {})}


def record(help: str = "", **members: Schema | str) -> Schema:
    """An object with these members."""
    properties = {
        name.rstrip("_"): of(member) if isinstance(member, str) else member for name, member in members.items()
    }
    return {"type": "object", "properties": properties, **({"description": help} if help else {})}


def rows(member: Schema | str, help: str = "") -> Schema:
    """A list."""
    items = of(member) if isinstance(member, str) else member
    return {"type": "array", "items": items, **({"description": help} if help else {})}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


USAGE = record(
    "The end token counts as a completion token; a prompt counts once, whatever n.",
    prompt_tokens="integer", completion_tokens="integer", total_tokens="integer",
    prompt_tokens_details=or_null(record(cached_tokens="integer")),
)  # fmt: skip
FINISH = {
    "type": "string",
    "enum": ["stop", "length", "tool_calls", "repetition", "abort"],
    "description": "stop: end token, stop string or stop id. length: max_tokens or the context.",
}
STOP_REASON = {"type": ["string", "integer", "null"], "description": "The stop string or id; null for the end token."}
CHOICE_TAIL: dict[str, Schema] = {
    "finish_reason": FINISH,
    "stop_reason": STOP_REASON,
    "token_ids": or_null(rows("integer", "With return_token_ids.")),
}
HEAD = {
    "id": "string", "object": "string", "created": "integer", "model": "string",
    "system_fingerprint": of("string?", "Equal for servers that give equal answers to a seed."),
}  # fmt: skip

CHAT = record(
    **HEAD,
    choices=rows(record(
        index="integer",
        message=record(
            role="string", content="string?", tool_calls=rows("object"),
            reasoning=of("string?", "The thought. One that the prompt opened and nothing closed by the answer's own "
                         "end (stop) is the content as well, whole and streamed: no answer is empty."),
        ),
        logprobs=or_null(record(content=rows(record(
            token="string", logprob="number", bytes=rows("integer"), top_logprobs=rows("object"))))),
        **CHOICE_TAIL,
    )),
    usage=USAGE,
    prompt_logprobs=or_null(rows({}, "One object per prompt token; null for the first.")),
    prompt_token_ids=or_null(rows("integer")),
)  # fmt: skip
COMPLETION = record(
    **HEAD,
    choices=rows(record(
        index="integer", text="string",
        logprobs=or_null(record(text_offset=rows("integer"), token_logprobs=rows("number?"), tokens=rows("string"),
                                top_logprobs=rows("object?"))),
        **CHOICE_TAIL,
    ), "Choice index = prompt index * n + answer index."),
    usage=USAGE,
)  # fmt: skip
RESPONSE = record(
    "Also repeats what was asked.",
    id="string", object="string", created_at="integer", model="string",
    status={"type": "string", "enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]},
    error=or_null(record(code="string", message="string")),
    incomplete_details=or_null(record(reason="string")),
    output=rows("object", "Items of type message, reasoning and function_call."),
    usage=or_null(record(
        input_tokens="integer", input_tokens_details=record(cached_tokens="integer", cache_write_tokens="integer"),
        output_tokens="integer",
        output_tokens_details=record(reasoning_tokens="integer"), total_tokens="integer",
    )),
)  # fmt: skip
ITEMS = record(
    object="string", data=rows("object", "Items of type message, reasoning, function_call and function_call_output."),
    first_id="string?", last_id="string?", has_more="boolean",
)  # fmt: skip
MESSAGE = record(
    id="string", type="string", role="string", model="string",
    content=rows("object", "Blocks of type text, thinking and tool_use."),
    stop_reason={"type": "string", "enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
    stop_sequence="string?",
    usage=record(input_tokens="integer", output_tokens="integer", cache_read_input_tokens="integer",
                 cache_creation_input_tokens="integer"),
)  # fmt: skip
EMBEDDINGS = record(
    id="string", object="string", created="integer", model="string",
    data=rows(record(index="integer", object="string", embedding={"type": ["array", "string"]}),
              "In the order of the input; numbers, or base64."),
    usage=record(prompt_tokens="integer", total_tokens="integer"),
)  # fmt: skip
COUNT = record(input_tokens="integer")
GENERATED = record(
    request_id="string",
    choices=rows(record(
        index="integer", token_ids=rows("integer"), finish_reason=FINISH, stop_reason=STOP_REASON,
        logprobs=or_null(record(content=rows("object", "token_id, logprob, rank and top_logprobs."))),
    )),
    prompt_logprobs=or_null(rows({})), usage=USAGE,
)  # fmt: skip
STATE = record(
    running="integer", waiting="integer", preemptions="integer", kv_cache_usage="number", prefix_hit_rate="number",
    sequences=rows("object"), steps=rows("object", "Oldest first."),
    blocks=record(map=of("string", "A digit a block: 0 free, 1 free with a prefix, 2 used, 3 shared."),
                  stride="integer", count="integer", size="integer"),
)  # fmt: skip
TRACE = record(traceEvents=rows("object"))
PAUSED = record(is_paused="boolean")
SUCCESS = record(success="boolean")
ABORTED = record(aborted=of("integer", "Answers that were running or waiting."))
INFO = record(version="string", config={}, model="object", now="object", system="object")
DELETED = record(id="string", object="string", deleted="boolean")
MODEL = record(
    id="string", object="string", created="integer", owned_by="string", root="string", parent="string?",
    max_model_len=of("integer?", "Tokens of prompt and answer together; null for an adapter."),
    permission=rows("object"),
)  # fmt: skip
MODELS = record(object="string", data=rows(MODEL))
TOKENS = record(
    count="integer", max_model_len="integer", tokens=rows("integer"), token_strs=or_null(rows("string"))
)  # fmt: skip
TEXT = record(prompt="string")
VERSION = record(version="string")
LOAD = record(server_load=of("integer", "Generating requests that are being answered now."))
ANTHROPIC_ERROR = record(type="string", error=record(type="string", message="string"))
ERROR = record(
    error=record(message="string", type="string", param=of("string?", "Dotted path of the field at fault."),
                 code={"type": ["string", "integer", "null"]})
)  # fmt: skip

# ---- streams: a line for each kind of event, in the order in which they come; ... stands for what the whole answer has

_LAST = """
data: {..., "choices": [], "usage": {...}}                            with stream_options.include_usage
data: {"error": {...}}                                                in place of the rest: it failed
data: [DONE]"""
CHAT_EVENTS = (
    """\
data: {"id", "object": "chat.completion.chunk", "created", "model", "choices": [CHOICE], ...}, where CHOICE is
  {"index", "delta": {"role": "assistant", "content": ""}}            once for each answer
  {"index", "delta": {"reasoning": TEXT}}                             a piece of the thought
  {"index", "delta": {"content": TEXT}, "logprobs"}                   a piece of the answer
  {"index", "delta": {"tool_calls": [CALL]}}                          a piece of a call, where CALL is
    {"index", "id", "type": "function", "function": {"name", "arguments": ""}}  once
    {"index", "function": {"arguments": TEXT}}
  {"index", "delta", "finish_reason", "stop_reason"}                  the last one of an answer; null before
data: {..., "choices": [], "prompt_progress": {"total", "cache", "processed", "time_ms"}}  with return_progress"""
    + _LAST
)
COMPLETION_EVENTS = (
    """\
data: {"id", "object": "text_completion", "created", "model", "choices": [CHOICE], ...}, where CHOICE is
  {"index", "text": TEXT, "logprobs", "finish_reason": null}          a piece of the answer
  {"index", "text", "finish_reason", "stop_reason"}                   the last one of an answer"""
    + _LAST
)
GENERATED_EVENTS = (
    """\
data: {"request_id", "choices": [CHOICE]}, where CHOICE is
  {"index", "token_ids": [...], "logprobs", "finish_reason": null, "stop_reason"}
  {"index", "token_ids", "finish_reason"}                             the last one of an answer"""
    + _LAST
)
RESPONSE_EVENTS = """\
event: and data: {"type": the same name, "sequence_number", ...}
  response.created, response.in_progress                  response
  response.output_item.added                              output_index, item
    response.content_part.added                           item_id, output_index, content_index, part
    response.output_text.delta                            item_id, output_index, content_index, delta, logprobs
    response.reasoning_text.delta                         item_id, output_index, content_index, delta
    response.function_call_arguments.delta                item_id, output_index, delta
    response.output_text.done                             text, logprobs
    response.reasoning_text.done                          text
    response.function_call_arguments.done                 arguments
    response.content_part.done                            part
  response.output_item.done                               output_index, item
  response.completed, response.incomplete, response.failed    the last: response, whose status tells more
There is no [DONE]."""
MESSAGE_EVENTS = """\
event: and data: {"type": the same name, ...}
  message_start                 message, without content
  content_block_start           index, content_block: of type text, thinking or tool_use
    content_block_delta         index, delta: {"type": "text_delta", "text"},
                                {"type": "thinking_delta", "thinking"} or {"type": "input_json_delta", "partial_json"}
  content_block_stop            index
  message_delta                 delta: {"stop_reason", "stop_sequence"}, usage
  message_stop
  error                         error: {"type", "message"}, in place of the rest: it failed
There is no [DONE]."""
