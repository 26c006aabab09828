"""``verify``: what a bundle promises, measured on the device it lies on, and written to ``report.json``.

Needs no torch: the reference for logits is the bundle's own target graph as exported (plain operators, whole sequence in
one call), run without optimisation. With the checkpoint given, Transformers is a second, independent reference.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from specexport.engines.ort import OrtEngine
from specexport.exporter.parity import ParityError, exercise
from specexport.exporter.progress import Progress
from specexport.runtime.bundle import REPORT, Bundle
from specexport.runtime.drafters import DRAFTERS, NO_DRAFTER
from specexport.runtime.engine import TargetEngine, find_engine
from specexport.runtime.errors import UsageError
from specexport.runtime.sampling import SamplingParams
from specexport.runtime.session import Session

#: Largest difference of a logit, relative to the largest logit (or 1), by dtype of the weights.
LIMITS = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}
#: Prompts when none are given: prose, code, a list, another script.
PROMPTS = (
    "The capital of France is Paris. The capital of Italy is Rome. The capital of",
    "def add(a, b):\n    return a + b\n\ndef multiply(a, b):\n    return",
    "Shopping list: apples, pears, plums. Shopping list: apples,",
    "Die Katze sitzt auf der Matte. Der Hund",
)
#: Tokens generated for each prompt.
NEW_TOKENS = 48
#: Sampling settings whose tokens must not depend on the drafter.
SAMPLED = ({"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0})


@dataclass(frozen=True, slots=True)
class Check:
    """One measured promise: it holds when ``figure`` is at most ``limit``. ``note`` says more when it does not."""

    name: str
    passed: bool
    figure: float
    limit: float
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """All checks of one bundle on one machine."""

    bundle: Path
    engine: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Stable JSON: ``passed`` and one entry a check."""
        return {
            "passed": self.passed,
            "bundle": str(self.bundle),
            "engine": self.engine,
            "onnxruntime": onnxruntime.__version__,
            "checks": [asdict(check) for check in self.checks],
        }


def verify(
    bundle: Path,
    *,
    checkpoint: Path | None = None,
    prompts: Path | None = None,
    engine: str | None = None,
    threads: int = 0,
    progress: Progress,
) -> Report:
    """Measure a bundle and write its ``report.json``.

    Args:
        checkpoint: Hugging Face directory or GGUF file the bundle was built from, to compare with Transformers.
        prompts: text file, one prompt a line. engine: entry point, None for the bundle's own.

    Raises:
        BundleError: the bundle cannot be loaded. UsageError: an engine or prompt file that is no use.
    """
    opened = Bundle.load(bundle, check="full")
    texts = _prompts(prompts)
    name = engine or opened.manifest.engine
    checks: list[Check] = [Check("files", True, 0, 0)]
    with progress.stage("logits against a full recompute"):
        checks += _logits(opened, lambda: find_engine(name)(opened.path, threads=threads), threads)
    loaded = find_engine(name)(opened.path, threads=threads)
    encoded = [_fit(opened, opened.tokenizer.encode(text)) for text in texts]
    with progress.stage("tokens, speculative against plain", 3 * len(encoded)) as stage:
        checks += _tokens(opened, loaded, encoded, stage.advance)
    if checkpoint is not None:
        with progress.stage("against Transformers"):
            checks += _transformers(opened, loaded, checkpoint, encoded)
    report = Report(opened.path, name, tuple(checks))
    _write(opened.path / REPORT, report)
    return report


def _prompts(path: Path | None) -> list[str]:
    if path is None:
        return list(PROMPTS)
    texts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not texts:
        raise UsageError(f"{path} has no prompts: expected one a line")
    return texts


def _fit(bundle: Bundle, tokens: list[int]) -> list[int]:
    """A prompt cut so that output fits behind it."""
    room = max(1, bundle.manifest.target.slots - NEW_TOKENS)
    return tokens[:room]


