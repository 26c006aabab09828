"""Tokenizers: Hugging Face files as they are, and GGUF vocabularies rebuilt."""

from __future__ import annotations

import json
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from specexport.exporter.checkpoint import Checkpoint, open_checkpoint
from specexport.exporter.gguf_file import GgufFile
from specexport.exporter.tokenizer import TokenizerFiles, collect_tokenizer
from specexport.runtime.errors import CheckpointError
from tests.exporter.test_gguf import META, real, tensors
from tests.tiny import write_checkpoint, write_gguf

CORPUS = [
    "Hello  world 123!\n\n  def f(x):\t return 🤖 naïve",
    " leading and trailing  ",
    "",
    " ",
    "\t\t\n\n\n x\r\n\r\n",
    "12345 6.78e9 ½² Ⅷ ①",
    "I'm we've they'LL DON'T",
    "日本語のテキスト、テスト Привет мир عربي",
    "👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u00a0nbsp\u2003em a\u200bb 𐍈𝔘𝔫𝔦",
    "x" * 120 + " " * 40 + "y",
    "for (int i = 0; i < n; ++i) { a[i] |= 0xFF; } // done",
    "<|a|>user\nHi<|b|>\n<bos><start_of_turn>user\nhey<end_of_turn>\n<b>bold</b>",
]


def corpus(alphabet: str = "ab  \n\t1'.,éß中🙂<>|_\u00a0") -> list[str]:
    rng = random.Random(0)
    return CORPUS + ["".join(rng.choice(alphabet) for _ in range(rng.randint(1, 60))) for _ in range(100)]


def loaded(files: TokenizerFiles) -> Tokenizer:
    return Tokenizer.from_str(files.tokenizer_json.decode())


def train(pre_tokenizer: Any, normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|a|>", "<|b|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def byte_level(expression: str | None = None) -> Any:
    if expression is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = pre_tokenizers.Split(Regex(expression), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# Written out as in the tokenizer.json files of the models, independently of how the exporter composes them.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
ORIGINALS = {
    "smollm": lambda: train(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level()]),
    ),
    "gpt-2": lambda: train(byte_level()),
    "llama-bpe": lambda: train(byte_level(LLAMA3)),
    "qwen2": lambda: train(byte_level(QWEN2), normalizers.NFC()),
}


