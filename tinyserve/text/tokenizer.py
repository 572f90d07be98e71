"""Text to token ids and back, for one model.

The work is done by the `tokenizers` library, from tokenizer.json or from a GGUF file's vocabulary (gguf_vocab.py).
This file adds what serving needs: no BOS twice, no more work than a limit allows, bytes of single tokens, and safety
across threads (the library's object is never changed after construction, so that encoding never meets "already
borrowed").

Before: checkpoint/source.py (the files).  After: template.py, detokenize.py, engine/intake.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import tokenizers
from attrs import define, field, frozen

from ..checkpoint.source import Source
from ..errors import CheckpointError, shown
from . import gguf_vocab

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
SHORT = 1024  # characters; what takes less than half a millisecond
# transformers writes 10**30 for "no limit"; nothing real is above this.
NO_LIMIT = 10**9
MOST_EMPTY = 2**18  # ids without a token that are remembered as such


def _byte_letters() -> dict[str, int]:
    """GPT-2's alphabet: each byte as one printable letter; the 68 bytes that are not printable follow from U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


BYTE_LETTERS = _byte_letters()


@frozen(kw_only=True)
class TokenizerFacts:
    """What the companion files say beside the vocabulary itself.

    Args:
        special_tokens: "bos_token", "eos_token", ... -> text; only those that the model has.
        chat_template: Jinja text, named texts ("default", "tool_use", ...), or None.
        model_max_length: the longest text the tokenizer's authors meant, or None.
    """

    special_tokens: Mapping[str, str] = field(factory=dict)
    chat_template: str | Mapping[str, str] | None = None
    model_max_length: int | None = None


