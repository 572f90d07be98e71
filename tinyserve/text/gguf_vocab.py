"""A tokenizer rebuilt from the metadata of a GGUF file.

A GGUF file holds the vocabulary, the merges or scores, and the *name* of the rule that cuts text before merging; the
rule itself is data of the original tokenizer.json and stands in the tables here. A name that is not in the tables is
refused: a wrong rule gives a model that merely seems a little worse.

Two kinds exist. "gpt2" is byte-level BPE: text is cut by a regular expression, each byte becomes a printable letter,
letters are merged. "llama" is SentencePiece: spaces become U+2581, the best-scored neighbours are merged, and what no
piece covers falls back to byte pieces.

Before: checkpoint/gguf.py.  After: tokenizer.py.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from attrs import frozen
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ..errors import CheckpointError

log = logging.getLogger(__name__)

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # token_type
SPACE = "\u2581"
PADDING = re.compile(r"\[PAD\d+\]")  # how converters fill a vocabulary up to the rows of the embedding: not tokens

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
NEWLINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{NEWLINES_AND_SPACES}"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{NEWLINES_AND_SPACES}"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*%s"
PUNCTUATION = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{NEWLINES_AND_SPACES}"
TEKKEN = CASED_WORDS % ("", "") + r"|\p{N}" + PUNCTUATION
GPT_4O = CASED_WORDS % (CONTRACTIONS + "?", CONTRACTIONS + "?") + r"|\p{N}{1,3}" + PUNCTUATION
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + NEWLINES_AND_SPACES
)


@frozen
class Cut:
    """How a byte-level vocabulary cuts text before merging.

    Args:
        splits: regular expressions applied one after the other, each match a piece of its own.
        digits: every digit alone, before GPT-2's rule.
        gpt2: GPT-2's built-in rule, after `splits`.
        nfc: text is first composed (Unicode NFC).
        whole_words: a piece that is itself a token is not merged up from letters.
        bos: BOS is put in front when the file does not say.
    """

    splits: tuple[str, ...] = ()
    digits: bool = False
    gpt2: bool = False
    nfc: bool = False
    whole_words: bool = False
    bos: bool = False


PLAIN_GPT2 = Cut(gpt2=True)
DIGITS_GPT2 = Cut(digits=True, gpt2=True)
LLAMA3_CUT = Cut(splits=(LLAMA3,), whole_words=True, bos=True)
QWEN2_CUT = Cut(splits=(QWEN2,), nfc=True)
CUTS: dict[str, Cut] = {
    **dict.fromkeys(["default", "gpt-2", "gpt2", "phi-2", "olmo"], PLAIN_GPT2),
    **dict.fromkeys(["smollm", "starcoder", "refact", "command-r"], DIGITS_GPT2),
    **dict.fromkeys(["llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"], LLAMA3_CUT),
    **dict.fromkeys(["dbrx", "smaug-bpe"], Cut(splits=(LLAMA3,))),
    **dict.fromkeys(["qwen2", "deepseek-r1-qwen"], QWEN2_CUT),
    "qwen35": Cut(splits=(QWEN35,), nfc=True),
    "tekken": Cut(splits=(TEKKEN,), whole_words=True, bos=True),
    **dict.fromkeys(["gpt-4o", "llama4"], Cut(splits=(GPT_4O,))),
    "deepseek-v3": Cut(splits=(r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", DEEPSEEK3)),
    "deepseek-coder": Cut(splits=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"), digits=True),
}
# Architectures whose tokenizer ranks merges by the place of the result in the vocabulary, not by its score.
RANKED_BY_PLACE = {"gemma", "gemma2", "gemma3"}


def build(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file describes.

    Args: metadata: of GGUFFile; the `tokenizer.ggml.*` keys are read.
    Returns: a complete tokenizer: added tokens, BOS/EOS post-processor, decoder.
    Raises: CheckpointError: keys are missing or do not fit together, or a kind that is not known here.
    """
    vocab = _Vocab(metadata)
    if vocab.kind == "gpt2":
        tokenizer = _byte_level(vocab)
    elif vocab.kind == "llama":
        tokenizer = _sentencepiece(vocab)
    else:
        raise CheckpointError(f"tokenizer.ggml.model is {vocab.kind!r}; known kinds: gpt2, llama.")
    tokenizer.add_tokens(vocab.added(USER_DEFINED))
    tokenizer.add_special_tokens(vocab.added(CONTROL))
    if framed := vocab.frame():
        tokenizer.post_processor = framed
    return tokenizer


