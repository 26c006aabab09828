"""Whether a head and a target belong together: widths, captures, vocabularies and lineage."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath

from tokenizers import Tokenizer

from specexport.exporter.config import FAMILIES, TargetConfig
from specexport.exporter.heads.record import HeadRecord, MedusaRecord
from specexport.runtime.errors import CheckpointError

#: Rows by which two padded embeddings of one tokenizer may differ where no tokenizer tells: padding goes to multiples
#: of up to 512.
_PADDING = 512


def check_pair(
    record: HeadRecord,
    target: TargetConfig,
    head_tokenizer: bytes | None = None,
    target_tokenizer: bytes | None = None,
    *,
    target_source: str | None = None,
) -> list[str]:
    """Compare a head with the target it is to draft for.

    Args:
        head_tokenizer, target_tokenizer: ``tokenizer.json`` files, where there are any.
        target_source: what the user named the target; compared with the verifier that the head names.

    Returns:
        Warnings, one line each.

    Raises:
        CheckpointError: they cannot work together.
    """
    width = record.hidden_size if isinstance(record, MedusaRecord) else record.target_hidden_size
    if width != target.hidden_size:
        raise CheckpointError(
            f"the head reads states of width {width}, the target's are {target.hidden_size} wide: another target's head"
        )
    for capture in record.captures:
        if isinstance(capture, int) and not 0 <= capture <= target.num_layers:
            raise CheckpointError(
                f"the head captures boundary {capture}; the target has boundaries 0 to {target.num_layers}"
            )
    warnings = _lineage(record, target, target_source)
    theirs = None if target_tokenizer is None else _vocabulary(target_tokenizer, "the target's")
    if head_tokenizer is not None and theirs is not None:
        warnings += _same_tokens(_vocabulary(head_tokenizer, "the head's"), theirs)
    valid = None if theirs is None else 1 + max(theirs, default=-1)
    return warnings + _sizes(record, target, valid)


def fit_record(record: HeadRecord, target: TargetConfig) -> HeadRecord:
    """The record of a checked head with the row counts of the target's tables where it uses those.

    A head may say 151936 where the target has 152064 rows: harmless padding, but a shared table has one size.
    """
    if isinstance(record, MedusaRecord):
        return replace(record, vocab_size=target.vocab_size) if record.lm_head == "target" else record
    if record.embedding == "target":
        record = replace(record, vocab_size=target.vocab_size)
    if record.lm_head == "target" and record.draft_to_target is None:
        record = replace(record, draft_vocab_size=target.vocab_size)
    return record


def _lineage(record: HeadRecord, target: TargetConfig, source: str | None) -> list[str]:
    warnings = []
    verifier, architecture = record.lineage.verifier, record.lineage.architecture
    if verifier is not None and source is not None and _base(verifier) != _base(source):
        warnings.append(f"the head names {verifier} as its target, not {source}: acceptance may be low")
    family = FAMILIES.get(architecture or "")
    if architecture is not None and (family is None or family.architecture != target.architecture):
        warnings.append(f"the head was made for a {architecture}, the target is {target.architecture}")
    return warnings


#: What GGUF files add to a model's name: their format, such as ``.Q4_K_M``, and the suffix.
_GGUF = re.compile(r"([.-](i?q\d\w*|b?f16|f32))?\.gguf$", re.IGNORECASE)


def _base(name: str) -> str:
    """The last part of a path or hub id, without what a snapshot or a file adds."""
    parts = [part for part in PurePath(name).parts if part not in ("/", ".")]
    hub = next((part for part in parts if part.startswith("models--")), None)
    last = hub.split("--")[-1] if hub is not None else parts[-1] if parts else ""
    return _GGUF.sub("", last).lower()


def _sizes(record: HeadRecord, target: TargetConfig, valid: int | None) -> list[str]:
    """Vocabulary sizes. ``valid``: ids the target's tokenizer can give are below it."""
    if isinstance(record, MedusaRecord):
        ids = record.token_map
        rows = None if ids is not None else record.vocab_size
    else:
        ids, rows = record.draft_to_target, record.vocab_size
    if ids is not None and int(ids.max()) >= target.vocab_size:
        raise CheckpointError(
            f"the head drafts token {int(ids.max())}; the target's vocabulary ends at {target.vocab_size - 1}"
        )
    if rows is None or rows == target.vocab_size:
        return []
    low = min(rows, target.vocab_size)
    told = f"the head's vocabulary has {rows} rows, the target's {target.vocab_size}"
    if (valid is not None and valid > low) or (valid is None and abs(rows - target.vocab_size) > _PADDING):
        used = "more than padding" if valid is None else f"the tokenizer uses {valid}"
        raise CheckpointError(f"{told}, and {used}: the head was made for another vocabulary")
    return [f"{told}; the difference is padding" + (", it seems" if valid is None else "")]


def _vocabulary(data: bytes, whose: str) -> dict[int, str]:
    try:
        vocabulary: Mapping[str, int] = Tokenizer.from_buffer(data).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises bare Exceptions
        reason = (str(error).splitlines() or [""])[0][:120]
        raise CheckpointError(f"{whose} tokenizer.json is not understood ({reason})") from None
    return {index: token for token, index in vocabulary.items()}


def _same_tokens(mine: Mapping[int, str], theirs: Mapping[int, str]) -> list[str]:
    """Token by token. Ids that only one side has are tokens added later: a warning."""
    for index in sorted(mine.keys() & theirs.keys()):
        if mine[index] != theirs[index]:
            raise CheckpointError(
                f"the tokenizers differ: id {index} is {mine[index]!r} for the head, {theirs[index]!r} for the target"
            )
    warnings = []
    for name, left, right in (("head", mine, theirs), ("target", theirs, mine)):
        if extra := sorted(left.keys() - right.keys()):
            warnings.append(
                f"only the {name}'s tokenizer has id {extra[0]} ({left[extra[0]]!r}) and {len(extra) - 1} more"
            )
    return warnings
