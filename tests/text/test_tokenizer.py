"""tokenizer.py and gguf_vocab.py: exact ids, from files and from GGUF metadata."""

import io
import json
import random
import threading
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from tests import real_models
from tests.scripted import BOS, TEMPLATE, byte_tokenizer
from tinyserve.checkpoint.source import Source, resolve
from tinyserve.errors import CheckpointError
from tinyserve.text.gguf_vocab import CUTS, build
from tinyserve.text.tokenizer import Tokenizer, TokenizerFacts, _facts_from_gguf

CASES = Path(__file__).parent.parent / "data" / "tokenizer_cases.json"


@cache
def real(name):
    path = real_models.smollm2() if name == "smollm2" else real_models.gemma3()
    return Tokenizer.load(resolve(str(path)))


@cache
def bytewise():
    return Tokenizer(byte_tokenizer())


def with_bos():
    """TOK of the cases with a post-processor that puts BOS in front, as Llama tokenizers do."""
    backend = byte_tokenizer()
    backend.post_processor = processors.TemplateProcessing("<|bos|> $A", special_tokens=[("<|bos|>", BOS)])
    return Tokenizer(backend, TokenizerFacts(special_tokens={"bos_token": "<|bos|>", "eos_token": "<|eos|>"}))


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_ids_equal_transformers(name):
    """The prompts of the greedy reference and 412 odd texts: not one id differs, but for the second BOS."""
    cases = json.loads(CASES.read_text())[name]
    tokenizer = real(name)
    doubled = [case for case in cases["texts"] if case["text"].startswith("<bos>") and tokenizer.adds_bos]
    for case in doubled:
        case["ids"] = case["ids"][1:]  # transformers: 2 BOS; here "one BOS", on purpose
    wrong = [case["text"] for case in cases["texts"] if tokenizer.encode(case["text"]) != case["ids"]]

    assert wrong == []
    assert {n: case["ids"] for n, case in cases["prompts"].items()} == {
        n: tokenizer.encode(case["text"]) for n, case in cases["prompts"].items()
    }


@pytest.mark.parametrize(("name", "seconds"), [("smollm2", 1.0), ("gemma3", 3.0)])
def test_rebuilding_is_quick(name, seconds):
    """CPU seconds: 0.13 for 49152 tokens, 1.7 for 262144 tokens with 514906 merges (transformers: 4.0 and 16.7)."""
    path = real_models.smollm2() if name == "smollm2" else real_models.gemma3()
    start = time.process_time()

    Tokenizer.load(resolve(str(path)))

    assert time.process_time() - start < seconds


def test_special_ids_of_the_real_models():
    smollm2, gemma3 = real("smollm2"), real("gemma3")

    assert (smollm2.bos_id, smollm2.eos_id, smollm2.vocab_size, smollm2.adds_bos) == (1, 2, 49152, False)
    assert (gemma3.bos_id, gemma3.eos_id, gemma3.vocab_size, gemma3.adds_bos) == (2, 1, 262144, True)
    assert len(smollm2.special_ids) == 17
    assert "<|im_start|>" in smollm2.chat_template
    assert gemma3.chat_template is None


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_decode_equals_the_librarys(name):
    tokenizer = real(name)
    for case in json.loads(CASES.read_text())[name]["texts"]:
        for skip in (True, False):
            expected = tokenizer.backend.decode(case["ids"], skip_special_tokens=skip)
            assert expected == tokenizer.decode(case["ids"], skip_special_tokens=skip)


def test_ids_without_a_token_decode_to_nothing():
    tokenizer = Tokenizer(byte_tokenizer())

    assert tokenizer.decode([97, 300, 10**12, -1, 98]) == "ab"
    assert tokenizer.token_bytes(300) == tokenizer.token_bytes(-5) == b""
    assert tokenizer.token_text(256) == "DE"
    assert tokenizer.token_text(240) == "\ufffd"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 275), max_size=30), st.booleans())
def test_byte_level_decode_of_any_ids_equals_the_librarys(ids, skip):
    """Includes every kind of broken UTF-8: as many U+FFFD as the library writes."""
    tokenizer = bytewise()

    assert tokenizer.backend.decode(ids, skip_special_tokens=skip) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_one_bos_c23():
    """(b) 2, (c) 2, (d) 2 tokens; naively (c) has 3."""
    tokenizer = with_bos()

    assert tokenizer.encode("x") == [BOS, 120]
    assert tokenizer.encode("<|bos|>x") == [BOS, 120]
    assert tokenizer.encode("<|bos|>x", add_special_tokens=False) == [BOS, 120]
    assert tokenizer.encode("") == [BOS]
    assert Tokenizer(byte_tokenizer()).encode("<|bos|><|bos|>x") == [BOS, BOS, 120]


