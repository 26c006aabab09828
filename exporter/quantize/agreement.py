"""How good a quantised target still is: perplexity on a text, and agreement with the unquantised model on it.

Both are teacher-forced: every position is judged after the text's own tokens. The bundle runs as it is (its engine,
its graph, its cache); the reference is the checkpoint in float32 (:mod:`specexport.exporter.quantize.layerwise`) or
another bundle. Rows of logits are compared a few at a time, so memory does not follow the length of the text.

Perplexity follows Transformers' guide to fixed-length models: ``exp`` of the mean negative log-likelihood in nats per
token. Windows do not overlap unless asked to, as in the papers on quantisation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specexport.exporter.quantize.text import Window
from specexport.runtime.engine import Step, TargetEngine

#: Scored tokens unless told otherwise: about a minute for SmolLM2-135M on two cores, reference included.
DEFAULT_TOKENS = 4096
#: Tokens a window unless told otherwise, at most the bundle's cache slots.
DEFAULT_WINDOW = 1024
#: Logits that are looked at at once.
_VALUES = 1 << 23

Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of two models on one text, position by position.

    Attributes:
        reference_perplexity: of the reference. kl: mean Kullback-Leibler divergence from the reference's distribution
            to the other's, in nats. kl_99: its 99th percentile. top1: share of positions at which both prefer the same
            token.
    """

    reference_perplexity: float
    kl: float
    kl_99: float
    top1: float


@dataclass(frozen=True, slots=True)
class Quality:
    """Scored ``tokens``, their perplexity, and the agreement with a reference if there was one."""

    tokens: int
    perplexity: float
    agreement: Agreement | None

    def to_dict(self) -> dict[str, Any]:
        """Stable JSON; what is not finite is null."""
        record = {"tokens": self.tokens, "perplexity": self.perplexity}
        record |= {"perplexity_ratio": None} | dict.fromkeys(Agreement.__slots__)
        if self.agreement is not None:
            record |= asdict(self.agreement)
            record["perplexity_ratio"] = self.perplexity / self.agreement.reference_perplexity
        return {name: value if value is not None and math.isfinite(value) else None for name, value in record.items()}


def rows_at_once(vocab: int, chunk: int) -> int:
    """Positions of which logits are made in one call. ``chunk``: the bundle's prefill chunk."""
    return max(1, min(chunk, _VALUES // vocab))


def chunks(window: Window, rows: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, first) of each call: the positions it is given, and the first whose logits are wanted."""
    end = len(window.tokens) - 1  # what follows the last token is not in the text
    for start in range(0, end, rows):
        stop = min(start + rows, end)
        yield start, stop, min(max(start, window.first - 1), stop)


def engine_rows(engine: TargetEngine, windows: Sequence[Window], rows: int) -> Iterator[Rows]:
    """Logits [n, V] of every scored position of an engine, in order; views that the next one overwrites."""
    for window in windows:
        tokens = np.array(window.tokens, np.int64)
        for start, stop, first in chunks(window, rows):
            select = range(min(first, stop - 1) - start, stop - start)  # one row at least, wanted or not
            found = engine.run(Step.chain(tokens[start:stop], start, select))
            if first < stop:
                yield found


def compare(windows: Sequence[Window], rows: int, found: Iterator[Rows], reference: Iterator[Rows] | None) -> Quality:
    """Perplexity of ``found``, and its agreement with ``reference``: both as :func:`engine_rows` gives them."""
    loss = other_loss = same = 0.0
    divergences = []
    for targets in _targets(windows, rows):
        logits, at = next(found), np.arange(len(targets))
        best = logits.argmax(1)
        mine = _log_softmax(logits)
        loss -= float(mine[at, targets].sum(dtype=np.float64))
        if reference is None:
            continue
        wanted = next(reference)
        same += float((wanted.argmax(1) == best).sum())
        theirs = _log_softmax(wanted)
        other_loss -= float(theirs[at, targets].sum(dtype=np.float64))
        np.subtract(theirs, mine, out=mine)
        mine *= np.exp(theirs, out=theirs)
        divergences.append(mine.sum(1, dtype=np.float64))
    tokens = sum(window.scored for window in windows)
    agreement = None
    if reference is not None:
        kl = np.concatenate(divergences)
        agreement = Agreement(_exp(other_loss / tokens), float(kl.mean()), float(np.quantile(kl, 0.99)), same / tokens)
    return Quality(tokens, _exp(loss / tokens), agreement)


def _targets(windows: Sequence[Window], rows: int) -> Iterator[NDArray[np.int64]]:
    """The tokens that follow the positions of each chunk of logits."""
    for window in windows:
        tokens = np.array(window.tokens, np.int64)
        yield from (tokens[first + 1 : stop + 1] for _, stop, first in chunks(window, rows) if first < stop)


def _log_softmax(logits: Rows) -> Rows:
    """Of each row, as a new array."""
    shifted: Rows = logits - logits.max(1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(1, dtype=np.float64, keepdims=True)).astype(np.float32)
    return shifted


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
