"""From a row of logits to a token: a pure function of (row, token history, parameters, absolute position).

Steps, in order:

1. ``logit_bias`` is added.
2. Repetition penalty over prompt and output (Hugging Face / CTRL, Keskar et al. 2019): a positive logit is divided
   by it, another multiplied.
3. Presence and frequency penalty over the output only (OpenAI): ``logit -= presence + frequency * count``.
4. While fewer than ``min_tokens`` tokens were pushed, the stop ids get -inf.
5. Temperature 0 ends here: the highest logit, on a tie the lowest id. Else ``d(x) = (logit(x) - best) / temperature``.
6. ``top_k``: the k highest; of equal ones the lower ids.
7. ``top_p`` (Holtzman et al. 2019): of those, in that order, the shortest prefix whose mass reaches ``top_p`` of the
   total ``sum exp(d)``.
8. ``min_p``: of those, ``d(x) >= log(min_p)``, that is p(x) >= min_p * p(best).
9. The token with the highest ``d(x) + G(seed, position, x)``, on a tie the lowest id
   (:mod:`specexport.runtime.gumbel`).

Steps 1 to 3 compute in double and round to float32 each; 5 to 9 are in double. A logit of -inf is never picked, nor is
a row at or above ``valid_vocab`` (padding). Nothing here depends on how a result was found: what is skipped
(tokens too far below the best for any noise to lift, tail mass known well enough) could not have changed it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specexport.runtime import gumbel
from specexport.runtime.errors import SpecExportError, UsageError
from specexport.runtime.histogram import Histogram
from specexport.runtime.ranking import highest, nucleus, winner
from specexport.runtime.summary import FloatRow, LazyRow, Row, whole
from specexport.runtime.summary import pick as pick_of_summary

Float64Array = NDArray[np.float64]
IntArray = NDArray[np.int64]
Mask = NDArray[np.bool_]

#: Tokens further below the best than this (in units of d) can never win: their best noise meets its worst.
_HOPELESS = gumbel.G_MAX - gumbel.G_MIN
#: Guesses, tried in turn, of how far below the best (in d) the kept tokens lie.
_REACHES = (3.0, 5.0, 7.0, 9.0, 11.0, 14.0, 18.0, math.inf)
#: Relative error allowed for a float32 sum of exponentials; twice what rounding can reach where the tail matters.
_TAIL_ERROR = 2e-5
#: A band of at most this many tokens is sorted; a wider one is halved first, at most so often.
_SORTABLE, _BISECTIONS = 1024, 16
MAX_LOGPROBS = 100

_LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are picked. The default is greedy.

    Attributes:
        temperature: 0 is greedy, else 1e-4 to 100. top_k: tokens kept, 0 keeps all. top_p: mass kept, (0, 1].
        min_p: least probability kept relative to the best token's, [0, 1].
        repetition_penalty: (0, 100], over prompt and output. presence_penalty, frequency_penalty: [-2, 2], over the
            output. logit_bias: added to the logit of a token id; -inf bans it.
        seed: 64-bit key of the noise. logprobs: also report this many best tokens (0: only the chosen one; None: off).
        min_tokens: no stop before this many tokens. max_tokens: most tokens of the output.

    Raises:
        UsageError: a value is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int = 0
    logprobs: int | None = None
    min_tokens: int = 0
    max_tokens: int = 256

    def __post_init__(self) -> None:
        def need(name: str, holds: bool, expected: str) -> None:
            if not holds:
                raise UsageError(f"{name} must be {expected}, got {getattr(self, name)!r}")

        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            need(name, _is_number(getattr(self, name)), "a finite number")
        for name in ("top_k", "seed", "min_tokens", "max_tokens"):
            need(name, _is_integer(getattr(self, name)), "an integer")
        need("temperature", self.temperature == 0 or 1e-4 <= self.temperature <= 100, "0 (greedy) or 0.0001 to 100")
        need("top_k", self.top_k >= 0, "0 (off) or more")
        need("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (off)")
        need("min_p", 0 <= self.min_p <= 1, "0 (off) to 1")
        need("repetition_penalty", 0 < self.repetition_penalty <= 100, "above 0 and at most 100 (1 is off)")
        for name in ("presence_penalty", "frequency_penalty"):
            need(name, -2 <= getattr(self, name) <= 2, "-2 to 2 (0 is off)")
        need("seed", 0 <= self.seed < 1 << 64, "0 to 2**64 - 1")
        wanted = self.logprobs
        need(
            "logprobs", wanted is None or (_is_integer(wanted) and 0 <= wanted <= MAX_LOGPROBS), f"0 to {MAX_LOGPROBS}"
        )
        need("max_tokens", self.max_tokens >= 1, "1 or more")
        need("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"0 to max_tokens ({self.max_tokens})")
        need("logit_bias", isinstance(self.logit_bias, Mapping), "a mapping from token id to bias")
        for token, bias in self.logit_bias.items():
            if not _is_integer(token) or token < 0:
                raise UsageError(f"logit_bias: token ids must be integers of 0 or more, got {token!r}")
            if not (_is_number(bias) and abs(bias) <= 1e6) and bias != -math.inf:
                raise UsageError(f"logit_bias of token {token} must be -1e6 to 1e6, or -inf, got {bias!r}")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))


class Sampler:
    """Picks the tokens of one sequence; it knows the history, the caller knows the logits.

    Args:
        params: how to pick. vocab_size: V, the width of a row. valid_vocab: rows at or above it are padding (None: V).
        stop_ids: ids that ``min_tokens`` forbids.

    Raises:
        UsageError: an id of ``logit_bias`` or ``stop_ids`` is outside the vocabulary.
    """

    def __init__(
        self, params: SamplingParams, vocab_size: int, valid_vocab: int | None = None, stop_ids: Iterable[int] = ()
    ) -> None:
        self.params = params
        self._vocab_size = vocab_size
        self._valid = vocab_size if valid_vocab is None else valid_vocab
        if not 0 < self._valid <= vocab_size:
            raise UsageError(f"valid_vocab must be 1 to {vocab_size} (the width of the logits), got {valid_vocab}")
        stops = sorted(set(stop_ids))
        for name, ids in (("logit_bias", sorted(params.logit_bias)), ("stop_ids", stops)):
            if ids and not (ids[0] >= 0 and ids[-1] < self._valid):
                wrong = next(token for token in ids if not 0 <= token < self._valid)
                raise UsageError(f"{name}: token id {wrong} is outside the vocabulary of {self._valid} tokens")
        self._stops = np.array(stops, np.int64)
        self._bias_ids = np.array(sorted(params.logit_bias), np.int64)
        self._bias = np.array([params.logit_bias[int(token)] for token in self._bias_ids], np.float64)
        self._truncates = params.top_p < 1 or 0 < params.top_k < self._valid
        self._repeats = params.repetition_penalty != 1
        self._counts = params.presence_penalty != 0 or params.frequency_penalty != 0
        self._all = Histogram()
        self._output = Histogram()
        self._generated = 0
        self._row = np.empty(self._valid, np.float32)
        if params.temperature > 0:
            self._mask = np.empty(self._valid, np.bool_)
            self._strides = gumbel.token_strides(np.arange(self._valid, dtype=np.int64))
            self._exp = np.empty(self._valid, np.float32)
            self._bits = np.empty(self._valid, np.uint64)
            self._scratch = np.empty(self._valid, np.uint64)

    def begin(self, prompt_tokens: Sequence[int]) -> None:
        """A new sequence: forget the history, take the prompt into it."""
        self._all, self._output, self._generated = Histogram(), Histogram(), 0
        if self._repeats:
            for token in prompt_tokens:
                self._all.add(token)

    def push(self, token: int) -> None:
        """``token`` was appended to the output. Whatever is picked next sees it in its history."""
        self._generated += 1
        if self._repeats:
            self._all.add(token)
        if self._counts:
            self._output.add(token)

    def pop(self, token: int) -> None:
        """Undo the latest ``push``, which was of ``token``."""
        self._generated -= 1
        if self._repeats:
            self._all.remove(token)
        if self._counts:
            self._output.remove(token)

    def pick(self, logits: Row, position: int) -> int:
        """The token at absolute ``position``, from the logits (float32 [V], not changed) of the position before it.

        A row on a device is fetched only if its summary does not decide.

        Raises:
            SpecExportError: the row holds NaN or +inf, or nothing in it can be picked.
        """
        if isinstance(logits, LazyRow) and logits.valid == self._valid and not self._changes:
            token = pick_of_summary(logits, self.params, position)
            if token is not None:
                return token
        row = self._processed(whole(logits))
        best, top = _best(row, position)
        if self.params.temperature == 0:
            return best
        if self._truncates:
            kept, d = self._truncated(row, top)
            key = gumbel.position_key(self.params.seed, position)
            return winner(kept, d + gumbel.noise_of_bits(gumbel.hash_strides(key, self._strides[kept])))[1]
        return self._race(row, top, position)

    def probs(self, logits: Row, position: int) -> Float64Array:
        """float64 [V]: what :meth:`pick` draws from, after steps 1 to 8; 0 for what it never picks, the sum is 1.

        Fails as :meth:`pick` does, and for that alone needs ``position``.
        """
        row = self._processed(whole(logits))
        best, top = _best(row, position)
        chances = np.zeros(self._vocab_size)
        if self.params.temperature == 0:
            chances[best] = 1
            return chances
        reach = -math.log(self.params.min_p) if self.params.min_p > 0 else math.inf
        kept, d = self._truncated(row, top) if self._truncates else self._within(row, top, reach)
        weights = np.exp(d)
        chances[kept] = weights / weights.sum()
        return chances

    def logprobs_of(self, logits: Row, token: int) -> tuple[float, list[tuple[int, float]]]:
        """Log-probability (natural log) of ``token`` and of the ``params.logprobs`` best tokens, best first.

        These are the model's own: the log-softmax of the raw row without its padding, before every processor and the
        temperature, so they compare across parameters.
        """
        row = whole(logits)[: self._valid].astype(np.float64)
        row -= row.max()
        row -= math.log(float(np.exp(row).sum()))
        wanted = min(self.params.logprobs or 0, self._valid)
        if not wanted:
            return float(row[token]), []
        least = np.partition(row, self._valid - wanted)[self._valid - wanted]
        ids = np.flatnonzero(row >= least)
        ids = ids[np.argsort(-row[ids], kind="stable")][:wanted]
        return float(row[token]), [(int(best), float(row[best])) for best in ids]

    @property
    def _holds_stops(self) -> bool:
        return self._generated < self.params.min_tokens and len(self._stops) > 0

    @property
    def _changes(self) -> bool:
        """Whether any of steps 1 to 4 applies."""
        return len(self._bias) > 0 or self._repeats or self._counts or self._holds_stops

    def _processed(self, logits: FloatRow) -> FloatRow:
        """Steps 1 to 4: the valid part of the row itself if none applies, else a scratch copy."""
        if logits.shape != (self._vocab_size,) or logits.dtype != np.float32:
            raise ValueError(f"expected float32 [{self._vocab_size}] logits, got {logits.dtype} {list(logits.shape)}")
        if not self._changes:
            return logits[: self._valid]
        row, params = self._row, self.params
        np.copyto(row, logits[: self._valid])
        with np.errstate(over="ignore"):
            if len(self._bias):
                row[self._bias_ids] = row[self._bias_ids] + self._bias
            if self._repeats:
                ids, _ = self._all.view()
                values = row[ids].astype(np.float64)
                row[ids] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
            if self._counts:
                ids, counts = self._output.view()
                row[ids] = row[ids] - (params.presence_penalty + params.frequency_penalty * counts)
        if self._holds_stops:
            row[self._stops] = -np.inf
        return row

    def _within(self, row: FloatRow, top: float, reach: float) -> tuple[IntArray, Float64Array]:
        """``(ids, d)`` of the tokens with ``-reach <= d`` and d finite, ids ascending."""
        # A float32 step or two below the bound: a superset; d itself decides.
        bound = top - reach * self.params.temperature
        bound = max(bound - abs(bound) * 1.2e-7 - 1e-37, _LOWEST)
        np.greater_equal(row, np.float32(bound), out=self._mask)
        ids = np.flatnonzero(self._mask)
        d = row[ids].astype(np.float64)
        d -= top
        d /= self.params.temperature
        if not len(d) or d.min() >= -reach:
            return ids, d
        near = d >= -reach
        return ids[near], d[near]

    def _truncated(self, row: FloatRow, top: float) -> tuple[IntArray, Float64Array]:
        """Steps 6 to 8: ``(ids, d)`` of the kept tokens, in any order."""
        if 0 < self.params.top_k < self._valid:
            for reach in _REACHES:
                ids, d = self._within(row, top, reach)
                if len(ids) >= self.params.top_k:
                    break
            ids, d = highest(ids, d, self.params.top_k)
            if self.params.top_p < 1:
                ids, d = nucleus(ids, d, self.params.top_p)
        else:
            ids, d = self._nucleus(row, top)
        if self.params.min_p > 0:
            likely = d >= math.log(self.params.min_p)
            ids, d = ids[likely], d[likely]
        return ids, d

    def _nucleus(self, row: FloatRow, top: float) -> tuple[IntArray, Float64Array]:
        """Step 7 on all tokens. Widens until the mass is reached and sorts the last band alone.

        The mass of the tail is a float32 sum with a bound on its error; where the bound leaves two answers possible,
        the search widens further, at last to the whole row in double.
        """
        with np.errstate(over="ignore"):  # a logit masked with the lowest float32 becomes -inf
            tail_of = np.subtract(row, np.float32(top), out=self._exp)
            tail_of *= np.float32(1 / self.params.temperature)
        np.exp(tail_of, out=tail_of)
        sure = -1.0  # every token with d >= -sure is kept: none yet
        for reach in _REACHES:
            ids, d = self._within(row, top, reach)
            weights = np.exp(d)
            total, doubt = float(weights.sum()), 0.0
            if reach < math.inf:
                tail_of[ids] = 0
                tail = float(tail_of.sum())
                head, total = total, total + tail
                doubt = _TAIL_ERROR * tail + 1e-12 * total
                if head < self.params.top_p * (total + doubt):
                    sure = reach if head < self.params.top_p * (total - doubt) else sure
                    continue
            goal = self.params.top_p * np.array([total - doubt, total + doubt])
            upper, band, base = _bisect(d, weights, sure, goal)
            order = band[np.argsort(-d[band], kind="stable")]
            mass = base + np.cumsum(weights[order])
            least, most = np.minimum(np.searchsorted(mass, goal), len(order) - 1)
            if least == most:
                break
        upper[order[: least + 1]] = True
        return ids[upper], d[upper]

    def _race(self, row: FloatRow, top: float, position: int) -> int:
        """Steps 8 and 9 without top_k and top_p: tokens near the best first, then those that could still beat them."""
        floor = max(-_HOPELESS, math.log(self.params.min_p) if self.params.min_p > 0 else -math.inf)
        near = min(-floor, 8.0)
        key = gumbel.position_key(self.params.seed, position)
        ids, d = self._within(row, top, near)
        best = winner(ids, d + gumbel.noise_of_bits(gumbel.hash_strides(key, self._strides[ids])))
        floor = max(floor, best[0] - gumbel.G_MAX - 1e-9)
        if floor >= -near:
            return best[1]
        # A token further down needs noise of at least the best score + near: few have it, and the integers tell.
        bits = gumbel.hash_strides(key, self._strides, self._bits, self._scratch)
        np.greater_equal(bits, np.uint64(gumbel.bits_reaching(best[0] + near - 1e-9)), out=self._mask)
        ids = np.flatnonzero(self._mask)
        d = (row[ids].astype(np.float64) - top) / self.params.temperature
        ids, d = ids[d >= floor], d[d >= floor]
        if len(ids):
            far = winner(ids, d + gumbel.noise_of_bits(bits[ids]))
            best = max(best, far, key=lambda scored: (scored[0], -scored[1]))
        return best[1]


def _best(row: FloatRow, position: int) -> tuple[int, float]:
    """The highest logit: ``(id, logit)``."""
    best = int(row.argmax())
    top = float(row[best])
    if not math.isfinite(top):
        raise SpecExportError(
            f"no token can be picked at position {position}: the highest logit is {top}; expected a finite number "
            "(a NaN or +inf comes from the engine: run `specexport verify`; -inf from a logit_bias that bans all)"
        )
    return best, top


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _bisect(d: Float64Array, weights: Float64Array, sure: float, goal: Float64Array) -> tuple[Mask, IntArray, float]:
    """``(upper, band, mass)``: tokens surely kept, the few where the mass passes ``goal``, mass of the former."""
    high, low = -sure, float(d.min())
    upper = d >= high
    band = np.flatnonzero(~upper)
    mass = float(weights[upper].sum())
    for _ in range(_BISECTIONS):
        if len(band) <= _SORTABLE:
            break
        middle = (high + low) / 2
        above = d[band] >= middle
        reached = mass + float(weights[band[above]].sum())
        if reached < goal[0] * (1 - 1e-12):
            upper[band[above]] = True
            high, mass, band = middle, reached, band[~above]
        elif reached >= goal[1] * (1 + 1e-12):
            low, band = middle, band[above]
        else:
            break
    return upper, band, mass
