"""Plain and speculative decoding of the same prompts, interleaved in one process on one engine."""

from __future__ import annotations

import statistics as stats
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np

from specexport.exporter.bench.suites import SuitePrompt
from specexport.runtime.bundle import Bundle
from specexport.runtime.drafters import NO_DRAFTER
from specexport.runtime.engine import TargetEngine
from specexport.runtime.sampling import SamplingParams
from specexport.runtime.session import Session

#: The policy that everything is compared with.
PLAIN = "plain"
#: Tokens generated, and thrown away, before anything is timed: first calls allocate.
_WARM_UP = 8


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer. Times are seconds.

    Attributes:
        prompt: its number. repetition: from 0. seconds: from the call to the last token, prefill included.
        token_s: of each token after the first: the time since the block before, divided evenly over the tokens that
            came at once.
        identical: the tokens are those of the plain answer.
    """

    prompt: int
    task: str
    policy: str
    repetition: int
    prompt_tokens: int
    tokens: int
    seconds: float
    first_token_s: float
    decode_s: float
    target_calls: int
    host_share: float
    accepted: list[int]
    proposed: list[int]
    tree_sizes: dict[int, int]
    identical: bool = True
    token_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Settings:
    """What is run.

    Attributes:
        policies: drafters by name, compared with :data:`PLAIN`. max_nodes: widest tree; None: the drafter's own.
        threads: of the engine, to find what was tuned for it.
    """

    policies: tuple[str, ...]
    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    repetitions: int = 1
    max_nodes: int | None = None
    threads: int = 0


def measure(
    bundle: Bundle,
    engine: TargetEngine,
    prompts: Sequence[SuitePrompt],
    settings: Settings,
    advance: Callable[[int], object] = lambda _: None,
) -> Iterator[Sample]:
    """Answer each prompt once a policy and repetition, in an order that rotates; the seed is the prompt's number.

    One session a policy lives through all prompts, as a server's would, so what adapts has time to; no answer reuses
    the cache of another. Prompts that leave no room for ``max_tokens`` are left out.
    """
    names = [PLAIN, *settings.policies]
    sessions = {
        name: Session(
            bundle,
            drafter=NO_DRAFTER if name == PLAIN else name,
            engine=engine,
            threads=settings.threads,
            max_nodes=settings.max_nodes,
        )
        for name in names
    }
    chat = bundle.chat_template is not None
    for session in sessions.values():
        session.generate(session.encode(prompts[0].text, chat=chat), SamplingParams(max_tokens=_WARM_UP))
    for repetition in range(settings.repetitions):
        for number, prompt in enumerate(prompts):
            advance(1)
            tokens = sessions[PLAIN].encode(prompt.text, chat=chat)
            if len(tokens) + settings.max_tokens > bundle.manifest.target.slots:
                continue
            params = SamplingParams(
                temperature=settings.temperature, top_p=settings.top_p, max_tokens=settings.max_tokens, seed=number
            )
            answers, samples = {}, []
            shift = (number + repetition) % len(names)
            for name in names[shift:] + names[:shift]:
                answers[name], sample = _answer(sessions[name], tokens, params, number, prompt.task, name, repetition)
                samples.append(sample)
            for sample in samples:
                yield replace(sample, identical=answers[sample.policy] == answers[PLAIN])


def _answer(
    session: Session, tokens: list[int], params: SamplingParams, number: int, task: str, policy: str, repetition: int
) -> tuple[list[int], Sample]:
    session.forget()
    arrivals: list[tuple[float, int]] = []
    result = None
    begun = perf_counter()
    for chunk in session.stream(tokens, params):
        arrivals.append((perf_counter(), len(chunk.token_ids)))
        result = chunk.result
    assert result is not None
    figures = result.statistics
    token_s: list[float] = []
    for (before, _), (now, count) in pairwise(arrival for arrival in arrivals if arrival[1]):  # a stop token shows none
        token_s += [(now - before) / count] * count
    share = figures.time_share
    return result.token_ids, Sample(
        prompt=number,
        task=task,
        policy=policy,
        repetition=repetition,
        prompt_tokens=len(tokens),
        tokens=figures.tokens,
        seconds=arrivals[-1][0] - begun,
        first_token_s=arrivals[0][0] - begun,
        decode_s=figures.decode_s,
        target_calls=figures.target_calls,
        host_share=share["host"],
        accepted=list(figures.accepted),
        proposed=list(figures.proposed),
        tree_sizes=dict(figures.tree_sizes),
        token_s=token_s,
    )


def summarise(samples: Sequence[Sample], policy: str) -> dict[str, Any]:
    """Figures of one policy against plain decoding, under their stable JSON names.

    ``speedup`` is the median over answers of plain time by speculative time, prefill included, with its quartiles;
    ``decode_speedup`` leaves the prefill out; rates are all tokens by all seconds.
    """
    plain = {(sample.prompt, sample.repetition): sample for sample in samples if sample.policy == PLAIN}
    mine = [sample for sample in samples if sample.policy == policy]
    pairs = [(plain[sample.prompt, sample.repetition], sample) for sample in mine]
    ratios = [base.seconds / sample.seconds for base, sample in pairs]
    decode = [base.decode_s / sample.decode_s for base, sample in pairs if sample.decode_s > 0 and base.decode_s > 0]
    gaps = [gap for sample in mine for gap in sample.token_s]
    calls = sum(sample.target_calls for sample in mine)
    depths = range(max((len(sample.proposed) for sample in mine), default=0))
    proposed = [sum(sample.proposed[d] for sample in mine if d < len(sample.proposed)) for d in depths]
    accepted = [sum(sample.accepted[d] for sample in mine if d < len(sample.accepted)) for d in depths]
    return {
        "answers": len(mine),
        "plain_tokens_per_second": _rate([base for base, _ in pairs]),
        "speculative_tokens_per_second": _rate(mine),
        "speedup": stats.median(ratios),
        "speedup_quartiles": np.quantile(ratios, [0.25, 0.75]).tolist(),
        "decode_speedup": stats.median(decode) if decode else None,
        "tau": sum(sample.tokens - 1 for sample in mine) / calls if calls else 0.0,
        "time_to_first_token_s": stats.median(sample.first_token_s for sample in mine),
        "token_p50_s": float(np.quantile(gaps, 0.5)) if gaps else None,
        "token_p99_s": float(np.quantile(gaps, 0.99)) if gaps else None,
        "host_share": stats.median(sample.host_share for sample in mine),
        "acceptance_by_depth": [hits / tries for hits, tries in zip(accepted, proposed, strict=True)],
        "tree_sizes": _sizes(mine),
        "tokens_identical": all(sample.identical for sample in mine),
        "identical_answers": sum(sample.identical for sample in mine),
    }


def _rate(samples: Sequence[Sample]) -> float:
    return sum(sample.tokens for sample in samples) / sum(sample.seconds for sample in samples)


def _sizes(samples: Sequence[Sample]) -> dict[str, int]:
    total: dict[int, int] = {}
    for sample in samples:
        for size, calls in sample.tree_sizes.items():
            total[size] = total.get(size, 0) + calls
    return {str(size): total[size] for size in sorted(total)}
