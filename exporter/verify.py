"""``verify``: what a bundle promises, measured on the device it lies on, and written to ``report.json``.

Needs no torch: the reference for logits is the bundle's own target graph as exported (plain operators, whole sequence
in one call), run without optimisation. With the checkpoint given, Transformers is a second, independent reference.
Every generation starts in a new session with an empty cache, so no check can lean on what another left behind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from specexport.engines.ort import OrtEngine
from specexport.exporter.keys import QUANTIZATION_KEYS
from specexport.exporter.parity import Deviation, exercise
from specexport.exporter.progress import Progress
from specexport.exporter.report import QUALITY, read_report, write_report
from specexport.exporter.rounding import turned_tokens
from specexport.runtime.bundle import Bundle, check_files
from specexport.runtime.cache import common_prefix
from specexport.runtime.drafters import DRAFTERS, NO_DRAFTER
from specexport.runtime.engine import Step, TargetEngine, find_engine, width_exact
from specexport.runtime.errors import BundleError, SpecExportError, UsageError
from specexport.runtime.manifest import TargetInfo
from specexport.runtime.sampling import SamplingParams
from specexport.runtime.session import Session

if TYPE_CHECKING:
    from specexport.exporter.checkpoint import Checkpoint

#: Largest difference of a logit or a cache entry, relative to the largest one (or 1), by dtype of the activations.
LIMITS = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}
#: The same where weights are codes: kernels then round the activations to 8 bits, which the reference does not.
CODES_LIMIT = 0.2
#: Prompts when none are given: prose, code, a list, another script.
PROMPTS = (
    "The capital of France is Paris. The capital of Italy is Rome. The capital of",
    "def add(a, b):\n    return a + b\n\ndef multiply(a, b):\n    return",
    "Shopping list: apples, pears, plums. Shopping list: apples,",
    "Die Katze sitzt auf der Matte. Der Hund",
)
#: Tokens generated for each prompt.
NEW_TOKENS = 48
#: Sampling settings under which tokens must not depend on the drafter, by the name of the check.
SETTINGS = {
    "greedy": SamplingParams(max_tokens=NEW_TOKENS),
    "sampled_temperature_0.8_top_p_0.9": SamplingParams(max_tokens=NEW_TOKENS, temperature=0.8, top_p=0.9),
    "sampled_temperature_1": SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0),
}


@dataclass(frozen=True, slots=True)
class Check:
    """One measured promise: it holds when ``figure`` is at most ``limit``. ``note`` says more when it does not,
    ``remark`` when it does."""

    name: str
    figure: float
    limit: float
    note: str | None = None
    remark: str | None = None

    @property
    def passed(self) -> bool:
        return self.figure <= self.limit

    def to_dict(self) -> dict[str, Any]:
        """Stable JSON; a figure that is no number (the logits were NaN) is null."""
        return {
            "name": self.name,
            "passed": self.passed,
            "figure": self.figure if math.isfinite(self.figure) else None,
            "limit": self.limit,
            "note": self.remark if self.passed else self.note,
        }


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
            "checks": [check.to_dict() for check in self.checks],
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
        BundleError: the bundle cannot be loaded. UsageError: an engine, prompt file or checkpoint that is no use.
    """
    opened = Bundle.load(bundle)
    texts = _prompts(prompts)
    name = engine or opened.manifest.engine
    factory = find_engine(name)
    if checkpoint is not None:
        from specexport.exporter.checkpoint import open_checkpoint

        open_checkpoint(str(checkpoint))  # refused now rather than after the long checks
    checks: list[Check] = []
    with progress.stage("hashes"):
        checks.append(_files(opened))
    if checks[0].passed:  # what is damaged is not run
        with progress.stage("logits against a full recompute"):
            checks += _logits(opened, lambda: factory(opened.path, threads=threads), threads)
        loaded = factory(opened.path, threads=threads)
        encoded = [_fit(opened, opened.tokenizer.encode(text)) for text in texts]
        try:
            with progress.stage("tokens, speculative against plain", len(SETTINGS) * len(encoded)) as stage:
                checks += _tokens(opened, loaded, encoded, stage.advance)
            if checkpoint is not None:
                with progress.stage("against Transformers"):
                    checks += _transformers(opened, loaded, load_transformers(checkpoint), encoded)
        except UsageError:
            raise
        except SpecExportError as error:  # logits that are not numbers, for one: to be reported, not raised
            checks.append(Check("generation", 1, 0, str(error)))
    report = Report(opened.path, name, tuple(checks))
    record = report.to_dict()
    del record["bundle"]  # where it lies on this machine: bundles travel
    kept = {name: value for name, value in read_report(opened.path).items() if name == QUALITY}
    write_report(opened.path, record | kept)
    return report