def test_long_texts_let_other_threads_run():
    """Breaks if the library is called in a way that keeps the interpreter locked: a megabyte took 0.6 s."""
    tokenizer = real("smollm2")
    text = "hello world " * 120_000
    ticks, longest, done = 0, 0.0, threading.Event()

    def tick():
        nonlocal ticks, longest
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            ticks, longest, last = ticks + 1, max(longest, now - last), now

    ticker = threading.Thread(target=tick)
    ticker.start()
    start = time.perf_counter()
    ids = tokenizer.encode(text)
    seconds = time.perf_counter() - start
    done.set()
    ticker.join()

    assert ids[:20] == tokenizer.encode(text[:600])[:20] and len(ids) == 240_001
    assert longest < max(0.1, seconds / 2), f"{ticks} ticks in {seconds:.2f} s, the longest {longest:.2f} s"


def test_limits_stop_the_work():
    """A limit of 5 on 10 MB of text: 6 ids, in a moment, and the same ids as without the limit."""
    tokenizer = real("smollm2")
    text = "hello world " * 800_000
    tokenizer.encode("warm", limit=0)
    start = time.process_time()
    ids = tokenizer.encode(text, limit=5)

    assert ids == tokenizer.encode("hello world hello world hello world")[:6]
    assert time.process_time() - start < 0.5
    assert tokenizer.encode("hello world", limit=5) == tokenizer.encode("hello world")


def test_a_limit_changes_no_id_and_no_count():
    """412 odd texts under every limit. Of 7 tokens, 8 were counted under a limit of 7: the last was cut in two."""
    tokenizer = real("smollm2")
    texts = [case["text"] for case in json.loads(CASES.read_text())["smollm2"]["texts"]]
    for text in ["123456 responsibility", "1" * 400 + " responsibility" * 40, *texts]:
        ids = tokenizer.encode(text)
        assert all(tokenizer.encode(text, limit=limit) == ids[: limit + 1] for limit in range(len(ids) + 1)), text


def test_long_lists_of_ids_are_decoded_as_short_ones():
    """Through the library's other call, which lets threads run: 3000 ids, with and without special ones."""
    backend = byte_tokenizer()
    backend.decoder = decoders.Sequence([backend.decoder])
    tokenizer = Tokenizer(backend)
    ids = [*"häßlich 日本 ".encode(), BOS] * 200
    assert not tokenizer.bytewise
    for skip in (True, False):
        expected = backend.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode([*ids, 300], skip_special_tokens=skip) == expected  # there is no token 300


@pytest.mark.parametrize(
    ("text", "same"), [("a\ud83cb", "a\ufffdb"), ("\ud83c\udf36", "\U0001f336"), ("\udf36", "\ufffd")]
)
def test_lone_surrogates_become_replacement_characters(text, same):
    tokenizer = Tokenizer(byte_tokenizer())

    assert tokenizer.encode(same) == tokenizer.encode(text)


def test_null_bytes_survive():
    tokenizer = real("smollm2")

    assert tokenizer.decode(tokenizer.encode("a\0b")) == "a\0b"


def test_many_threads_at_once():
    """8 threads, encoding with and without special tokens: the library says "Already borrowed" when it is changed."""
    tokenizer = real("smollm2")
    errors, texts = [], [f"thread {n} \U0001f336 <|im_start|>" * 20 for n in range(8)]
    expected = [tokenizer.encode(text) for text in texts]

    def work(n):
        try:
            for turn in range(30):
                assert tokenizer.encode(texts[n], add_special_tokens=turn % 2 == 0, limit=10_000) == expected[n]
                assert tokenizer.decode(expected[n], skip_special_tokens=False) == texts[n]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []


