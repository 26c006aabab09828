"""A tiny target and a corpus it wrote, made once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from specexport.exporter.progress import Progress
from specexport.exporter.train.corpus import Corpus
from specexport.exporter.train.make import MakeOptions
from specexport.exporter.train.run import RunOptions, make_corpus
from specexport.exporter.train.target import Opened, open_target
from specexport.exporter.train.trainer import TrainOptions
from tests.tiny import write_llama

QUIET = Progress(quiet=True)
MAKE = MakeOptions(self_prompts=4, max_answer=32, max_prompt=96, batch=16, round_size=24, sampled=0.25)
TRAIN = TrainOptions(
    visits=3000,
    batch=256,
    micro=160,
    steps=3,
    matrix_lr=1e-2,
    lr=2e-3,
    head_lr=1e-3,
    dtype="float32",
    held_out=6,
    measure_every=4,
)


@dataclass(frozen=True)
class Tiny:
    """A target, prompts for it, and where its corpora go."""

    options: RunOptions
    opened: Opened
    corpus: Corpus

    def with_method(self, method: str, output: Path, **changes: object) -> RunOptions:
        """Options of a run that shares the corpus."""
        steps = {"eagle1": 1, "medusa": 4}.get(method, TRAIN.steps)
        train = replace(TRAIN, steps=steps, first_steps=min(steps, TRAIN.first_steps) if method == "eagle3" else steps)
        return replace(self.options, method=method, output=output, train=train, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A llama of two layers, 60 prompts, and its answers to them."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("train")
    target = write_llama(folder / "target")
    data = folder / "prompts.jsonl"
    data.write_text("".join(f'{{"prompt": "the quick {n} fox, {n * 7}"}}\n' for n in range(56)))
    options = RunOptions(
        "eagle3", str(target), folder / "heads", (data,), work=folder / "work", draft_vocab=200, make=MAKE, train=TRAIN
    )
    opened = open_target(str(target), QUIET, dtype=torch.float32)
    return Tiny(options, opened, make_corpus(options, opened, folder / "work", QUIET))