@define(slots=False, eq=False)
class Tokenizer:
    """One model's tokenizer; any number of threads may use it at once.

    Args:
        backend: a complete tokenizers.Tokenizer; it becomes this object's own.
        facts: special tokens, chat template, length.
    """

    backend: tokenizers.Tokenizer
    facts: TokenizerFacts = field(factory=TokenizerFacts)
    _bytes: dict[int, bytes] = field(factory=dict, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        self.backend.no_truncation()
        self.backend.no_padding()
        model = self.backend.model
        if hasattr(model, "_resize_cache"):
            # The library keeps the first 10,000 words that it meets for ever, each in the heap of the thread that met
            # it, whose pages they pin: 25 MB after so many requests with grammars. It makes encoding 10 % faster.
            model._resize_cache(0)

    @classmethod
    def load(cls, source: Source) -> Tokenizer:
        """The tokenizer of a model: from tokenizer.json, else from its GGUF file.

        Raises: CheckpointError: there is neither, or what is there is damaged or of an unknown kind.
        """
        path = source.file("tokenizer.json")
        if path is None and source.gguf_file is None:
            raise CheckpointError(
                f"{source.folder}: neither tokenizer.json nor a .gguf file, so text cannot be encoded."
            )
        if path is None:
            metadata = source.gguf_file.metadata
            return cls(gguf_vocab.build(metadata), _facts_from_gguf(metadata))
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception
            raise CheckpointError(f"{path}: not readable as a tokenizer: {error}") from error
        facts = _facts_from_files(source)
        config = source.json("tokenizer_config.json") or {}
        _add_missing(backend, config, facts)
        _set_frame(backend, config, facts)
        return cls(backend, facts)

    @classmethod
    def stand_in(cls) -> Tokenizer:
        """One token per byte, for models with random weights, whose folder may hold a config and nothing else."""
        letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        vocabulary = {letter: byte for byte, letter in enumerate(sorted(letters))}
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        return cls(backend)

    def encode(self, text: str, *, add_special_tokens: bool = True, limit: int | None = None) -> list[int]:
        """Token ids of `text`. A text that already starts with BOS gets no second one.

        Args:
            add_special_tokens: put the model's BOS / EOS around the text, if it wants any.
            limit: stop working once there are more tokens than this; the answer then has limit + 1 of them, so that
                its length says "at least". Lone surrogates in `text` become U+FFFD.
        """
        text = _without_surrogates(text)
        if limit is not None:
            # Bytes and numbers have one or two characters a token, prose has four or five; the last try is for any.
            # What is encoded in vain costs memory, and others are kept waiting while it is given back. A token that is
            # cut may become as many as it has bytes, so that many more must be there.
            enough = limit + 1 + 4 * self._longest_token
            for characters in (2 * enough, 8 * enough, enough * self._longest_token):
                if len(text) > characters and len(ids := self._encode(text[:characters], add_special_tokens)) >= enough:
                    return ids[: limit + 1]
        ids = self._encode(text, add_special_tokens)
        return ids if limit is None else ids[: limit + 1]

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) < SHORT:
            ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        else:  # `encode` keeps the interpreter locked for as long as it takes: half a second for a megabyte
            ids = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_id and self.adds_bos:
            return ids[1:]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids without a token give nothing, invalid bytes give U+FFFD."""
        if self.bytewise:
            hidden = self.special_ids if skip_special_tokens else frozenset()
            data = b"".join(self.token_bytes(index) for index in ids if index not in hidden)
            if self.strips_space:
                data = data.removeprefix(b" ")
            return data.decode("utf-8", "replace")
        known = [index for index in ids if self.has(index)]
        if len(known) < SHORT:
            return self.backend.decode(known, skip_special_tokens=skip_special_tokens)
        return self.backend.decode_batch([known], skip_special_tokens=skip_special_tokens)[0]  # others run meanwhile

    def has(self, index: int) -> bool:
        """Whether the id stands for a token."""
        return 0 <= index < 2**32 and self.backend.id_to_token(index) is not None

    def token_text(self, index: int) -> str:
        """One token alone as text, special ones too; a token that is part of a character gives U+FFFD."""
        if self.bytewise:
            return self.token_bytes(index).decode("utf-8", "replace")
        return self.decode([index], skip_special_tokens=False)

    def token_bytes(self, index: int) -> bytes:
        """The bytes that one token stands for; empty when there is no such token."""
        found = self._bytes.get(index)
        if found is None:
            # At most one entry for each token, made when first met: a table of all would cost 0.2 s at start. Models
            # have rows without a token, too, and nobody knows how many.
            found = self._make_bytes(index)
            if found or len(self._bytes) < MOST_EMPTY:
                self._bytes[index] = found
        return found

    def _make_bytes(self, index: int) -> bytes:
        if not self.has(index):
            return b""
        token = self.backend.id_to_token(index)
        if self._decoder_kind == "byte_level":
            if all(letter in BYTE_LETTERS for letter in token):
                return bytes(BYTE_LETTERS[letter] for letter in token)
            return token.encode("utf-8")
        if self.bytewise:
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                try:
                    return bytes([int(token[3:5], 16)])
                except ValueError:
                    pass
            return token.replace(gguf_vocab.SPACE, " ").encode("utf-8")
        return self.backend.decode([index], skip_special_tokens=False).encode("utf-8")

    @cached_property
    def _decoder_state(self) -> dict[str, Any]:
        decoder = self.backend.decoder
        return {} if decoder is None else json.loads(decoder.__getstate__())

    @cached_property
    def _decoder_kind(self) -> str:
        """One of "byte_level", "byte_fallback" (SentencePiece), "other": decoded by the library only."""
        state = self._decoder_state
        if state.get("type") == "ByteLevel":
            return "byte_level"
        parts = state.get("decoders", [])
        spaces = {"type": "Replace", "pattern": {"String": gguf_vocab.SPACE}, "content": " "}
        kinds = [part["type"] for part in parts]
        strips_one = parts[3:] in ([], [{"type": "Strip", "content": " ", "start": 1, "stop": 0}])
        if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and parts[0] == spaces and strips_one:
            return "byte_fallback"
        return "other"

    @cached_property
    def bytewise(self) -> bool:
        """Whether text is exactly the joined bytes of its tokens (after `strips_space`)."""
        return self._decoder_kind != "other"

    @cached_property
    def strips_space(self) -> bool:
        """Whether one leading space of a whole text is an artefact of encoding, and dropped by decoding."""
        return any(part["type"] == "Strip" for part in self._decoder_state.get("decoders", []))

    @cached_property
    def added_ids(self) -> dict[int, str]:
        """Ids of all added tokens, special or not -> their text."""
        return {index: token.content for index, token in self.backend.get_added_tokens_decoder().items()}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` hides."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. The model's own vocabulary may be padded to more."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=1)

    @cached_property
    def adds_bos(self) -> bool:
        """Whether `add_special_tokens` puts a BOS in front."""
        ids = self.backend.encode("", add_special_tokens=True).ids
        return self.bos_id is not None and ids[:1] == [self.bos_id]

    def _special_id(self, name: str) -> int | None:
        text = self.facts.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)

    @cached_property
    def bos_id(self) -> int | None:
        return self._special_id("bos_token")

    @cached_property
    def eos_id(self) -> int | None:
        return self._special_id("eos_token")

    @property
    def chat_template(self) -> str | Mapping[str, str] | None:
        return self.facts.chat_template

    @property
    def model_max_length(self) -> int | None:
        return self.facts.model_max_length


def _without_surrogates(text: str) -> str:
    """Halves of a surrogate pair (JSON can carry them) joined where they match, else U+FFFD: UTF-8 has neither."""
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _facts_from_gguf(metadata: Mapping[str, Any]) -> TokenizerFacts:
    tokens = metadata["tokenizer.ggml.tokens"]
    keys = {"unk": "unknown", "pad": "padding", "sep": "seperator"}  # the last is spelled so in the format
    special = {}
    for name in SPECIAL_NAMES:
        short = name.removesuffix("_token")
        index = metadata.get(f"tokenizer.ggml.{keys.get(short, short)}_token_id")
        if isinstance(index, int) and 0 <= index < len(tokens):
            special[name] = tokens[index]
    template = metadata.get("tokenizer.chat_template")
    template = template if isinstance(template, str) else None
    names = metadata.get("tokenizer.chat_templates")
    if isinstance(names, list) and names:
        named = {name: metadata.get(f"tokenizer.chat_template.{name}") for name in names}
        template = {"default": template, **named} if template else named
        template = {name: text for name, text in template.items() if isinstance(text, str)}
    return TokenizerFacts(special_tokens=special, chat_template=template)


def _facts_from_files(source: Source) -> TokenizerFacts:
    config = source.json("tokenizer_config.json") or {}
    special = {}
    for value in (source.json("special_tokens_map.json") or {}, config):  # the latter wins
        for name in SPECIAL_NAMES:
            token = value.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                special[name] = token
    length = config.get("model_max_length")
    sane = isinstance(length, (int, float)) and 0 < length < NO_LIMIT
    return TokenizerFacts(
        special_tokens=special,
        chat_template=_template_of(source, config),
        model_max_length=int(length) if sane else None,
    )


def _template_of(source: Source, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The chat template: own files win over the entry in tokenizer_config.json; named ones become a dict."""
    template = config.get("chat_template")
    if isinstance(template, list):  # older form of named templates: [{"name": ..., "template": ...}]
        template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
    if isinstance(template, dict):
        template = {name: text for name, text in template.items() if isinstance(name, str) and isinstance(text, str)}
    if path := source.file("chat_template.jinja"):
        template = path.read_text("utf-8")
    elif isinstance(text := (source.json("chat_template.json") or {}).get("chat_template"), str):
        template = text
    folder = source.folder / "additional_chat_templates"
    if named := {path.stem: path.read_text("utf-8") for path in sorted(folder.glob("*.jinja"))}:
        default = template if isinstance(template, dict) else {"default": template} if template else {}
        return {**default, **named}
    return template if isinstance(template, (str, dict)) else None