def _logits(bundle: Bundle, make_engine: Callable[[], TargetEngine], threads: int) -> Iterator[Check]:
    """Chunks, trees and commits on the engine against the exported graph; relative to the size of the logits."""
    target = bundle.manifest.target
    reference = OrtEngine(bundle.path, threads=threads, lowered=False, optimize=False)
    known: dict[tuple[int, ...], NDArray[np.float32]] = {}

    def recompute(tokens: Sequence[int]) -> NDArray[np.float32]:
        key = tuple(tokens)
        if key not in known:
            count = len(key)
            index = np.arange(count)
            none = np.zeros(0, np.int64)
            chain = np.tril(np.ones((count, count), bool))
            last = np.array([count - 1])
            known[key] = reference.run(np.array(key), index, chain, 0, 0, none, last).copy()
        return known[key]

    size = max(1.0, float(np.abs(recompute([0, 1, 2])).max()))
    limit = LIMITS[target.dtype] * size
    note = None
    try:
        logits, cache = exercise(
            make_engine, recompute, vocab=target.valid_vocab, limit=limit, to_the_end=target.slots <= 256
        )
    except ParityError as error:
        logits = cache = float("inf")
        note = str(error)
    passed = note is None
    yield Check("logits_teacher_forced", passed, logits / size, limit / size, note)
    yield Check("cache_equals_fresh_prefill", passed, cache / size, limit / size, note)


def _tokens(
    bundle: Bundle, engine: TargetEngine, prompts: list[list[int]], advance: Callable[[int], None]
) -> Iterator[Check]:
    """Every drafter against plain decoding, greedy and sampled with the same seed; counts differing runs."""
    offered = [info.name for info in bundle.manifest.drafters] or list(DRAFTERS)
    sessions = {name: Session(bundle, drafter=name, engine=engine) for name in [NO_DRAFTER, *offered]}
    for label, settings in (("greedy", {}), *((_label(s), s) for s in SAMPLED)):
        wrong = dict.fromkeys(offered, 0)
        first: str | None = None
        for seed, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=NEW_TOKENS, seed=seed, **settings)
            outputs = {name: session.generate(prompt, params).token_ids for name, session in sessions.items()}
            for name in offered:
                if outputs[name] != outputs[NO_DRAFTER]:
                    wrong[name] += 1
                    first = first or f"{name}, prompt {seed}, token {_first(outputs[name], outputs[NO_DRAFTER])}"
            advance(1)
        for name in offered:
            yield Check(f"{label}_tokens_{name}", wrong[name] == 0, wrong[name], 0, first if wrong[name] else None)


def _label(settings: dict[str, float]) -> str:
    return "sampled_" + "_".join(f"{name}_{value:g}" for name, value in settings.items())


def _first(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))


def _transformers(bundle: Bundle, engine: TargetEngine, checkpoint: Path, prompts: list[list[int]]) -> Iterator[Check]:
    """Logits of the prompts, and greedy tokens, of the checkpoint in Transformers at fp32."""
    import torch

    model = load_transformers(checkpoint)
    limit = LIMITS[bundle.manifest.target.dtype]
    session = Session(bundle, drafter=NO_DRAFTER, engine=engine)
    worst = 0.0
    wrong = 0
    note = None
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=NEW_TOKENS)
        output = session.generate(prompt, params)
        sequence = prompt + output.token_ids
        with torch.no_grad():
            logits = model(torch.tensor([sequence]), use_cache=False).logits[0].float().numpy()
        count = len(sequence)
        engine.reset()
        mine = engine.run(
            np.array(sequence),
            np.arange(count),
            np.tril(np.ones((count, count), bool)),
            0,
            0,
            np.zeros(0, np.int64),
            np.arange(len(prompt) - 1, count),
        )
        expected = logits[len(prompt) - 1 :]
        size = max(1.0, float(np.abs(expected).max()))
        worst = max(worst, float(np.abs(mine - expected).max()) / size)
        differ = _first(output.token_ids, expected[:, : bundle.manifest.target.valid_vocab].argmax(-1).tolist())
        if differ < len(output.token_ids):
            top = np.sort(expected[differ])[-2:]
            # Half precision may turn a near tie; the margin says whether it was one.
            if float(top[1] - top[0]) > limit * size:
                wrong += 1
                note = note or f"prompt {index}, token {differ}, top-2 margin {top[1] - top[0]:.4f}"
    yield Check("transformers_logits", worst <= limit, worst, limit)
    yield Check("transformers_greedy_tokens", wrong == 0, wrong, 0, note)


def load_transformers(checkpoint: Path) -> Any:
    """The checkpoint as Transformers reads it, in fp32.

    Raises:
        UsageError: Transformers is not installed or cannot load it.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise UsageError(f"comparing with Transformers needs it: pip install transformers ({error})") from None
    where: dict[str, Any] = {"pretrained_model_name_or_path": checkpoint}
    if checkpoint.is_file():
        where = {"pretrained_model_name_or_path": checkpoint.parent, "gguf_file": checkpoint.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"Transformers cannot load {checkpoint}: {str(error).splitlines()[0]}") from None
    return model.eval()


def _write(path: Path, report: Report) -> None:
    """Replace ``report.json`` whole."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)
