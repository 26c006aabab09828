"""A separate draft model: a second target, exported by the same code, whose vocabulary is matched with the target's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from specexport.exporter.checkpoint import Checkpoint, open_checkpoint
from specexport.exporter.config import TargetConfig, read_config
from specexport.exporter.heads.merged import target_view
from specexport.exporter.quantize.plan import FLOATS
from specexport.exporter.tokenizer import collect_tokenizer
from specexport.runtime.detokenize import byte_level_bytes
from specexport.runtime.drafters.model import ModelDrafter
from specexport.runtime.drafters.model_files import ModelOptions
from specexport.runtime.errors import CheckpointError
from specexport.runtime.manifest import DrafterInfo

#: Least share of the smaller vocabulary that both models must have.
MIN_COVERAGE = 0.5
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")

#: Token id -> the bytes it stands for, and whether it is a special (control) token.
Tokens = dict[int, tuple[bytes, bool]]


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model that fits its target.

    Attributes:
        checkpoint: to export, without heads. slots: cache rows, at most those of the target.
        valid_vocab: ids below it may be drafted.
        vocabulary: int32 [valid_vocab], the target's id of each or -1; None where ids are the same.
        warnings: one line each.
    """

    checkpoint: Checkpoint
    config: TargetConfig
    slots: int
    valid_vocab: int
    vocabulary: NDArray[np.int32] | None
    revision: str | None
    warnings: tuple[str, ...]


def read_draft_model(
    source: str,
    target_tokenizer: bytes,
    *,
    slots: int,
    depth: int,
    revision: str | None = None,
    tokenizer: Path | None = None,
    offline: bool = False,
) -> DraftModel:
    """Open a draft model and match it with its target.

    Args:
        source: directory, hub id or GGUF file. revision, tokenizer: as for a target.
        target_tokenizer: the target's ``tokenizer.json``. slots: the target's. depth: tokens of a draft.

    Raises:
        CheckpointError: it is not understood, its context is too short, or the vocabularies have too little in common.
    """
    checkpoint = target_view(open_checkpoint(source, revision=revision, offline=offline, option="--draft-revision"))
    config = read_config(checkpoint.config)
    if config.max_position_embeddings <= depth:
        raise CheckpointError(
            f"the draft model {source} has {config.max_position_embeddings} positions, too few for drafts of {depth} "
            "tokens: lower --draft-depth or choose another model"
        )
    warnings = [f"draft model: {note}" for note in checkpoint.notes]
    if config.max_position_embeddings < slots:
        warnings.append(
            f"the draft model has {config.max_position_embeddings} positions and the window {slots}: past them "
            "decoding is plain"
        )
    mine = collect_tokenizer(checkpoint, tokenizer).tokenizer_json
    count, table, more = match_vocabularies(read_tokens(mine), read_tokens(target_tokenizer), source)
    return DraftModel(
        checkpoint=checkpoint,
        config=config,
        slots=min(slots, config.max_position_embeddings),
        valid_vocab=count,
        vocabulary=table,
        revision=revision,
        warnings=(*warnings, *more),
    )


def match_vocabularies(draft: Tokens, target: Tokens, source: str) -> tuple[int, NDArray[np.int32] | None, list[str]]:
    """How many ids may be drafted, the target's id of each (-1: none; None: ids are the same), and warnings.

    One tokenizer is one that gives the same text to every id that both have; padding rows do not count. Otherwise
    tokens are matched by text and by being special or not. Only drafts depend on a match, never what is generated.

    Raises:
        CheckpointError: they share less than :data:`MIN_COVERAGE` of the smaller vocabulary.
    """
    both = draft.keys() & target.keys()
    differing = sorted(index for index in both if draft[index][0] != target[index][0])
    if not differing:
        pairs = {index: index for index in both}
    else:
        # Of two ids with one meaning (a letter and its byte) the later is the one that tokenizers give.
        ids = {token: index for index, token in target.items()}
        pairs = {index: ids[token] for index, token in draft.items() if token in ids}
    smaller = min(len(draft), len(target))
    if not pairs or len(pairs) < MIN_COVERAGE * smaller:
        raise CheckpointError(
            f"the draft model {source} shares {len(pairs)} of {smaller} tokens with the target "
            f"({len(pairs) / max(1, smaller):.0%} of the smaller vocabulary), expected at least {MIN_COVERAGE:.0%}: "
            "choose a model with the target's tokenizer"
        )
    warnings = []
    if missing := len(target) - len(pairs):
        warnings.append(f"the draft model lacks {missing} of the target's {len(target)} tokens, and does not see them")
    if not differing:
        return 1 + max(pairs), None, warnings
    index = differing[0]
    warnings.append(
        f"the tokenizers differ (id {index} is {_shown(draft[index])} for the draft model, {_shown(target[index])} for "
        f"the target): {len(pairs)} tokens are matched by their text"
    )
    table = np.full(1 + max(pairs), -1, np.int32)
    table[list(pairs)] = list(pairs.values())
    return len(table), table, warnings


def _shown(token: tuple[bytes, bool]) -> str:
    return repr(token[0].decode(errors="replace"))


def read_tokens(tokenizer_json: bytes) -> Tokens:
    """The tokens of a tokenizer, however it spells bytes and spaces: ``Ġthe`` and ``▁the`` are one."""
    tokenizer = Tokenizer.from_buffer(tokenizer_json)
    special = {index: token.special for index, token in tokenizer.get_added_tokens_decoder().items()}
    meaning = _meaning(json.loads(tokenizer_json).get("decoder"))
    return {
        index: (text.encode() if index in special else meaning(text), special.get(index, False))
        for text, index in sorted(tokenizer.get_vocab(with_added_tokens=True).items(), key=itemgetter(1))
    }


def _meaning(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    """How a decoder turns an ordinary token into bytes."""
    parts = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        return byte_level_bytes
    spaces = "Metaspace" in kinds or any(part.get("pattern") == {"String": "▁"} for part in parts)
    fallback = "ByteFallback" in kinds

    def meaning(text: str) -> bytes:
        if fallback and (match := _BYTE.fullmatch(text)):
            return bytes([int(match[1], 16)])
        return (text.replace("▁", " ") if spaces else text).encode()

    return meaning


def write_vocabulary(graph: Path, ids: NDArray[np.integer[Any]]) -> str:
    """Write the target's ids of a drafter's rows beside its graph; the file's name in the bundle."""
    path = graph.with_suffix(".vocabulary")
    path.write_bytes(ids.astype("<i4").tobytes())
    return path.name


def write_record(draft: DraftModel, graph: Path, depth: int, dtype: str) -> DrafterInfo:
    """The manifest's record of a draft model exported to ``graph``, and its table of ids beside that."""
    config = draft.config
    vocabulary = None if draft.vocabulary is None else write_vocabulary(graph, draft.vocabulary)
    values = 2 * config.num_layers * config.num_kv_heads * draft.slots * config.head_dim
    options = ModelOptions(
        depth=depth,
        slots=draft.slots,
        vocab_size=config.vocab_size,
        valid_vocab=draft.valid_vocab,
        vocabulary=vocabulary,
        architecture=config.architecture,
        source=draft.checkpoint.source[-512:],
        revision=draft.revision,
        fingerprint=draft.checkpoint.fingerprint(),
        cache_bytes=values * FLOATS[dtype].itemsize,
    )
    kind = ModelDrafter.kind
    return DrafterInfo(name=kind, kind=kind, options=asdict(options), graph=graph.name, tree=None)