def _prompts(path: Path | None) -> list[str]:
    if path is None:
        return list(PROMPTS)
    try:
        texts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 (byte {error.start})") from None
    if not texts:
        raise UsageError(f"{path} has no prompts: expected one a line")
    return texts


def _fit(bundle: Bundle, tokens: list[int]) -> list[int]:
    """A prompt cut so that output fits behind it."""
    room = max(1, bundle.manifest.target.slots - NEW_TOKENS)
    return tokens[:room]


def _files(bundle: Bundle) -> Check:
    try:
        check_files(bundle.path, bundle.manifest, "full")
    except BundleError as error:
        return Check("files", 1, 0, str(error))
    return Check("files", 0, 0)


def _logits(bundle: Bundle, make_engine: Callable[[], TargetEngine], threads: int) -> Iterator[Check]:
    """Chunks, trees and commits on the engine against the exported graph."""
    target = bundle.manifest.target
    reference = OrtEngine(bundle.path, threads=threads, lowered=False, optimize=False)

    def recompute(tokens: Sequence[int]) -> NDArray[np.float32]:
        return _forward(reference, tokens, len(tokens) - 1)

    found = exercise(make_engine, recompute, vocab=target.valid_vocab, to_the_end=target.slots <= 256)
    for name, worst in zip(("logits_teacher_forced", "cache_equals_fresh_prefill"), found, strict=True):
        yield _deviation(name, worst, limit_of(target))


def limit_of(target: TargetInfo) -> float:
    """Largest relative difference of logits, features and caches that counts as rounding."""
    precision = target.precision
    return CODES_LIMIT if precision.quantized else LIMITS[precision.activations]


def _deviation(name: str, worst: Deviation, limit: float) -> Check:
    return Check(name, worst.relative, limit, f"{worst.error:.2e} of {worst.size:.2e} at {worst.where}")


def _forward(engine: TargetEngine, tokens: Sequence[int], first: int) -> NDArray[np.float32]:
    """Logits [len - first, V] of a sequence in one call, from nothing."""
    return engine.run(Step.chain(tokens, select=range(first, len(tokens)))).copy()


def _tokens(
    bundle: Bundle, engine: TargetEngine, prompts: list[list[int]], advance: Callable[[int], None]
) -> Iterator[Check]:
    """Every drafter against plain decoding, greedy and sampled with the same seed; counts differing runs.

    Where a row of logits depends on the other rows of a call (half precision, see ``exporter.rounding``; codes whose
    kernels round activations, in a branching tree or in a bundle that is not exact) a run may differ by as much as
    rounding does, and the check says where.
    """
    offered = [info.name for info in bundle.manifest.drafters] or list(DRAFTERS)
    for label, settings in SETTINGS.items():
        differing: dict[str, list[str]] = {name: [] for name in offered}
        excused: dict[str, list[str]] = {name: [] for name in offered}
        for seed, prompt in enumerate(prompts):
            params = replace(settings, seed=seed)
            plain = _generate(bundle, engine, NO_DRAFTER, prompt, params)
            for name in offered:
                tokens = _generate(bundle, engine, name, prompt, params)
                if tokens != plain:
                    place = f"prompt {seed} from token {common_prefix(tokens, plain)}"
                    exact = width_exact(engine) and _exact(bundle)
                    reason = None if exact else _within_rounding(bundle, engine, prompt, tokens, params)
                    (differing if reason is None else excused)[name].append(place + (reason or ""))
            advance(1)
        for name, where in differing.items():
            remark = "; ".join(excused[name])
            yield Check(
                f"{label}_tokens_{name}",
                len(where),
                0,
                ", ".join(where),
                f"differs within rounding: {remark}" if remark else None,
            )


def _exact(bundle: Bundle) -> bool:
    """Whether tokens must be plain's: rows of logits are, bit for bit but for a tree's 1e-7."""
    precision = bundle.manifest.target.precision
    return precision.activations == "fp32" and (precision.exact or not precision.quantized)