def byte_level_metadata(pre="qwen2", **changes):
    """The vocabulary of TOK as GGUF metadata, with the two merges of "DEF"."""
    backend = byte_tokenizer()
    size = backend.get_vocab_size()
    types = np.ones(size, np.int32)
    types[259:262], types[262:] = 3, 4
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [backend.id_to_token(index) for index in range(size)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["D E", "DE F", "} }"],
        "tokenizer.ggml.bos_token_id": 259,
        "tokenizer.ggml.eos_token_id": 260,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def test_added_tokens_of_a_gguf_file():
    """Control tokens (type 3) are special and hidden, user-defined ones (type 4) are found but shown."""
    tokenizer = Tokenizer(build(byte_level_metadata()))
    ids = tokenizer.encode("<think>DEF}}<|eot|>")

    assert ids == [262, 257, 258, 261]
    assert tokenizer.decode(ids) == "<think>DEF}}"
    assert tokenizer.special_ids == {259, 260, 261}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [120]),
        ({"add_bos_token": True}, [259, 120]),
        ({"add_bos_token": True, "add_eos_token": True}, [259, 120, 260]),
        ({"add_eos_token": True}, [120, 260]),
        ({"pre": "llama-bpe"}, [259, 120]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [120]),
    ],
)
def test_bos_rules_of_a_gguf_file(changes, expected):
    assert build(byte_level_metadata(**changes)).encode("x").ids == expected


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "it's 123  a", ["it", "'s", "Ġ123", "Ġ", "Ġa"]),
        ("smollm", "it's 123  a", ["it", "'s", "Ġ", "1", "2", "3", "Ġ", "Ġa"]),
        ("llama-bpe", "it'S 12345\n\n a", ["it", "'S", "Ġ", "123", "45", "ĊĊ", "Ġa"]),
        ("qwen2", "it's 12\n", ["it", "'s", "Ġ", "1", "2", "Ċ"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", "Ġ", "123", "4"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", "Ġ", "1", "2"]),
        ("deepseek-v3", ".abc 1234", [".abc", "Ġ", "123", "4"]),
        ("deepseek-coder", "a b\n12", ["a", "Ġb", "Ċ", "1", "2"]),
    ],
)
def test_how_text_is_cut(pre, text, pieces):
    cutter = build(byte_level_metadata(pre)).pre_tokenizer

    assert pieces == [piece for piece, _ in cutter.pre_tokenize_str(text)]


def test_every_known_cut_compiles_and_round_trips():
    text = "Ça va? 1234 \U0001f336\r\n  x_y 東京"
    for pre in CUTS:
        tokenizer = Tokenizer(build(byte_level_metadata(pre)))
        assert tokenizer.decode(tokenizer.encode(text)) == text, pre


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pre": "from-the-future"}, "'from-the-future'"),
        ({"model": "rwkv"}, "'rwkv'"),
        ({"model": None}, "None"),
        ({"tokens": None}, "tokens"),
        ({"merges": None}, "merges"),
        ({"merges": ["D E", "qq zz"]}, "merges do not fit"),
        ({"token_type": np.ones(3, np.int32)}, "3 token types"),
        ({"bos_token_id": 9999, "add_bos_token": True}, "9999"),
        ({"bos_token_id": "x", "add_bos_token": True}, "'x'"),
        ({"merges": ["DE"]}, "merges do not fit"),
    ],
)
def test_what_does_not_fit_is_named(changes, reason):
    with pytest.raises(CheckpointError, match=reason):
        build(byte_level_metadata(**changes))


def test_padding_of_the_vocabulary_is_no_token():
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] += ["[PAD266]", "[PAD267]"]
    metadata["tokenizer.ggml.token_type"] = np.append(metadata["tokenizer.ggml.token_type"], [5, 5])
    tokenizer = Tokenizer(build(metadata))

    assert tokenizer.vocab_size == 266
    assert tokenizer.decode([97, 266, 98]) == "ab"


@cache
def sentencepiece_model():
    """A small SentencePiece BPE model, trained here on made-up text, with byte fallback."""
    generator = random.Random(3)
    words = ["".join(generator.choice("abcdeé") for _ in range(generator.randrange(1, 7))) for _ in range(300)]
    text = [" ".join(generator.choice(words) for _ in range(12)) for _ in range(400)]
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text), model_writer=out, model_type="bpe", vocab_size=600, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=True,
        character_coverage=1.0, minloglevel=2,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())


def sentencepiece_metadata(model, **changes):
    count = model.get_piece_size()
    kinds = [
        6 if model.is_byte(i) else 3 if model.is_control(i) else 2 if model.is_unknown(i) else 1 for i in range(count)
    ]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in range(count)],
        "tokenizer.ggml.scores": np.array([model.get_score(i) for i in range(count)], np.float32),
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def test_sentencepiece_ids_equal_the_original():
    """400 texts against the sentencepiece library itself: merges by score, byte fallback, the leading space."""
    model = sentencepiece_model()
    tokenizer = Tokenizer(build(sentencepiece_metadata(model)))
    generator = random.Random(4)
    pools = ["abcdeé  ", "xyz\U0001f336\n", " "]
    for _ in range(400):
        text = "".join(generator.choice(generator.choice(pools)) for _ in range(generator.randrange(1, 40)))
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert model.encode(text) == ids
        assert tokenizer.decode(ids) == text