class _Vocab:
    """The `tokenizer.ggml.*` keys, checked."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.kind = self.get("model")
        self.pre = self.get("pre")
        self.tokens: list[str] = self.get("tokens")
        if not isinstance(self.tokens, list) or not self.tokens or not isinstance(self.tokens[0], str):
            raise CheckpointError("The GGUF metadata has no tokenizer.ggml.tokens, so text cannot be encoded.")
        types = self.get("token_type")
        self.types: list[int] = types.tolist() if isinstance(types, np.ndarray) else [1] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise CheckpointError(f"tokenizer.ggml has {len(self.tokens)} tokens, but {len(self.types)} token types.")
        if self.by_place:
            # Runs of spaces are stored as real spaces, but after the space rule text holds U+2581 instead.
            self.tokens = [SPACE * len(t) if " " in t and not t.strip(" ") else t for t in self.tokens]

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    @property
    def by_place(self) -> bool:
        return self.kind == "llama" and self.metadata.get("general.architecture") in RANKED_BY_PLACE

    def ids(self) -> dict[str, int]:
        ids = {token: index for index, token in enumerate(self.tokens)}
        for index, kind in enumerate(self.types):
            if kind == UNUSED and PADDING.fullmatch(self.tokens[index]):
                ids.pop(self.tokens[index], None)
        return ids

    def added(self, wanted: int) -> list[AddedToken]:
        """Tokens that are found in text as they stand, never cut; control tokens are special as well.

        Runs of U+2581 are left out: text has spaces there when added tokens are looked for; merges find them later.
        """
        return [
            AddedToken(token, special=wanted == CONTROL, normalized=False)
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind == wanted and token.strip(SPACE)
        ]

    def token(self, name: str) -> tuple[str, int] | None:
        index = self.get(f"{name}_token_id")
        if index is None:
            return None
        if not isinstance(index, int) or not 0 <= index < len(self.tokens):
            raise CheckpointError(
                f"tokenizer.ggml.{name}_token_id is {index!r}, outside the {len(self.tokens)} tokens."
            )
        return self.tokens[index], int(index)

    def frame(self) -> processors.TemplateProcessing | None:
        """What puts BOS before and EOS behind a text, if the file wants either."""
        wants_bos = self.get("add_bos_token", self.kind == "llama" or CUTS[self.pre or "default"].bos)
        bos = self.token("bos") if wants_bos else None
        eos = self.token("eos") if self.get("add_eos_token", False) else None
        return frame(bos, eos) if bos or eos else None


def frame(bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> processors.TemplateProcessing:
    """A post-processor that puts BOS before and EOS behind a text. Args: text and id of each, or None for neither."""
    single = [*([bos[0]] if bos else []), "$A", *([eos[0]] if eos else [])]
    pair = [*single, *("$B" if part == "$A" else part for part in single)]
    return processors.TemplateProcessing(single, pair, [token for token in (bos, eos) if token])


def _byte_level(vocab: _Vocab) -> Tokenizer:
    pre = vocab.pre or "default"
    if pre not in CUTS:
        raise CheckpointError(f"tokenizer.ggml.pre is {pre!r}, a way to cut text that is not known here.")
    if pre == "default":
        log.warning("The GGUF file does not name its pre-tokenizer; GPT-2's is used. Token counts may differ slightly.")
    cut = CUTS[pre]
    merges = vocab.get("merges")
    if not isinstance(merges, list):
        raise CheckpointError("A byte-level vocabulary needs tokenizer.ggml.merges.")
    ids = vocab.ids()
    try:
        pairs = [tuple(merge.split(" ", 1)) for merge in merges]
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=pairs, ignore_merges=cut.whole_words))
    except Exception as error:  # the library raises a bare Exception for a merge of unknown tokens
        raise CheckpointError(f"tokenizer.ggml.merges do not fit the vocabulary: {error}") from error
    steps: list[Any] = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in cut.splits]
    if cut.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.gpt2))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if cut.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocab: _Vocab) -> Tokenizer:
    ids = vocab.ids()
    unknown = vocab.token("unknown")
    try:
        model = models.BPE(
            vocab=ids,
            merges=list(_merges(vocab, ids)),
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    except Exception as error:  # see above
        raise CheckpointError(f"The SentencePiece vocabulary does not fit together: {error}") from error
    tokenizer = Tokenizer(model)
    prefix = vocab.get("add_space_prefix", True)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges(vocab: _Vocab, ids: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Every way to make a token of two others, best result first; of one result, the longest left part first.

    SentencePiece merges the neighbours whose result scores best; a list of merges in that order does the same.
    """
    order: Any = vocab.tokens
    if not vocab.by_place:
        scores = vocab.get("scores")
        if not isinstance(scores, np.ndarray) or len(scores) != len(vocab.tokens):
            raise CheckpointError("A SentencePiece vocabulary needs tokenizer.ggml.scores, one for each token.")
        ranks = (-scores).argsort(kind="stable").tolist()
        order = [vocab.tokens[index] for index in ranks]
    for token in order:
        for cut in range(len(token) - 1, 0, -1):
            left = token[:cut]
            if left in ids:
                right = token[cut:]
                if right in ids:
                    yield left, right