def _within_rounding(
    bundle: Bundle, engine: TargetEngine, prompt: list[int], output: list[int], params: SamplingParams
) -> str | None:
    """By how much the tokens of a differing run miss plain ones, None where that is more than rounding."""
    target = bundle.manifest.target
    bound = limit_of(target)
    logits = _forward(engine, prompt + output[:-1], len(prompt) - 1)
    turned = turned_tokens(
        logits,
        prompt,
        output,
        params,
        bound,
        valid_vocab=target.valid_vocab,
        stop_ids=bundle.manifest.stop_ids,
    )
    if not all(token.excused for token in turned):
        return None
    worst = max((token.gap for token in turned), default=0.0)
    return f", {len(turned)} tokens by at most {worst:.2e} of the largest logit (bound {bound:g})"


def _generate(
    bundle: Bundle, engine: TargetEngine, drafter: str, prompt: list[int], params: SamplingParams
) -> list[int]:
    """Tokens of a new session, the stop token included if there is one."""
    result = Session(bundle, drafter=drafter, engine=engine).generate(prompt, params)
    return result.token_ids + ([result.stop_match] if isinstance(result.stop_match, int) else [])


def _transformers(bundle: Bundle, engine: TargetEngine, model: Any, prompts: list[list[int]]) -> Iterator[Check]:
    """Logits of the prompts and their greedy continuations, and those tokens, against Transformers in fp32.

    A token counts as wrong when Transformers, given the same tokens before it, prefers another one by more than the
    limit for logits: rounding may turn a tie.
    """
    import torch

    target = bundle.manifest.target
    limit = limit_of(target)
    worst = Deviation()
    wrong: list[str] = []
    for index, prompt in enumerate(prompts):
        output = _generate(bundle, engine, NO_DRAFTER, prompt, SETTINGS["greedy"])
        sequence, first = (prompt + output)[: target.slots], len(prompt) - 1
        with torch.no_grad():
            logits = model(torch.tensor([sequence]), use_cache=False).logits[0, first:].float().numpy()
        worst.note(_forward(engine, sequence, first), logits, f"prompt {index}")
        possible = logits[: len(output), : target.valid_vocab]
        margins = possible.max(-1) - possible[np.arange(len(possible)), output[: len(possible)]]
        if (far := np.flatnonzero(margins > limit * max(1.0, float(np.abs(logits).max())))).size:
            wrong.append(f"prompt {index} token {far[0]} by {margins[far[0]]:.2e}")
    yield _deviation("transformers_logits", worst, limit)
    yield Check("transformers_greedy_tokens", len(wrong), 0, ", ".join(wrong))


def load_transformers(checkpoint: Path) -> Any:
    """The checkpoint as a Transformers model in fp32.

    A directory is read by Transformers itself. A GGUF file or a quantised checkpoint is read by us (Transformers would
    need more packages, and kernels that most machines have not), so there only the model is independent, not the
    dequantisation.

    Raises:
        UsageError: Transformers is not installed or cannot load it. CheckpointError: what is read by us cannot be.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UsageError(f"comparing with Transformers needs it: pip install transformers ({error})") from None
    from specexport.exporter.checkpoint import open_checkpoint

    logs: Any = transformers.utils.logging
    logs.disable_progress_bar()
    try:
        source = open_checkpoint(str(checkpoint))
        if source.quantization is None and source.kind == "hf":
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                checkpoint, dtype=torch.float32, local_files_only=True, trust_remote_code=False
            )
        else:
            model = _from_source(source)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"Transformers cannot load {checkpoint}: {str(error).splitlines()[0]}") from None
    return model.eval()


def _from_source(source: Checkpoint) -> Any:
    import torch
    import transformers

    plain = {key: value for key, value in source.config.items() if key not in QUANTIZATION_KEYS}
    config = transformers.AutoConfig.for_model(**plain)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    state = model.state_dict()  # strict by hand, one tensor at a time: the model is in memory once
    names = set(source.weights.names())
    if missing := sorted(set(state) - names - ({"lm_head.weight"} if config.tie_word_embeddings else set())):
        raise UsageError(f"Transformers' model has {missing[0]}, which {source.source} has not")
    with torch.no_grad():
        for name in names:
            state[name].copy_(source.weights.read(name))
    return model
