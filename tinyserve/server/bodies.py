"""The fields of the OpenAI routes: what chat and completions share, and what each has of its own.

Names are OpenAI's and vLLM's. Where a value comes from, for sampling fields: the request, else the model's
generation_config (or --override-generation-config), else the default named here.

Before: schema.py (how a field is declared).  After: openai_chat.py, openai_completions.py, tokens.py, openapi.py.
"""

from __future__ import annotations

from ..checks import MAX_TEXT_TOKENS, MAX_TEXTS
from ..errors import COUNTED_CONTEXTS
from ..request import MAX_STOP_STRINGS
from .schema import (
    Body,
    Param,
    choice,
    documented,
    either,
    flag,
    harmless,
    inside,
    integer,
    labels,
    listed,
    mapping,
    number,
    objects,
    refusal,
    sampled,
    text,
    tokens,
)

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
INT64 = (-(2**63), 2**63 - 1)

MODEL = Param("model", text(), "A served name. Missing or empty: the first one.")
PENALTIES = [
    sampled("temperature", "0 takes the most likely token each time; below 0.01 but above 0 counts as 0.01."),
    sampled("top_p", "Draw from the likeliest tokens that together have this probability."),
    sampled("top_k", "Draw from so many likeliest tokens; 0 and -1 mean all."),
    sampled("min_p", "Leave out tokens less likely than this share of the likeliest one."),
    sampled("repetition_penalty", "Divides the logits of tokens that are in the prompt or the answer."),
    sampled("presence_penalty", "Subtracted once from the logits of tokens in the answer."),
    sampled("frequency_penalty", "Subtracted for each time that a token is in the answer."),
    sampled("seed", "Makes the draw repeatable; answer i of n uses seed + i. -1: none."),
]
STRUCTURED = Param(
    "structured_outputs", mapping(),
    'The form that the answer must have, one of: `{"json": SCHEMA}`, `{"json_object": true}`, `{"regex": "[0-9]+"}`, '
    '`{"choice": ["yes", "no"]}`, `{"grammar": TEXT}` in the syntax of Lark (`start: "yes" | "no"`) or GBNF and EBNF '
    '(`root ::= "yes" | "no"`), `{"structural_tag": TAG}`. TAG is free text with constrained parts: `{"structures": '
    '[{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}`, or `{"format": FORMAT}` of a type '
    "among const_string, json_schema, regex, any_text, sequence, or, optional, tag, triggered_tags and "
    "tags_with_separator. With them: disable_any_whitespace, whitespace_pattern, disable_additional_properties, "
    "enable_in_reasoning.",
)  # fmt: skip
SAMPLING = [
    sampled("n", "Answers for each prompt. With use_beam_search: the beam width."),
    *PENALTIES,
    Param("stop", either(text(), listed(text(), most=MAX_STOP_STRINGS), expected="a string or a list of strings"),
          "Texts that end the answer; they are not part of it."),
    Param("stop_token_ids", tokens(), "Ids that end the answer."),
    Param("include_stop_str_in_output", flag(), "Show the stop string as well.", False),
    Param("ignore_eos", flag(), "Go on after the model's end token.", False),
    sampled("min_tokens", "No end token and no stop string before so many tokens."),
    Param("skip_special_tokens", flag(), "Leave special tokens out of the text.", True),
    Param("spaces_between_special_tokens", flag(), "Put spaces between special tokens that are shown.", True),
    Param("truncate_prompt_tokens", integer(), "Keep so many prompt tokens; -1: as many as leave room for one more. "
          f"A text that is cut has at most {MAX_TEXT_TOKENS} tokens, or {COUNTED_CONTEXTS} contexts."),
    Param("truncation_side", choice("left", "right"), "Which end of a prompt that is too long is dropped.", "left"),
    sampled("prompt_logprobs", "Report the log-probabilities of the prompt's tokens, with so many alternatives; "
            "-1: all. Not when streaming."),
    Param("logprob_token_ids", tokens(), "Ids whose log-probability is reported at each token; needs logprobs."),
    Param("allowed_token_ids", tokens(), "The only ids that may be generated."),
    Param("bad_words", either(text(), listed(text(), most=MAX_TEXTS), expected="a string or a list of strings"),
          "Words that the answer must not contain."),
    Param("logit_bias", mapping(), "Token id -> -100..100, added to its logit."),
    Param("use_beam_search", flag(), "Find the n most likely answers instead of drawing; not when streaming.", False),
    Param("length_penalty", number(), "Exponent of the length that beam scores are divided by."),
    Param("repetition_detection", mapping(), "End answers that go round in circles: max_pattern_size, "
          "min_pattern_size, min_count (at least 2)."),
    sampled("thinking_token_budget", "Most tokens of the thought before an answer; -1: no limit. Not beside a form "
            "that holds the thought as well."),
    STRUCTURED,
    *refusal("best_of", off=[1], why="draw several answers with n, and choose among them.",
             help="Not a field of this API any more."),
    *refusal("watermarking", off=[False]),
    *refusal("kv_transfer_params", "ec_transfer_params", "vllm_xargs", off=[{}]),
    *refusal("routed_experts_prompt_start", "prompt_logprob_token_ids"),
    Param("guided_json", either(text(), mapping()), "The older name of structured_outputs.json."),
    Param("guided_regex", text(), "The older name of structured_outputs.regex."),
    Param("guided_choice", listed(text(), "a list of strings"), "The older name of structured_outputs.choice."),
    Param("guided_grammar", text(), "The older name of structured_outputs.grammar."),
    *harmless(text(), "guided_decoding_backend"),
    *refusal("prompt_embeds", "logits_processors", off=[[]]),
]  # fmt: skip
FORMAT = Param("response_format", inside(
    Param("type", choice("text", "json_object", "json_schema", "structural_tag"), required=True),
    Param("json_schema", inside(
        Param("name", text()), Param("description", text()), Param("schema", mapping("a JSON schema")),
        Param("strict", flag(), "Schemas are always kept to."),
    )),
    Param("structures", objects()), Param("triggers", listed(text())), Param("format", mapping()),
), "The form that the answer must have.")  # fmt: skip
STREAMING = [
    Param("stream", flag(), "Send the answer as server-sent events.", False),
    Param("stream_options", inside(
        Param("include_usage", flag(), "One more chunk with the usage, before [DONE].", False),
        Param("continuous_usage_stats", flag(), "The usage so far in every chunk.", False),
    ), "Allowed only together with stream."),
    Param("stream_interval", integer(1, 2**31 - 1), "Tokens in a chunk; the server's --stream-interval if that is "
          "larger. The first and the last chunk come at once."),
    Param("return_progress", flag(), "While the prompt is computed, send chunks without choices that hold "
          "`prompt_progress`: total, cache, processed, time_ms. Only with stream.", False),
]  # fmt: skip
REQUEST = [
    Param("priority", integer(*INT64), "Lower runs earlier, with --scheduling-policy priority.", 0),
    Param("cache_salt", text(), "Cached prefixes are shared only among requests with an equal one. "
          "1 to 128 characters, none of @ / \\ or NUL."),
    Param("request_id", text(), "The answer's id, behind the route's prefix; the header X-Request-Id wins."),
    Param("return_token_ids", flag(), "Add the ids of the prompt and of the answer.", False),
    Param("return_tokens_as_token_ids", flag(), "Write tokens in logprobs as token_id:N."),
    *harmless(text(), "user", "service_tier", "session_id", "safety_identifier", "prompt_cache_key"),
    *harmless(labels(), "metadata"),
    *harmless(flag(), "store"),
]  # fmt: skip
TEMPLATE = [
    Param("add_generation_prompt", flag(), "End the prompt with the beginning of an answer.", True),
    Param("continue_final_message", flag(), "Go on writing the last message instead of beginning a new one.", False),
    Param("documents", objects(), "Handed to the chat template."),
    Param("chat_template", text(), "Another template; only with --trust-request-chat-template."),
    Param("chat_template_kwargs", mapping(), "Variables for the chat template."),
    Param("reasoning_effort", choice(*EFFORTS), "Handed to the chat template."),
    Param("add_special_tokens", flag(), "Let the tokenizer add its BOS to what the template wrote.", False),
]
MESSAGES = Param(
    "messages",
    documented({"type": "array", "minItems": 1, "items": {"type": "object", "properties": {
        "role": {"type": "string", "description": "system, developer, user, assistant or tool"},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]},
    }, "required": ["role"]}}, "a list of messages", list),
    "The conversation. Content is a text or a list of parts of type text.",
)  # fmt: skip
TOOLS = [
    Param("tools", objects("a list of tools"), "Functions that the model may call. strict: true holds their arguments "
          "to the schema whenever a call is forced, and else for models that mark where a call begins."),
    Param("tool_choice", either(text(), mapping(), expected="none, auto, required, or an object that names a function"),
          "none, auto, required, or {type: function, function: {name}}."),
    Param("parallel_tool_calls", flag(), "false keeps only the first call.", True),
]  # fmt: skip