def gguf_of(path: Path, tokenizer: Tokenizer, pre: str, **extra: Any) -> Checkpoint:
    """A GGUF file that holds ``tokenizer`` as llama.cpp's converter would."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    data = tensors("llama") | {"token_embd.weight": np.zeros((len(tokens) + 3, 32), np.float32)}
    meta = {
        **META,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": [" ".join(m) if isinstance(m, list) else m for m in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **extra,
    }
    return open_checkpoint(str(write_gguf(path / "m.gguf", "llama", meta, data)))


@pytest.mark.parametrize("pre", ORIGINALS)
def test_byte_level_round_trip(tmp_path: Path, pre: str) -> None:
    """Train with the original pre-tokenizer, go through GGUF, and encode alike."""
    original = ORIGINALS[pre]()
    files = collect_tokenizer(gguf_of(tmp_path, original, pre, **{"tokenizer.ggml.add_bos_token": False}))
    rebuilt = loaded(files)
    for text in corpus():
        ids = rebuilt.encode(text).ids
        assert ids == original.encode(text, add_special_tokens=False).ids, text
        assert rebuilt.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)
    assert files.vocab_size == original.get_vocab_size() and files.pad_rows == 3
    assert files.tokenizer_config["special_tokens"] == {"<|a|>": 0, "<|b|>": 1}


def test_bos_and_eos_follow_the_metadata(tmp_path: Path) -> None:
    original = ORIGINALS["smollm"]()
    for bos, eos in ((False, False), (True, False), (True, True)):
        flags = {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
        files = collect_tokenizer(gguf_of(tmp_path, original, "smollm", **flags))
        ids = loaded(files).encode("x").ids
        assert ids == [0] * bos + original.encode("x").ids + [1] * eos
        assert files.tokenizer_config["add_bos_token"] is bos and files.tokenizer_config["add_eos_token"] is eos
    default = collect_tokenizer(gguf_of(tmp_path, original, "llama-bpe"))
    assert default.tokenizer_config["add_bos_token"] is True


def test_stop_ids_and_template_of_gguf(tmp_path: Path) -> None:
    tokenizer = ORIGINALS["smollm"]()
    plain = collect_tokenizer(gguf_of(tmp_path, tokenizer, "smollm"))
    assert plain.stop_ids == (1,) and plain.chat_template is None
    extra = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.chat_template": "{{ messages }}"}
    files = collect_tokenizer(gguf_of(tmp_path, tokenizer, "smollm", **extra))
    assert files.stop_ids == (1, 5) and files.chat_template == "{{ messages }}"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"tokenizer.ggml.pre": "poro-chat"}, "pre-tokenizer 'poro-chat' is not one of .*--tokenizer"),
        ({"tokenizer.ggml.pre": "default"}, "pre-tokenizer 'default' is not one of"),
        ({"tokenizer.ggml.model": "rwkv"}, "model 'rwkv' is not rebuilt"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "not one type for each"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "duplicates"),
        ({"tokenizer.ggml.merges": ["a"]}, "not two pieces"),
        ({"tokenizer.ggml.merges": ["a zzzz"]}, "no tokens"),
        ({"tokenizer.ggml.bos_token_id": 100000, "tokenizer.ggml.add_bos_token": True}, "not a token"),
        ({"tokenizer.ggml.eot_token_id": 100000}, "not an id below"),
        ({"tokenizer.ggml.add_bos_token": "yes"}, "expected true or false"),
    ],
)
def test_refuses_gguf_vocabularies(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        collect_tokenizer(gguf_of(tmp_path, ORIGINALS["smollm"](), "smollm", **extra))


def sentencepiece(file: GgufFile, text: str, prefix: bool) -> list[int]:
    """SentencePiece's BPE, written as it is defined: merge the adjacent pair of the best score until none is left."""
    meta = file.metadata
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"].tolist()
    scores = meta["tokenizer.ggml.scores"].tolist()
    ids = {token: i for i, token in enumerate(tokens)}
    special = sorted((t for t, k in zip(tokens, kinds, strict=True) if k in (2, 3, 4)), key=len, reverse=True)
    out: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, special)) + ")", text):
        if part in ids and kinds[ids[part]] in (2, 3, 4):
            out.append(ids[part])
            continue
        symbols = list(("▁" if prefix and part else "") + part.replace(" ", "▁"))
        while True:
            pairs = [(ids.get(a + b), i) for i, (a, b) in enumerate(pairwise(symbols))]
            usable = [(scores[token], -i) for token, i in pairs if token is not None and kinds[token] == 1]
            if not usable:
                break
            at = -max(usable)[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        for symbol in symbols:
            out += [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return out


WORDS = [
    "▁the",
    "in",
    "▁and",
    "er",
    "ing",
    "▁world",
    "llo",
    "Hello",
    "def",
    "▁re",
    "turn",
    "▁return",
    "▁▁",
    "aa",
    "aaa",
]
PARTS = ["▁t", "he", "▁a", "nd", "▁w", "or", "ld", "▁wor", "He"]


def spm_gguf(path: Path, **extra: Any) -> Checkpoint:
    pieces = [piece for word in PARTS + WORDS for piece in (*word, word)]
    normal = list(dict.fromkeys([*"abcdefghijklmnopqrstuvwxyz▁HD.,!()123日本", *pieces]))
    normal.sort(key=len)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "\n\n", "<b>", *normal]
    kinds = [2, 3, 3, *[6] * 256, 4, 4, *[1] * len(normal)]
    scores = [0.0] * (len(tokens) - len(normal)) + [-float(i) for i in range(len(normal))]
    meta = {
        **META,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **extra,
    }
    data = tensors("llama") | {"token_embd.weight": np.zeros((len(tokens), 32), np.float32)}
    return open_checkpoint(str(write_gguf(path / "m.gguf", "llama", meta, data)))


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(tmp_path: Path, prefix: bool) -> None:
    checkpoint = spm_gguf(tmp_path, **{"tokenizer.ggml.add_space_prefix": prefix})
    files = collect_tokenizer(checkpoint)
    rebuilt = loaded(files)
    assert checkpoint.gguf is not None and files.tokenizer_config["add_bos_token"] is True
    texts = [*corpus("the wordlingHa ▁\n日é"), "Hello the world", "<s>and</s>", "the\n\nworld<b>"]
    for text in texts:
        encoded = rebuilt.encode(text).ids
        assert encoded == [1, *sentencepiece(checkpoint.gguf, text, prefix)], text
        if "▁" not in text and not prefix:
            assert rebuilt.decode(encoded[1:], skip_special_tokens=False) == text


def test_gguf_takes_an_override(tmp_path: Path) -> None:
    checkpoint = gguf_of(tmp_path, ORIGINALS["smollm"](), "unheard-of")
    other = ORIGINALS["gpt-2"]()
    (tmp_path / "own").mkdir()
    other.save(str(tmp_path / "own" / "tokenizer.json"))
    (tmp_path / "own" / "tokenizer_config.json").write_text('{"eos_token": "<|b|>", "chat_template": "own"}')
    for override in (tmp_path / "own", tmp_path / "own" / "tokenizer.json"):
        files = collect_tokenizer(checkpoint, override)
        assert loaded(files).encode("Hello 12").ids == other.encode("Hello 12").ids
        assert files.stop_ids == (1,)
    assert collect_tokenizer(checkpoint, tmp_path / "own").chat_template == "own"
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json there"):
        collect_tokenizer(checkpoint, tmp_path / "nowhere")


def hf(path: Path, tokenizer: Tokenizer, rows: int | None = None, **files: Any) -> Checkpoint:
    rows = tokenizer.get_vocab_size() if rows is None else rows
    config = {"vocab_size": rows, **files.pop("config", {})}
    write_checkpoint(path, config, {"x": torch.zeros(1)})
    tokenizer.save(str(path / "tokenizer.json"))
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return open_checkpoint(str(path))


def test_hugging_face_files(tmp_path: Path) -> None:
    tokenizer = ORIGINALS["gpt-2"]()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    checkpoint = hf(
        tmp_path,
        tokenizer,
        rows=512,
        config={"eos_token_id": 7},
        generation_config={"eos_token_id": [1, 9, 450], "temperature": 0.6},  # 450 is padding
        tokenizer_config={
            "bos_token": {"content": "<|a|>", "lstrip": False},
            "eos_token": "<|b|>",
            "pad_token": "<absent>",
            "model_max_length": 1e30,
            "chat_template": [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}],
        },
    )
    files = collect_tokenizer(checkpoint)
    assert files.stop_ids == (1, 7, 9) and files.generation_config["temperature"] == 0.6
    assert (files.vocab_size, files.pad_rows) == (400, 112)
    config = files.tokenizer_config
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token"]) == (0, 1, None)
    assert config["model_max_length"] is None and config["add_bos_token"] is False
    assert files.chat_template == "D"
    assert len(loaded(files).encode("a long text that is neither cut nor padded").ids) > 8
    (tmp_path / "chat_template.json").write_text('{"chat_template": "J"}')
    assert collect_tokenizer(checkpoint).chat_template == "J"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert collect_tokenizer(checkpoint).chat_template == "file"


