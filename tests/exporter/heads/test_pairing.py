"""Which heads and targets belong together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from specexport.exporter.heads.pairing import check_pair, fit_record
from specexport.exporter.heads.record import HeadLineage, RecurrentRecord
from specexport.runtime.errors import CheckpointError
from tests.exporter.heads.writers import TARGET, H, N, V, medusa_record, recurrent
from tests.exporter.heads.writers_eagle import eagle3_record


def tokenizer(words: list[str]) -> bytes:
    return Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])).to_str().encode()


WORDS = [f"w{i}" for i in range(V - 4)]


def test_a_pair() -> None:
    record = eagle3_record("eagle3", (2, 4, N))
    assert check_pair(record, TARGET, tokenizer(WORDS), tokenizer(WORDS), target_source="org/any") == []
    assert check_pair(medusa_record("medusa", 2, 1), TARGET) == []


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (recurrent("eagle1", "eagle", target_hidden_size=2 * H), "width 32"),
        (medusa_record("medusa", 1, 1, hidden_size=8), "width 8"),
        (eagle3_record("eagle3", (2, 4, N + 1)), "boundary 9"),
        (eagle3_record("eagle3", (2, 4, 5), draft_to_target=np.array([1, V])), f"token {V}"),
        (medusa_record("vllm", 1, 1, token_map=np.array([V + 2, 1])), f"token {V + 2}"),
        (recurrent("eagle1", "eagle", vocab_size=V + 600), "another vocabulary"),
    ],
)
def test_misfits(record: RecurrentRecord, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        check_pair(record, TARGET)


def test_padding_is_harmless() -> None:
    """151936 and 152064 rows with one tokenizer are one vocabulary; with a tokenizer that needs more they are not."""
    record = recurrent("eagle1", "eagle", vocab_size=151936, draft_vocab_size=151936)
    target = replace(TARGET, vocab_size=152064)
    (warning,) = check_pair(record, target)
    assert "151936" in warning and "152064" in warning and "padding" in warning
    fitted = fit_record(record, target)
    assert isinstance(fitted, RecurrentRecord)
    assert (fitted.vocab_size, fitted.draft_vocab_size) == (152064, 152064)
    own = replace(record, embedding="head", lm_head="head")
    assert fit_record(own, target) == own
    small = recurrent("eagle1", "eagle", vocab_size=V - 2)
    (warning,) = check_pair(small, TARGET, target_tokenizer=tokenizer(WORDS))
    assert "padding" in warning
    with pytest.raises(CheckpointError, match="the tokenizer uses 44"):
        check_pair(recurrent("eagle1", "eagle", vocab_size=40), TARGET, target_tokenizer=tokenizer(WORDS))


def test_permuted_vocabulary() -> None:
    """The same size with permuted ids is another vocabulary: the first differing id is named."""
    permuted = [*WORDS[:7], WORDS[9], WORDS[8], WORDS[7], *WORDS[10:]]
    with pytest.raises(CheckpointError, match=r"id 7 is 'w9' for the head, 'w7' for the target"):
        check_pair(recurrent("eagle1", "eagle"), TARGET, tokenizer(permuted), tokenizer(WORDS))
    (warning,) = check_pair(recurrent("eagle1", "eagle"), TARGET, tokenizer([*WORDS, "more"]), tokenizer(WORDS))
    assert "'more'" in warning
    with pytest.raises(CheckpointError, match=r"head's tokenizer\.json is not understood"):
        check_pair(recurrent("eagle1", "eagle"), TARGET, b"{}", tokenizer(WORDS))


@pytest.mark.parametrize(
    ("lineage", "source", "warnings"),
    [
        (HeadLineage("org/model", "LlamaForCausalLM"), "/data/model", 0),
        (HeadLineage("org/model"), "models--org--model/snapshots/0123", 0),
        (HeadLineage("org/model"), "org/other", 1),
        (HeadLineage("org/model", "Qwen3ForCausalLM"), "org/other", 2),
        (HeadLineage(None, "UnheardOf"), "org/other", 1),
    ],
)
def test_lineage_is_compared(lineage: HeadLineage, source: str, warnings: int, tmp_path: Path) -> None:
    found = check_pair(recurrent("eagle1", "eagle", lineage=lineage), TARGET, target_source=source)
    assert len(found) == warnings


@pytest.mark.parametrize(
    ("source", "same"),
    [
        ("/models/SmolLM2-135M-Instruct.Q4_1.gguf", True),
        ("smollm2-135m-instruct-q4_k_m.gguf", True),
        ("SmolLM2-135M-Instruct.BF16.gguf", True),
        ("cache/models--HuggingFaceTB--SmolLM2-135M-Instruct/snapshots/0a1b", True),
        ("SmolLM2-360M-Instruct.Q4_1.gguf", False),
        ("SmolLM2-135M.gguf", False),
    ],
)
def test_a_file_of_the_named_target_is_that_target(source: str, same: bool) -> None:
    lineage = HeadLineage(verifier="HuggingFaceTB/SmolLM2-135M-Instruct")
    record = replace(eagle3_record("eagle3", (2, 4, N)), lineage=lineage)
    warnings = check_pair(record, TARGET, tokenizer(WORDS), tokenizer(WORDS), target_source=source)
    assert ("acceptance may be low" in " ".join(warnings)) is not same
