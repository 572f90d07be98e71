"""Makes tokenizer_cases.json: token ids that `transformers` gives for the two real models, on a few hundred texts.

Run once, by hand: `python -m tests.data.make_tokenizer_cases`. transformers needs a minute for what tests then
compare in a second. SmolLM2's published tokenizer.json takes every digit alone before GPT-2's rule; transformers
(5.24) rebuilds the tokenizer from GGUF without that step, so it is put back here.
"""

import json
import random
from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from tests import real_models

PROMPTS = {
    "france": "The capital of France is",
    "story": "Once upon a time, there was a small robot who",
    "code": 'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "numbers": "1, 2, 3, 4, 5, 6,",
    "unicode": "Le café coûte 3 € — 東京は日本の首都です。\U0001f642 ",
}
CHATS = {
    "chat1": [{"role": "user", "content": "What is the capital of France?"}],
    "chat2": [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
}
COUNT = 400


def texts():
    generator = random.Random(20)
    anything = "".join(chr(generator.randrange(32, 0x3000)) for _ in range(400))
    pools = [
        "abc dEF ,.\n\t  123 ' ll 's 've",
        "é京都ひらカタ\U0001f336\U00010348กا\u0301\u200d가ß",
        "\u2581 <>|_im start end{}[]",
        "    \n\n\n\t\t",
        anything,
    ]
    fixed = [
        "",
        " ",
        "  ",
        "a  b",
        " 1",
        "  1",
        "x = 12345",
        "<|im_start|>user\nhi<|im_end|>",
        "<bos>x",
        "a<eos>b",
        "\r\n",
        "\x00",
    ]
    made = [
        "".join(generator.choice(generator.choice(pools)) for _ in range(generator.randrange(1, 40)))
        for _ in range(COUNT)
    ]
    return fixed + made


def cases(path, *, chats, digits):
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if digits:
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
        )
    rendered = {
        name: tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True) for name, m in chats.items()
    }
    return {
        "prompts": {
            name: {"text": text, "ids": tokenizer(text).input_ids} for name, text in (PROMPTS | rendered).items()
        },
        "texts": [{"text": text, "ids": tokenizer(text).input_ids} for text in texts()],
    }


if __name__ == "__main__":
    found = {
        "smollm2": cases(real_models.smollm2(), chats=CHATS, digits=True),
        "gemma3": cases(real_models.gemma3(), chats={}, digits=False),
    }
    Path(__file__).with_name("tokenizer_cases.json").write_text(
        json.dumps(found, ensure_ascii=True, separators=(",", ":"))
    )