def test_llama_class_sets_bos_whatever_the_file_says(tmp_path: Path) -> None:
    tokenizer = ORIGINALS["gpt-2"]()
    raw: dict[str, Any] = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<|a|>", "eos_token": "<|b|>"}
    plain = tokenizer.encode("x").ids
    assert loaded(collect_tokenizer(hf(tmp_path, tokenizer, tokenizer_config=raw))).encode("x").ids == [0, *plain]
    raw |= {"add_bos_token": False, "add_eos_token": True}
    assert loaded(collect_tokenizer(hf(tmp_path, tokenizer, tokenizer_config=raw))).encode("x").ids == [*plain, 1]


def test_added_tokens(tmp_path: Path) -> None:
    """Those only in tokenizer_config.json are added; those beyond the model's rows are dropped."""
    tokenizer = ORIGINALS["gpt-2"]()
    extra = {"400": {"content": "<|new|>", "special": True}}
    files = collect_tokenizer(hf(tmp_path, tokenizer, 401, tokenizer_config={"added_tokens_decoder": extra}))
    assert loaded(files).encode("<|new|>").ids == [400] and files.vocab_size == 401
    tokenizer.add_special_tokens([AddedToken("<image>", special=True)])
    files = collect_tokenizer(hf(tmp_path, tokenizer, 400, tokenizer_config={}))
    assert max(loaded(files).encode("<image>").ids) < 400 and files.pad_rows == 0


