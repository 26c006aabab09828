"""``train``: from a target and some data to a head, as one readable story."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specexport.exporter.graph_file import load_state
from specexport.exporter.heads.base import Head
from specexport.exporter.heads.detect import open_head
from specexport.exporter.heads.modules import MedusaHeads
from specexport.exporter.heads.record import MedusaRecord, RecurrentRecord
from specexport.exporter.heads.recurrent import RecurrentDrafter
from specexport.exporter.progress import Progress
from specexport.exporter.train import medusa, recurrent
from specexport.exporter.train.corpus import Corpus
from specexport.exporter.train.heads import (
    Shape,
    lm_head,
    medusa_record,
    new_medusa,
    new_recurrent,
    recurrent_record,
    save_head,
    with_lm_head,
)
from specexport.exporter.train.make import TURN, MakeOptions, Maker
from specexport.exporter.train.medusa import MedusaTrainer
from specexport.exporter.train.prompts import read_items
from specexport.exporter.train.recurrent import RecurrentTrainer
from specexport.exporter.train.target import Opened, open_target
from specexport.exporter.train.trainer import Learner, Trainer, TrainOptions
from specexport.runtime.errors import UsageError
from specexport.runtime.replacing import replace_text

#: What a target in the dtype of training is called in a bundle's manifest.
_PRECISION = {"float32": "fp32", "bfloat16": "bf16"}
#: Rows of a draft vocabulary unless told otherwise; a smaller target's whole vocabulary.
DRAFT_VOCAB = 16384


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What ``train`` was asked for.

    Attributes:
        method: ``eagle3``, ``eagle1`` or ``medusa``. target: directory, hub id or GGUF file.
        data: files of texts, chats or prompts; see ``train.prompts``. prompt_field: of prompts in them.
        output: directory of the head. work: where corpora and checkpoints are kept; several methods may share it.
        draft_vocab: Vd of EAGLE-3. init: a head to go on from, of the same method.
        share_lm_head: EAGLE-3's draft lm_head stays the target's rows and is left out of the file.
        layout: Medusa's, of ``train.heads.LM_HEADS``: with the target's lm_head in the file, or without.
        dtype: of the written weights.
    """

    method: str
    target: str
    output: Path
    data: tuple[Path, ...] = ()
    prompt_field: str = "prompt"
    work: Path | None = None
    tokenizer: Path | None = None
    revision: str | None = None
    offline: bool = False
    draft_vocab: int = DRAFT_VOCAB
    init: str | None = None
    share_lm_head: bool = False
    layout: str = "medusa-legacy"
    dtype: str = "fp16"
    device: str = "cpu"
    shape: Shape = field(default_factory=Shape)
    make: MakeOptions = field(default_factory=MakeOptions)
    train: TrainOptions = field(default_factory=TrainOptions)


def train(options: RunOptions, progress: Progress) -> dict[str, Any]:
    """Train a head; continues where an earlier run of the same options was stopped.

    Returns:
        Figures of the run: sequences, tokens, held-out history, seconds.

    Raises:
        UsageError, CheckpointError: options, files or data that do not fit.
    """
    if options.share_lm_head and options.train.head_lr:
        raise UsageError(f"--head-lr {options.train.head_lr} trains what --share-lm-head leaves out: drop one")
    if options.device != "cpu" and not torch.cuda.is_available():
        raise UsageError(f"--device {options.device}: this PyTorch sees no such device; use cpu")
    started = time.monotonic()
    dtype = getattr(torch, options.train.dtype)
    opened = open_target(
        options.target,
        progress,
        tokenizer=options.tokenizer,
        dtype=dtype,
        revision=options.revision,
        offline=options.offline,
    )
    work = options.work or options.output.with_name(options.output.name + ".work")
    corpus = make_corpus(options, opened, work, progress)
    ids = draft_vocabulary(corpus, opened, options.draft_vocab)
    head = None if options.init is None else _open_init(options, opened)
    trainer, record, parameters = prepare(options, opened, corpus, ids, head, work)
    tokens = sum(trainer.counts)
    progress.log(
        f"{len(corpus)} sequences, {tokens} rows to learn; a draft vocabulary of {len(ids)} covers "
        f"{coverage(corpus, ids):.1%} of them"
    )
    trainer.run(progress)
    figures = {
        "method": options.method,
        "target_fingerprint": opened.fingerprint,
        "chat_template_sha256": opened.template_hash,
        "precision": options.train.dtype,
        "target_precision": _PRECISION[options.train.dtype],
        "sequences": len(corpus),
        "rows": tokens,
        "visits": trainer.place.visits,
        "training_seconds": round(trainer.place.seconds, 1),
        "draft_vocabulary_coverage": round(coverage(corpus, ids), 4),
        "held_out": trainer.history[-1],
    }
    tensors: Mapping[str, Tensor] = parameters
    if isinstance(record, MedusaRecord):
        assert isinstance(trainer.learner, MedusaTrainer)
        record, tensors = with_lm_head(record, parameters, options.layout, trainer.learner.heads.lm_head)
    save_head(options.output, record, tensors, figures, target_name=options.target, dtype=options.dtype)
    replace_text(options.output / "training.json", json.dumps(trainer.history, indent=1) + "\n")
    return figures | {"seconds": round(time.monotonic() - started, 1), "history": trainer.history}


