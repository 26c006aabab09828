"""The bundle's tokenizer against Transformers' fast tokenizers of the same files, and damaged files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from specexport.runtime.errors import BundleError, UsageError
from specexport.runtime.tokenizer import CONFIG_FILE, TEMPLATE_FILE, TOKENIZER_FILE, Tokenizer

TEXTS = ["Hello world", "  two  spaces\n", "日本語 👍🏽", "<s>special</s> in text", ""]


def byte_level(post_processor: bool = False) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    if post_processor:
        backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return backend


def sentence_piece() -> Backend:
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "H",
        "e",
        "l",
        "o",
        "▁H",
        "w",
        "r",
        "d",
    ]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(
        models.BPE(vocab=vocab, merges=[("▁", "H")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def write(path: Path, backend: Backend, config: dict[str, Any]) -> Path:
    backend.save(str(path / TOKENIZER_FILE))
    (path / CONFIG_FILE).write_text(json.dumps(config))
    return path


ENDS = {"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}}


@pytest.mark.parametrize(
    ("backend", "config"),
    [
        (byte_level(), {"tokenizer_class": "PreTrainedTokenizerFast", **ENDS}),
        (byte_level(True), {"tokenizer_class": "PreTrainedTokenizerFast", **ENDS}),
        (sentence_piece(), {"tokenizer_class": "LlamaTokenizerFast", "unk_token": "<unk>", **ENDS}),
        (
            sentence_piece(),
            {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "add_eos_token": True, **ENDS},
        ),
        (
            sentence_piece(),
            {"tokenizer_class": "GemmaTokenizerFast", "unk_token": "<unk>", "pad_token": "<unk>", **ENDS},
        ),
    ],
    ids=lambda value: value["tokenizer_class"] if isinstance(value, dict) else "",
)
def test_agrees_with_transformers(tmp_path: Path, backend: Backend, config: dict[str, Any]) -> None:
    import transformers

    write(tmp_path, backend, config)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_directory(tmp_path)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        for add_special in (True, False):
            ids = theirs.encode(text, add_special_tokens=add_special)
            assert ours.encode(text, add_special) == ids, (text, add_special)
        for skip in (True, False):
            detokenizer = ours.detokenizer(skip_special=skip)
            streamed = "".join(detokenizer.push([token]) for token in ids) + detokenizer.flush()
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip) == streamed == expected


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=10)
    ours = Tokenizer.from_directory(write(tmp_path, backend, {}))
    assert len(ours.encode("xyzuvwq")) == 7
    assert (ours.bos_id, ours.eos_id, ours.special_tokens) == (None, None, {})


def test_vocab_size_with_holes() -> None:
    backend = Backend(models.WordLevel({"a": 0, "b": 9}, unk_token="a"))
    assert Tokenizer(backend, {}).vocab_size == 10


def test_template_file_wins_over_the_configuration(tmp_path: Path) -> None:
    write(tmp_path, byte_level(), {"chat_template": "config {{ bos_token }}", **ENDS})
    assert Tokenizer.from_directory(tmp_path).chat_template().render([]) == "config <s>"
    (tmp_path / TEMPLATE_FILE).write_text("file {{ eos_token }}")
    assert Tokenizer.from_directory(tmp_path).chat_template().render([]) == "file </s>"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert Tokenizer(byte_level(), {"chat_template": named}).chat_template().render([]) == "d"
    with pytest.raises(UsageError, match="no chat template"):
        Tokenizer(byte_level(), {}).chat_template()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "tokenizer.json is missing"),
        ({TOKENIZER_FILE: b"{"}, "not a tokenizer"),
        ({TOKENIZER_FILE: b'{"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}}'}, "not a tokenizer"),
        ({TOKENIZER_FILE: b"\xff\xfe"}, "not UTF-8"),
        ({CONFIG_FILE: b"{"}, "not JSON"),
        ({CONFIG_FILE: b"[" * 100_000}, "not JSON"),
        ({CONFIG_FILE: b"[]"}, "must hold an object"),
        ({CONFIG_FILE: b'{"bos_token": "<nope>"}'}, "'<nope>' is not a token"),
        ({CONFIG_FILE: b'{"eos_token": 7}'}, "eos_token must be a text"),
        ({CONFIG_FILE: b'{"chat_template": 7}'}, "chat_template must be a text"),
        ({CONFIG_FILE: b'{"chat_template": [{"name": "x", "template": "y"}]}'}, "named 'default'"),
        ({CONFIG_FILE: b'{"tokenizer_class": "LlamaTokenizer"}'}, "add_bos_token is on"),
        ({TEMPLATE_FILE: b"x" * (1 << 21)}, "larger than 1 MiB"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_files(tmp_path: Path, files: dict[str, bytes], words: str) -> None:
    if files and TOKENIZER_FILE not in files:
        write(tmp_path, byte_level(), {})
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(BundleError) as error:
        Tokenizer.from_directory(tmp_path)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be tokenized"):
        Tokenizer(byte_level(), {}).encode("a\ud800b")
