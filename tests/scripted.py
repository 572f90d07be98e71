"""Models and a tokenizer whose answers are known in advance, for tests of everything around the model.

`byte_tokenizer`: ids 0-255 are the bytes; a few tokens longer than a byte, and special ones, follow (BOS ... below).
`ScriptModel`: after the prompt, step k prefers script[k], then the end token.  `FlatModel`: ids 97-106 equally likely.
Both have the face of a model (forward, logits, kv_layers, bind) and go through the real runner, sampler and cache.
"""

import threading
import time

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tinyserve.kv.groups import LayerKV

VOCAB = 320  # padded: ids 266-319 have no token
DE, DEF, BRACES = 256, 257, 258
BOS, EOS, EOT = 259, 260, 261
THINK, END_THINK, CALL, END_CALL = 262, 263, 264, 265
CONTEXT = 256

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """A byte-level BPE of 266 tokens with three merges, so that every split is known."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    for offset, byte in enumerate(byte for byte in range(256) if byte not in letters):
        letters[byte] = chr(256 + offset)
    vocab = {letters[byte]: byte for byte in range(256)} | {"DE": DE, "DEF": DEF, "}}": BRACES}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("D", "E"), ("DE", "F"), ("}", "}")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ("<|bos|>", "<|eos|>", "<|eot|>")
    added = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return tokenizer


class ScriptModel:
    """Chooses logits by how many tokens stand after the prompt; no weights, no attention.

    Args:
        script: ids preferred one after the other, then EOS for ever.
        seconds: how long a forward takes.
        poison: {(first prompt id, step): value}: logits of that row at that step become NaN / inf / -inf everywhere.
    """

    vocab_size = VOCAB

    def __init__(self, script=(), *, seconds=0.0, poison=None):
        self.script = list(script)
        self.seconds = seconds
        self.poison = poison or {}
        self.rows = None
        self.forwards = 0
        self.gate = threading.Event()
        self.gate.set()

    def attach(self, runner):
        """Let the model see prompt lengths and tokens, which real models do not need."""
        self.rows = runner.rows

    def kv_layers(self):
        return [LayerKV(kv_heads=1, head_dim=8)]

    def bind(self, groups, storage):
        pass

    def forward(self, batch):
        self.gate.wait(30)
        if self.seconds:
            time.sleep(self.seconds)
        self.forwards += 1
        counts = batch.query_start[1:] - batch.query_start[:-1]
        slots = torch.repeat_interleave(batch.slots, counts)
        prompt_lens = torch.tensor(self.rows.prompt_lens, dtype=torch.int32)
        steps = batch.positions - prompt_lens[slots] + 1
        return torch.stack([steps, self.rows.tokens[slots, 0]], dim=1).float()

    def logits(self, hidden):
        logits = torch.zeros(len(hidden), VOCAB)
        for row, (step, first) in zip(logits, hidden.int().tolist(), strict=True):
            row[self.script[step] if 0 <= step < len(self.script) else EOS] = 50.0
            if (first, step) in self.poison:
                row[:] = self.poison[first, step]
        return logits


class FlatModel(ScriptModel):
    """Logit 0 for ids 97-106 (a-j), -100 elsewhere, at every step."""

    def logits(self, hidden):
        logits = torch.full((len(hidden), VOCAB), -100.0)
        logits[:, 97:107] = 0.0
        return logits