def _add_missing(backend: tokenizers.Tokenizer, config: Mapping[str, Any], facts: TokenizerFacts) -> None:
    """Add tokens that tokenizer_config.json lists and tokenizer.json lacks; mark its named tokens as special."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder")
    listed = listed if isinstance(listed, dict) else {}
    if wrong := [index for index in listed if not index.isdecimal()]:
        raise CheckpointError(f"tokenizer_config.json: added_tokens_decoder has {shown(wrong[0])} where an id belongs.")
    entries = sorted(listed.items(), key=lambda item: int(item[0]))
    flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
    for index, entry in entries:
        text = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(text, str) or text in known:
            continue
        backend.add_tokens([tokenizers.AddedToken(text, **{flag: bool(entry.get(flag, False)) for flag in flags})])
        if backend.token_to_id(text) != int(index):
            raise CheckpointError(
                f"tokenizer_config.json gives {text!r} the id {index}, which tokenizer.json contradicts."
            )
    names = [text for text in facts.special_tokens.values() if backend.token_to_id(text) is not None]
    plain = [text for text in dict.fromkeys(names) if text not in known or not known[text].special]
    if plain:
        backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in plain])


def _set_frame(backend: tokenizers.Tokenizer, config: Mapping[str, Any], facts: TokenizerFacts) -> None:
    """Let add_bos_token / add_eos_token of tokenizer_config.json, where given, replace tokenizer.json's own frame."""
    flags = {name: config.get(f"add_{name}_token") for name in ("bos", "eos")}
    if not any(isinstance(flag, bool) for flag in flags.values()):
        return
    ends = []
    for name, flag in flags.items():
        text = facts.special_tokens.get(f"{name}_token")
        index = backend.token_to_id(text) if flag is True and text else None
        ends.append(None if index is None else (text, index))
    backend.post_processor = gguf_vocab.frame(*ends)
