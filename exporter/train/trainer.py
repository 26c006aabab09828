"""The training loop: batches in an order that the seed decides, two optimisers, held-out figures, and checkpoints that
continue as if nothing had happened.

Matrices have a learning rate of their own, and may go to Muon (Jordan et al. 2024) instead of AdamW, with updates of as
much size (Liu et al. 2025, arXiv 2502.16982): it pays where batches are large. The learning rate warms up, stays, and
falls linearly to zero over the last part, so that a run can be made longer or shorter while it goes on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from specexport.exporter.progress import Progress
from specexport.exporter.train.corpus import Corpus, Example
from specexport.exporter.train.rows import Pack, batches, learnt_rows, pack
from specexport.runtime.errors import CheckpointError
from specexport.runtime.replacing import new_file


class Learner(Protocol):
    """What is trained: gives the loss and the hits of packed rows."""

    def losses(self, pack: Pack, steps: int) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """How a head is trained.

    Attributes:
        visits: learnt rows to go through, repetitions counted; may be changed when a run is continued.
        steps: unrolled draft steps (EAGLE-3), or heads (Medusa). first_steps: unrolled at the start, growing evenly
            to ``steps`` over the first half.
        batch: learnt rows of an optimiser step. micro: of a forward pass.
        optimiser: of matrices, ``adamw`` or ``muon``. matrix_lr: theirs. lr: of norms and biases.
        head_lr: of an lm_head that the head brings; 0 leaves it at the target's rows, which learns faster and better
            until there is much data (AdamW moves rows that are seldom right as far as any).
        warmup, decay: shares of ``visits``.
        held_out: one sequence in this many is only measured. checkpoint_s: seconds between checkpoints.
    """

    visits: int = 1_000_000
    steps: int = 4
    first_steps: int = 2
    batch: int = 384
    micro: int = 1024
    optimiser: str = "adamw"
    matrix_lr: float = 2e-3
    lr: float = 1e-3
    head_lr: float = 0.0
    warmup: float = 0.03
    decay: float = 0.4
    seed: int = 0
    dtype: str = "bfloat16"
    held_out: int = 25
    measured: int = 48
    measure_every: int = 50
    checkpoint_s: float = 40.0

    #: May differ when a run is continued.
    FREE = ("visits", "checkpoint_s", "measured", "measure_every")


@dataclass(slots=True)
class Place:
    """Where a run is."""

    step: int = 0
    visits: int = 0
    epoch: int = 0
    batch: int = 0
    sequences: int = 0
    seconds: float = 0.0


class Trainer:
    """One run.

    Args:
        learner: the loss. parameters: what is trained, by name. corpus: to learn from.
        checkpoint: file to continue from, and to write. identity: what else the run depends on.
    """

    def __init__(
        self,
        learner: Learner,
        parameters: Mapping[str, nn.Parameter],
        corpus: Corpus,
        options: TrainOptions,
        checkpoint: Path,
        identity: Mapping[str, Any],
    ) -> None:
        self.learner, self.corpus, self.options, self.path = learner, corpus, options, checkpoint
        self.parameters = dict(parameters)
        self.identity = {**identity, **{k: v for k, v in asdict(options).items() if k not in TrainOptions.FREE}}
        self.place, self.history = Place(), list[dict[str, Any]]()
        self.device = next(iter(self.parameters.values())).device
        self.counts = [learnt_rows(learn) for learn in _learn(corpus)]
        self.held = [i for i in range(len(corpus)) if i % options.held_out == options.held_out - 1 and self.counts[i]]
        held = set(self.held)
        self.train = [i for i in range(len(corpus)) if i not in held and self.counts[i]]
        if not self.train or not self.held:
            raise CheckpointError(f"{corpus.directory}: {len(corpus)} sequences are too few to learn and to measure")
        matrices = [p for name, p in self.parameters.items() if p.ndim == 2 and name != "lm_head"]
        norms = [p for p in self.parameters.values() if p.ndim != 2]
        lm_head = [p for name, p in self.parameters.items() if name == "lm_head"]
        self.optimisers = [
            (_optimiser(kind, group, lr), lr)
            for kind, group, lr in (
                (options.optimiser, matrices, options.matrix_lr),
                ("adamw", norms, options.lr),
                ("adamw", lm_head, options.head_lr),
            )
            if group and lr
        ]
        for optimiser, _ in self.optimisers:
            for group in optimiser.param_groups:
                for parameter in group["params"]:
                    parameter.requires_grad_(True)
        if checkpoint.exists():
            self._load()

    def run(self, progress: Progress) -> None:
        """Train until ``visits`` rows have been gone through; measures at the start, now and then, and at the end."""
        saved, began = time.monotonic(), time.monotonic()
        before = self.place.seconds
        losses: list[float] = []
        with progress.stage("train", self.options.visits) as stage:
            stage.advance(self.place.visits)
            while self.place.visits < self.options.visits:
                if self.place.step % self.options.measure_every == 0:
                    self._note(progress, losses)
                rows, loss = self._step()
                losses.append(loss)
                stage.advance(rows)
                self.place.seconds = before + time.monotonic() - began
                if time.monotonic() - saved > self.options.checkpoint_s:
                    self.save()
                    saved = time.monotonic()
            self._note(progress, losses)
        self.save()

    def _batches(self) -> list[list[int]]:
        """The batches of this epoch. A corpus that has grown begins a new one."""
        place = self.place
        if place.sequences not in (0, len(self.train)):
            place.epoch, place.batch = place.epoch + 1, 0
        place.sequences = len(self.train)
        generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + place.epoch)
        order = [self.train[i] for i in torch.randperm(len(self.train), generator=generator).tolist()]
        return batches(self.counts, order, self.options.batch)

    def _step(self) -> tuple[int, float]:
        """One optimiser step; returns the rows it learnt and its loss."""
        options, place = self.options, self.place
        found = self._batches()
        if place.batch >= len(found):
            place.epoch, place.batch = place.epoch + 1, 0
            found = self._batches()
        chosen = found[place.batch]
        rows = sum(self.counts[i] for i in chosen)
        share = min(1.0, place.visits / (options.visits / 2))
        steps = min(options.steps, options.first_steps + int(share * (options.steps - options.first_steps + 1)))
        torch.manual_seed(options.seed * 1_000_003 + place.step)
        loss = 0.0
        for part in batches(self.counts, chosen, options.micro):
            packed = self._pack([self.corpus[i] for i in part], steps)
            with self._autocast():
                value, _ = self.learner.losses(packed, steps)
            value = value * (len(packed.learnt) / rows)
            value.backward()  # type: ignore[no-untyped-call]
            loss += float(value.detach())
        factor = self._factor()
        nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        for optimiser, lr in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = lr * factor
            optimiser.step()
            optimiser.zero_grad()
        place.step += 1
        place.batch += 1
        place.visits += rows
        return rows, loss

    def _factor(self) -> float:
        """Of the learning rates, now."""
        options, done = self.options, self.place.visits / self.options.visits
        rise = (done + 1e-3) / options.warmup if options.warmup else 1.0
        return max(0.01, min(1.0, rise, (1 - done) / options.decay if options.decay else 1.0))

    def _pack(self, examples: list[Example], steps: int) -> Pack:
        return pack(examples, steps, self.device)

    def _autocast(self) -> torch.autocast:
        dtype = getattr(torch, self.options.dtype)
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32)

    @torch.no_grad()
    def measure(self) -> dict[str, Any]:
        """Held-out figures: the loss, top-1 agreement by depth (given that the path so far is the text's), and the
        expected tau of a chain of as many drafts."""
        hits, loss, rows = [], 0.0, 0
        held = self.held[: self.options.measured]
        for part in batches(self.counts, held, self.options.micro):
            packed = self._pack([self.corpus[i] for i in part], self.options.steps)
            with self._autocast():
                value, found = self.learner.losses(packed, self.options.steps)
            loss += float(value) * len(packed.learnt)
            rows += len(packed.learnt)
            hits.append(found)
        right = torch.cat(hits).float()
        return {
            "loss": round(loss / rows, 4),
            "agreement": [round(x, 4) for x in right.mean(0).tolist()],
            "tau": round(1 + float(right.cumprod(1).sum(1).mean()), 4),
        }

    def _note(self, progress: Progress, losses: list[float]) -> None:
        place = self.place
        if self.history and self.history[-1]["visits"] == place.visits:
            return
        recent = losses[-self.options.measure_every :]
        note: dict[str, Any] = {
            "step": place.step,
            "visits": place.visits,
            "epoch": place.epoch,
            "seconds": round(place.seconds, 1),
        }
        note |= {"train_loss": round(sum(recent) / len(recent), 4) if recent else None} | self.measure()
        self.history.append(note)
        agreement = " ".join(f"{x:.3f}" for x in note["agreement"])
        progress.log(
            f"{place.visits} rows ({place.epoch} epochs, {place.seconds:.0f} s): loss {note['train_loss']}, held out "
            f"{note['loss']}, agreement {agreement}, expected tau {note['tau']:.3f}"
        )

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        state = {
            "identity": self.identity,
            "place": asdict(self.place),
            "history": self.history,
            "parameters": {name: parameter.detach() for name, parameter in self.parameters.items()},
            "optimisers": [optimiser.state_dict() for optimiser, _ in self.optimisers],
        }
        with new_file(self.path) as temporary:
            torch.save(state, temporary)

    def _load(self) -> None:
        state = torch.load(self.path, map_location="cpu", weights_only=True)
        changed = sorted(
            key for key in {*state["identity"], *self.identity} if state["identity"].get(key) != self.identity.get(key)
        )
        if changed:
            raise CheckpointError(
                f"{self.path}: of a run with {changed[0]} = {state['identity'].get(changed[0])!r}, now it is "
                f"{self.identity.get(changed[0])!r}: name another --work directory, or remove the file"
            )
        self.place, self.history = Place(**state["place"]), state["history"]
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(state["parameters"][name])
        for (optimiser, _), held in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(held)


def _optimiser(kind: str, group: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    if kind == "muon":
        return torch.optim.Muon(group, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return torch.optim.AdamW(group, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)


def _learn(corpus: Corpus) -> list[Tensor]:
    """``learn`` of every sequence."""
    lengths = iter(corpus.lengths())
    masks: list[Tensor] = []
    for _, learn in corpus.learned():
        taken = 0
        while taken < len(learn):
            size = next(lengths)
            masks.append(learn[taken : taken + size])
            taken += size
    return masks