@pytest.mark.parametrize(
    ("rows", "files", "message"),
    [
        (399, {}, "has id 399 but the model has 399 rows"),
        (400, {"tokenizer_config": {"added_tokens_decoder": {"9": {"content": "<|a|>"}}}}, "gives '<|a|>' the id 9"),
        (400, {"tokenizer_config": {"added_tokens_decoder": [1]}}, "must map ids to objects"),
        (
            400,
            {"tokenizer_config": {"chat_template": [{"name": []}, {"name": "default", "template": 1}]}},
            "must be text",
        ),
        (400, {"tokenizer_config": {"chat_template": 3}}, "chat_template must be text"),
        (400, {"tokenizer_config": {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>"}}, "has no token '<s>'"),
        (400, {"generation_config": {"eos_token_id": [1, 400]}}, "eos_token_id 400 is not an id below 400"),
        (400, {"generation_config": {"eos_token_id": "1"}}, "generation_config.json: eos_token_id"),
    ],
)
def test_refuses(tmp_path: Path, rows: int, files: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        collect_tokenizer(hf(tmp_path, ORIGINALS["gpt-2"](), rows, **files))


def test_missing_or_damaged_tokenizer(tmp_path: Path) -> None:
    checkpoint = hf(tmp_path, ORIGINALS["gpt-2"]())
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(CheckpointError, match="not a tokenizers file"):
        collect_tokenizer(checkpoint)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="--tokenizer"):
        collect_tokenizer(checkpoint)


@pytest.mark.e2e
def test_smollm2_equals_transformers() -> None:
    from transformers import AutoTokenizer

    path = real("SPECEXPORT_SMOLLM2_GGUF")
    files = collect_tokenizer(open_checkpoint(str(path)))
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).backend_tokenizer
    # Its conversion forgets that SmolLM splits digits first, and that a byte without a token is dropped.
    digits = pre_tokenizers.Digits(individual_digits=True)
    theirs.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    mine = loaded(files)
    for text in [*corpus(), "<|im_start|>user\nHi<|im_end|>\n"]:
        ids = mine.encode(text).ids
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert mine.decode(ids, skip_special_tokens=False) == text
    assert files.stop_ids == (2,) and files.pad_rows == 0 and "<|im_start|>" in (files.chat_template or "")
    config = files.tokenizer_config
    assert (config["bos_token_id"], config["eos_token_id"], config["add_bos_token"]) == (1, 2, False)


@pytest.mark.e2e
def test_gemma3_equals_sentencepiece() -> None:
    """Against the definition: Transformers builds a Unigram model from these BPE scores, which splits differently."""
    checkpoint = open_checkpoint(str(real("SPECEXPORT_GEMMA3_GGUF")))
    assert checkpoint.gguf is not None
    files = collect_tokenizer(checkpoint)
    mine = loaded(files)
    assert mine.encode("Hello world").ids == [2, 9259, 1902]
    for text in corpus():
        ids = mine.encode(text).ids
        assert ids == [2, *sentencepiece(checkpoint.gguf, text, prefix=False)], text
        assert mine.decode(ids[1:], skip_special_tokens=False) == text
    assert files.stop_ids == (1,) and files.vocab_size == 262144
