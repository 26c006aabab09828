"""Which draft models fit a target, and how their vocabularies are matched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from specexport.exporter import cli
from specexport.exporter.heads.draft_model import Tokens, match_vocabularies, read_draft_model, read_tokens
from specexport.runtime.errors import CheckpointError
from tests.tiny import LLAMA, VOCAB, write_llama


def vocabulary(*texts: str, special: tuple[str, ...] = ("<s>", "</s>")) -> Tokens:
    return {index: (text.encode(), text in special) for index, text in enumerate(texts) if text}


TARGET = vocabulary("<s>", "</s>", "a", "b", "c", "d", "e", "f")


def test_one_tokenizer_needs_no_table() -> None:
    assert match_vocabularies(TARGET, TARGET, "m") == (8, None, [])


def test_tokens_added_to_one_side_are_named() -> None:
    more = TARGET | {8: (b"g", False), 9: (b"h", False)}
    assert match_vocabularies(more, TARGET, "m") == (8, None, [])
    count, table, (warning,) = match_vocabularies(TARGET, more, "m")
    assert (count, table) == (8, None) and "lacks 2 of the target's 10 tokens" in warning


def test_a_special_flag_alone_does_not_make_another_tokenizer() -> None:
    assert match_vocabularies(vocabulary("<s>", "</s>", *"abcdef", special=()), TARGET, "m") == (8, None, [])


def test_other_ids_are_matched_by_text_and_type() -> None:
    draft = vocabulary("</s>", "f", "e", "x", "d", "c", "<s>", "", "b", "y", special=("<s>",))
    count, table, warnings = match_vocabularies(draft, TARGET, "m")
    assert table is not None and count == len(table)
    # "</s>" is text for the draft model and control for the target: not the same token.
    assert table.tolist() == [-1, 7, 6, -1, 5, 4, 0, -1, 3]
    assert "lacks 2 of the target's 8 tokens" in warnings[0]
    assert "id 0 is '</s>' for the draft model, '<s>' for the target" in warnings[1]
    assert "6 tokens are matched" in warnings[1]


def test_another_language_is_refused_with_its_coverage() -> None:
    half = vocabulary("d", "c", "b", "u", "v", "w")
    assert match_vocabularies(half, TARGET, "m")[0] == 3  # of six: just enough
    third = vocabulary("d", "c", "u", "v", "w", "x")
    with pytest.raises(
        CheckpointError, match=r"model m shares 2 of 6 tokens .*\(33% of .* at least 50%: choose a model"
    ):
        match_vocabularies(third, TARGET, "m")
    with pytest.raises(CheckpointError, match=r"shares 0 of 2 tokens"):
        match_vocabularies({10: (b"a", False), 11: (b"x", False)}, {1: (b"y", False), 2: (b"z", False)}, "m")


def test_spellings_of_spaces_and_bytes_do_not_matter() -> None:
    def tokens(words: list[str], decoder: Any) -> Tokens:
        tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [], unk_token=words[0]))
        tokenizer.add_special_tokens(["Ġ▁"])
        tokenizer.decoder = decoder
        return read_tokens(tokenizer.to_str().encode())

    special = (b"\xc4\xa0\xe2\x96\x81", True)  # text as it stands, whatever the decoder
    words = [b" the", b"\n", "ä".encode(), b"x", special[0]]
    sentencepiece = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    for spelled, decoder in (
        (["Ġthe", "Ċ", "Ã¤", "x"], decoders.ByteLevel()),
        (["▁the", "<0x0A>", "ä", "x"], sentencepiece),
        ([" the", "\n", "ä", "x"], decoders.Fuse()),
    ):
        assert tokens(spelled, decoder) == {index: (word, index == 4) for index, word in enumerate(words)}
    assert tokens(["▁the", "<0x0A>"], decoders.Metaspace())[0] == (b" the", False)
    assert tokens(["▁the", "<0x0A>"], decoders.Metaspace())[1] == (b"<0x0A>", False)


def permute(directory: Path, shift: int, rename: int = 0) -> None:
    """Give the ordinary tokens other ids, and ``rename`` of them other texts."""
    path = directory / "tokenizer.json"
    data = json.loads(path.read_text())
    vocab = data["model"]["vocab"]
    texts = sorted((text for text, index in vocab.items() if index >= 4), key=vocab.get)
    for place, text in enumerate(texts):
        vocab[text] = 4 + (place + shift) % len(texts)
    for text in texts[-rename:] if rename else ():
        vocab[f"{text}~"] = vocab.pop(text)
        data["model"]["merges"] = [pair for pair in data["model"]["merges"] if "".join(pair) != text]
    path.write_text(json.dumps(data))


def test_a_draft_model_is_read_with_its_own_context(tmp_path: Path) -> None:
    target, draft = write_llama(tmp_path / "t"), write_llama(tmp_path / "d", max_position_embeddings=32, vocab_size=304)
    tokenizer = (target / "tokenizer.json").read_bytes()
    read = read_draft_model(str(draft), tokenizer, slots=64, depth=5)
    assert (read.slots, read.valid_vocab, read.vocabulary) == (32, VOCAB, None)
    (warning,) = read.warnings
    assert "32 positions and the window 64" in warning
    assert read_draft_model(str(draft), tokenizer, slots=16, depth=5).warnings == ()
    permute(draft, 7)
    read = read_draft_model(str(draft), tokenizer, slots=16, depth=5)
    assert read.vocabulary is not None and read.vocabulary[:12].tolist() == [0, 1, 2, 3, *range(VOCAB - 7, VOCAB), 4]
    (warning,) = read.warnings
    assert "tokenizers differ" in warning
    other = read_draft_model(str(draft), tokenizer, slots=16, depth=5, tokenizer=target)
    assert (other.vocabulary, other.warnings) == (None, ())


def test_a_revision_of_a_local_path_is_named_as_it_was_given(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="--draft-revision v1 is for hub ids"):
        read_draft_model(str(tmp_path), b"", slots=8, depth=2, revision="v1")


@pytest.mark.parametrize(
    ("harm", "options", "words"),
    [
        ("context", (), "has 5 positions, too few for drafts of 5 tokens: lower --draft-depth"),
        ("tokenizer", (), f"of {VOCAB} tokens with the target"),
        ("nothing", (), "no such directory or .gguf file"),
        ("architecture", (), "MambaForCausalLM"),
        ("no model", ("--draft-tokenizer", "x"), "name it with --draft-model"),
        ("no model", ("--draft-revision", "x"), "name it with --draft-model"),
    ],
)
def test_refusals_are_one_line_and_leave_nothing(
    harm: str, options: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = write_llama(tmp_path / "t"), tmp_path / "d"
    if harm != "nothing":
        write_llama(draft)
    if harm in ("context", "architecture"):
        changes = {"context": {"max_position_embeddings": 5}, "architecture": {"architectures": ["MambaForCausalLM"]}}
        (draft / "config.json").write_text(json.dumps(LLAMA | changes[harm]))
    if harm == "tokenizer":
        permute(draft, 9, rename=290)
    model = () if harm == "no model" else ("--draft-model", str(draft))
    assert cli.main(["build", str(target), "-o", str(tmp_path / "b"), *model, *options]) != 0
    shown = capsys.readouterr()
    (line,) = [line for line in shown.err.splitlines() if "error: " in line]
    assert words in line and "Traceback" not in shown.err
    assert not (tmp_path / "b").exists()