def make_corpus(options: RunOptions, opened: Opened, work: Path, progress: Progress) -> Corpus:
    """The corpus of these options, made or completed."""
    items = [item for path in options.data for item in read_items(path, options.prompt_field)]
    identity = {
        "target": opened.fingerprint,
        "template": opened.template_hash,
        "captures": list(opened.captures),
        "dtype": options.train.dtype,
        "data": [hashlib.sha256(path.read_bytes()).hexdigest() for path in options.data],
    }
    key = hashlib.sha256(json.dumps([identity, asdict(options.make)], sort_keys=True).encode()).hexdigest()[:12]
    longest = options.make.max_prompt + max(options.make.max_answer, TURN)
    directory = work / f"corpus-{key}"
    maker = Maker(lambda: opened.model(longest, options.device), opened.chat, items, options.make, directory, identity)
    maker.run(progress)
    return Corpus(directory)


def draft_vocabulary(corpus: Corpus, opened: Opened, size: int) -> Tensor:
    """Ascending ids int64 of the tokens that the target writes most; those that end a text are always among them.

    What it reads counts a quarter: answers repeat the words of their prompts.
    """
    counts = 4 * _counts(corpus, opened.config.vocab_size) + _counts(corpus, opened.config.vocab_size, read=True)
    counts[list(opened.chat.files.stop_ids)] += int(counts.sum()) + 1
    valid = opened.chat.files.vocab_size
    best = torch.argsort(counts[:valid], descending=True, stable=True)
    return torch.sort(best[:size]).values


def coverage(corpus: Corpus, ids: Tensor) -> float:
    """Share of the learnt tokens that are among ``ids``."""
    counts = _counts(corpus, 0)
    return float(counts[ids[ids < len(counts)]].sum() / counts.sum())


def _counts(corpus: Corpus, rows: int, *, read: bool = False) -> Tensor:
    """How often the corpus has each token that was written; ``read``: that was not."""
    counts = torch.zeros(rows, dtype=torch.int64)
    for tokens, learn in corpus.learned():
        fresh = torch.bincount(tokens[~learn if read else learn], minlength=rows)
        if len(fresh) > len(counts):
            counts = nn.functional.pad(counts, (0, len(fresh) - len(counts)))
        counts[: len(fresh)] += fresh
    return counts


def _open_init(options: RunOptions, opened: Opened) -> Head:
    head = open_head(str(options.init), target=opened.config, offline=options.offline)
    if head.record.method != options.method:
        raise UsageError(f"--init {options.init}: a head of the method {head.record.method}, not {options.method}")
    return head


def prepare(
    options: RunOptions, opened: Opened, corpus: Corpus, ids: Tensor, head: Head | None, work: Path
) -> tuple[Trainer, MedusaRecord | RecurrentRecord, Mapping[str, nn.Parameter]]:
    """A trainer at its first step, or where its checkpoint is; the head's record and its own parameters."""
    target = replace(opened, dtype=torch.float32).model(8).target
    torch.manual_seed(options.train.seed)
    valid, dtype = opened.chat.files.vocab_size, getattr(torch, options.train.dtype)
    positions = options.make.max_prompt + options.make.max_answer + options.train.steps + 1
    learner: Learner
    record: MedusaRecord | RecurrentRecord
    parameters: Mapping[str, nn.Parameter]
    if options.method == "medusa":
        record = medusa_record(opened.config, options.shape)
        if head is not None:
            assert isinstance(head.record, MedusaRecord)
            record = replace(record, num_heads=head.record.num_heads, num_layers=head.record.num_layers)
        heads = new_medusa(record, target, valid).to(options.device)
        _fill(heads, head)
        learner = MedusaTrainer(heads, opened.captures, ids.to(options.device), dtype)
        parameters = medusa.trainable(heads)
    else:
        share = options.share_lm_head
        if head is not None:
            assert isinstance(head.record, RecurrentRecord)
            share = share or head.record.lm_head == "target"
            mapped = head.record.draft_to_target
            ids = torch.arange(head.record.draft_vocab_size) if mapped is None else torch.from_numpy(mapped)
        record = recurrent_record(
            options.method,
            opened.config,
            opened.captures[:-1],
            ids,
            options.shape,
            share_lm_head=share,
        )
        drafter = new_recurrent(record, target, positions, valid).to(options.device)
        _fill(drafter, head)
        if record.method == "eagle1":
            ids = torch.arange(valid)  # padding is never drafted
        learner = RecurrentTrainer(drafter, opened.captures, lm_head(target)[ids].to(options.device), dtype)
        parameters = recurrent.trainable(drafter, record)
    identity = {"method": options.method, "corpus": corpus.directory.name, "init": options.init}
    identity |= {f"shape.{name}": value for name, value in asdict(options.shape).items()} | {"ids": _digest(ids)}
    trainer = Trainer(learner, parameters, corpus, options.train, work / f"{options.method}.pt", identity)
    return trainer, record, parameters


def _fill(module: MedusaHeads | RecurrentDrafter, head: Head | None) -> None:
    """Start from a head's weights."""
    if head is not None:
        own = {name for name, _ in module.named_parameters()}
        with torch.no_grad():
            load_state(module, ((name, read) for name, read in module.values(head.weights) if name in own))


def _digest(ids: Tensor) -> str:
    return hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:16]