CHAT = Body("ChatRequest", [
    MODEL,
    MESSAGES,
    Param("max_completion_tokens", integer(), "Most tokens of an answer, the end token included; default, and "
          "where more is asked: the rest of the context."),
    Param("max_tokens", integer(), "The older name of max_completion_tokens."),
    Param("logprobs", flag(), "Report the log-probability of each token.", False),
    Param("top_logprobs", integer(), "And of so many alternatives; -1: all.", 0),
    Param("echo", flag(), "Put the last message in front of the answer, if their roles are equal.", False),
    Param("include_reasoning", flag(), "false leaves reasoning out of the answer.", True),
    *SAMPLING, FORMAT, *STREAMING, *REQUEST, *TEMPLATE, *TOOLS,
    *refusal("mm_processor_kwargs", "media_io_kwargs", off=[{}]),
    *refusal("functions", off=[[]], why="an old form; use tools."),
    *refusal("function_call", off=["none", "auto"], why="an old form; use tool_choice."),
    *refusal("modalities", off=[["text"], []], why="answers are text."),
    *refusal("audio", "web_search_options", "prediction"),
    *refusal("return_prompt_text", "return_weight_versions", off=[False]),
    *harmless(choice("low", "medium", "high"), "verbosity"),
])  # fmt: skip