def test_sentencepiece_bos_and_prefix():
    model = sentencepiece_model()
    tokenizer = Tokenizer(build(sentencepiece_metadata(model)), TokenizerFacts(special_tokens={"bos_token": "<s>"}))
    bare = Tokenizer(build(sentencepiece_metadata(model, add_space_prefix=False, add_bos_token=False)))

    assert tokenizer.encode("a")[0] == 1 and tokenizer.adds_bos
    assert tokenizer.encode("<s>a")[:1] == [1] and tokenizer.encode("<s>a")[1] != 1
    assert tokenizer.strips_space and not bare.strips_space
    assert bare.decode(bare.encode(" a")) == " a"
    assert tokenizer.token_bytes(model.piece_to_id("<0xF0>")) == b"\xf0"
    with pytest.raises(CheckpointError, match="scores"):
        build(sentencepiece_metadata(model, scores=None))


def write_files(folder, *, config=None, template=None):
    backend = byte_tokenizer()
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.load(Source("m", "folder", folder))


def test_tokenizer_files(tmp_path):
    """Truncation and padding stored in tokenizer.json (4 and 9 here) must not touch prompts."""
    config = {
        "bos_token": {"content": "<|bos|>"},
        "eos_token": "<|eos|>",
        "model_max_length": 256,
        "chat_template": "{{ old }}",
        "added_tokens_decoder": {"266": {"content": "<new>", "special": True}},
    }
    tokenizer = write_files(tmp_path, config=config, template=TEMPLATE)

    assert tokenizer.encode("abcdef") == [97, 98, 99, 100, 101, 102]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.model_max_length) == (259, 260, 256)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.encode("<new>") == [266] and 266 in tokenizer.special_ids


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, [120]),
        ({"add_bos_token": True}, [259, 120]),
        ({"add_bos_token": False, "add_eos_token": True}, [120, 260]),
        ({"add_bos_token": None}, [120]),
    ],
)
def test_bos_rules_of_tokenizer_config(tmp_path, flags, expected):
    """As transformers: a flag given there replaces what tokenizer.json says."""
    config = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", **flags}

    assert write_files(tmp_path, config=config).encode("x") == expected


def test_named_templates(tmp_path):
    listed = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    tokenizer = write_files(tmp_path, config={"chat_template": listed, "model_max_length": 1e30})

    assert tokenizer.chat_template == {"default": "d", "tool_use": "t"}
    assert tokenizer.model_max_length is None


def test_ids_that_contradict_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="300"):
        write_files(tmp_path, config={"added_tokens_decoder": {"300": {"content": "<new>"}}})


def test_missing_and_damaged_files(tmp_path):
    with pytest.raises(CheckpointError, match="neither"):
        Tokenizer.load(Source("m", "folder", tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="not readable as a tokenizer"):
        Tokenizer.load(Source("m", "folder", tmp_path))


def test_other_decoders_go_through_the_library():
    vocab = {"▁a": 0, "▁b": 1, "c": 2, "<unk>": 3}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = Tokenizer(backend)

    assert not tokenizer.bytewise
    assert tokenizer.decode([0, 2, 1, 99]) == "ac b"
    assert tokenizer.token_bytes(2) == b"c"


def test_named_templates_of_a_gguf_file():
    names = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "t"}
    facts = _facts_from_gguf({**byte_level_metadata(), "tokenizer.chat_template": "d", **names})

    assert facts.chat_template == {"default": "d", "tool_use": "t"}
    assert facts.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}


def test_the_stand_in_has_one_token_per_byte():
    tokenizer = Tokenizer.stand_in()

    ids = tokenizer.encode("aé🌶\n")

    assert len(ids) == 1 + 2 + 4 + 1 and max(ids) < 256
    assert tokenizer.decode(ids) == "aé🌶\n"
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (None, None, 256)


@pytest.mark.parametrize("template", [{"content": 5}, [{"name": "a"}], [{"template": "x"}], [5], 5, {"default": None}])
def test_templates_that_are_none_are_left_out(tmp_path, template):
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))

    assert not Tokenizer.load(Source("x", "folder", tmp_path)).chat_template


def test_added_tokens_need_ids(tmp_path):
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"x": {"content": "y"}}}))

    with pytest.raises(CheckpointError, match="'x' where an id belongs"):
        Tokenizer.load(Source("x", "folder", tmp_path))