PROMPTS = documented(
    {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}},
            {"type": "array", "items": {"type": "integer"}},
            {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
        ]
    },
    "a text, a list of texts, a list of token ids, or a list of such lists; not empty",
    object,
)
COMPLETION = Body("CompletionRequest", [
    MODEL,
    Param("prompt", PROMPTS, "One prompt or up to 1024; texts or token ids."),
    Param("max_tokens", integer(), "Most tokens of an answer, at most the rest of the context if more is asked. "
          "0 computes the prompt only.", 16),
    Param("logprobs", integer(), "Report log-probabilities, with so many alternatives; -1: all."),
    Param("echo", flag(), "Begin each answer with its prompt; with logprobs, those of the prompt come too.", False),
    Param("suffix", text(), "Refused unless empty: the model cannot fill in between two texts."),
    *SAMPLING, FORMAT, *STREAMING, *REQUEST,
    Param("add_special_tokens", flag(), "Let the tokenizer add its BOS to text prompts.", True),
])  # fmt: skip

EMBEDDING = Body("EmbeddingRequest", [
    MODEL,
    Param("input", PROMPTS, "One text or up to 1024, or token ids."),
    Param("encoding_format", choice("float", "base64"), "Numbers, or little-endian float32 as base64.", "float"),
    Param("dimensions", integer(), "Refused: the vectors are not made to be cut."),
    Param("use_activation", flag(), "Scale each vector to length 1.", True),
    *[param for param in SAMPLING if param.name in ("truncate_prompt_tokens", "truncation_side")],
    *[param for param in REQUEST if not param.name.startswith("return_")],
    *refusal("messages", "embed_dtype", "endianness", "normalize", "task"),
    Param("add_special_tokens", flag(), "Let the tokenizer add its special tokens to texts.", True),
])  # fmt: skip

TOKENIZE = Body("TokenizeRequest", [
    MODEL,
    Param("prompt", text(), f"A text of at most {MAX_TEXT_TOKENS} tokens, or {COUNTED_CONTEXTS} contexts if that is "
          "more; or give messages."),
    MESSAGES,
    Param("return_token_strs", flag(), "Add the text of each token.", False),
    *TEMPLATE[:-1], *TOOLS,
    Param("add_special_tokens", flag(), "Let the tokenizer add its BOS; default: for a prompt yes, for messages no."),
])  # fmt: skip

DETOKENIZE = Body("DetokenizeRequest", [
    MODEL,
    Param("tokens", documented({"type": "array", "items": {"type": "integer"}}, "a list of token ids", list),
          f"The ids; at most {MAX_TEXT_TOKENS}, or {COUNTED_CONTEXTS} contexts if that is more."),
])  # fmt: skip
