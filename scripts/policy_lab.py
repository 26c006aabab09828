"""Compare policies over recorded answers, with the time of every step from a measured cost curve: no noise.

    python scripts/policy_lab.py record BUNDLE --suite question.jsonl.gz --count 10 -o answers.jsonl
    python scripts/policy_lab.py compare answers.jsonl --costs BUNDLE/profiles/MACHINE.json [--chains]
    python scripts/policy_lab.py compare answers.jsonl --costs .. --learned --noise 0.2 --fresh --bundle BUNDLE

``record`` answers prompts plainly and asks every head of the bundle at every token; it goes on where it was stopped.
``compare`` runs ``auto`` and every fixed policy (each drafter at each width) along those answers and shows, by task,
the median speedup over plain decoding in the decode phase and how ``auto`` stands to the best fixed policy. One drafter
lives through all answers, as in a server. Drafting costs what ``tune`` measured; the time that the controller itself
takes is measured while it runs and added. ``--learned``: it does not know the curve but learns it from the steps, and
with ``--noise`` from what a machine that others use too would show it; compared are the true times all the same.
``--fresh``: every answer has drafters of its own, whatever the policy, as in a process that answers once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from math import exp
from pathlib import Path
from random import Random
from statistics import median
from time import process_time

from specexport.engines.ort import grows_trees, runs_kernels
from specexport.exporter.bench.replay import Recorded, RecordedHead, Step, read_recorded, record, replay
from specexport.exporter.bench.suites import SuitePrompt, read_suite
from specexport.exporter.progress import Progress
from specexport.runtime import Bundle, SamplingParams, Session
from specexport.runtime.auto import MAX_NODES, beside_lookups, recycling_joins, tuned_priors
from specexport.runtime.bundle import TARGET_GRAPH
from specexport.runtime.controller import Controller
from specexport.runtime.costs import LearnedCosts
from specexport.runtime.device_profile import DeviceProfile, MeasuredCosts
from specexport.runtime.drafters import DRAFTERS, Drafter, make_drafter
from specexport.runtime.engine import find_engine
from specexport.runtime.expected import Expected
from specexport.runtime.records import parse_json, read_record
from specexport.runtime.session import find_drafter

WIDTHS = (2, 3, 4, 5, 6, 8, 12, 16)
#: V of rows of logits; ids are below it.
VOCABULARY = 1 << 18
#: How much of a machine's mood is left a call later.
_WANDER = 0.97


def record_answers(arguments: argparse.Namespace) -> None:
    bundle = Bundle.load(arguments.bundle)
    engine = find_engine(bundle.manifest.engine)(bundle.path, threads=arguments.threads)
    session = Session(bundle, drafter="none", engine=engine)
    found = [find_drafter(bundle, info.name, engine) for info in bundle.manifest.drafters if info.graph is not None]
    heads = [head for head in found if head is not None]
    by_task: dict[str, list[SuitePrompt]] = {}
    for prompt in read_suite(arguments.suite, count=arguments.count):
        by_task.setdefault(prompt.task, []).append(prompt)
    # A run that is cut short has something of every task.
    most = max(map(len, by_task.values()))
    mixed = [mine[place] for place in range(most) for mine in by_task.values() if place < len(mine)]
    done = len(arguments.output.read_text().splitlines()) if arguments.output.exists() else 0
    with arguments.output.open("a") as file, Progress().stage("record", len(mixed)) as stage:
        for number, prompt in enumerate(mixed):
            stage.advance()
            if number < done:
                continue
            tokens = session.encode(prompt.text, chat=bundle.chat_template is not None)
            tokens = tokens[: bundle.manifest.target.slots - arguments.max_tokens]
            params = SamplingParams(temperature=arguments.temperature, max_tokens=arguments.max_tokens, seed=number)
            answer = record(bundle.manifest, engine, heads, tokens, params, prompt.task)
            file.write(answer.to_json() + "\n")
            file.flush()


class Mood:
    """How much longer than it should a machine takes for each call: a factor that jitters and wanders.

    Args:
        spread: standard deviation of the logarithm of either.
    """

    def __init__(self, spread: float) -> None:
        self._spread, self._random, self._drift = spread, Random(0), 0.0

    def factor(self) -> float:
        """Of the next call."""
        self._drift = _WANDER * self._drift + (1 - _WANDER**2) ** 0.5 * self._random.gauss(0.0, self._spread)
        return exp(self._drift + self._random.gauss(0.0, self._spread))


class ToldDrafts(LearnedCosts):
    """Learns steps from what it is told, and drafts from what they cost on the machine that was tuned, in its mood."""

    def __init__(self, costs: MeasuredCosts, mood: Mood, expected: Expected) -> None:
        super().__init__(expected.node_share, expected.draft_shares, expected.row_share)
        self._true, self._mood = costs, mood

    def observe_draft(self, name: str, seconds: float, behind: int = 0) -> None:
        super().observe_draft(name, self._true.draft_s(name, behind) * self._mood.factor(), behind)


def expected_of(bundle: Bundle) -> Expected:
    """What a session of this bundle begins with on this machine's CPU if it is not tuned."""
    path = bundle.path
    return Expected.of(bundle, kernels=runs_kernels(path, TARGET_GRAPH), grown=partial(grows_trees, path))


class Lab:
    """Answers, and what steps and drafts cost.

    Args:
        fresh: no drafter sees more than one answer.
    """

    def __init__(
        self,
        answers: Sequence[Recorded],
        profile: DeviceProfile,
        chains: bool,
        spread: float,
        expected: Expected,
        fresh: bool,
    ) -> None:
        self.answers, self.profile, self.chains, self.fresh = answers, profile, chains, fresh
        self.costs, self.mood, self.expected = MeasuredCosts(profile), Mood(spread), expected
        self.heads = sorted(answers[0].trees)

    def run(self, make: Callable[[], tuple[Drafter | None, list[RecordedHead]]], nodes: int) -> list[list[Step]]:
        """Steps of every answer; ``make`` makes a drafter and says which heads are in it."""
        runs, (drafter, heads) = [], make()
        for place, answer in enumerate(self.answers):
            if self.fresh and place:
                drafter, heads = make()
            runs.append(
                replay(
                    answer,
                    drafter,
                    heads,
                    nodes=nodes,
                    chains=self.chains,
                    vocab_size=VOCABULARY,
                    step_s=lambda width, used: self.costs.step_s(width, used) * self.mood.factor(),
                )
            )
        return runs

    def seconds(self, runs: Sequence[Sequence[Step]], more_s: float) -> list[float]:
        """Time of every answer; ``more_s`` is what each step costs beside target and heads."""
        return [
            sum(
                self.costs.step_s(step.nodes, step.used)
                + sum(self.costs.draft_s(*each) for each in step.asked.items())
                + more_s
                for step in steps
            )
            for steps in runs
        ]

    def fixed(self, name: str, nodes: int) -> list[float]:
        """Seconds of every answer with one drafter, or ``none``."""

        def make() -> tuple[Drafter | None, list[RecordedHead]]:
            heads = [self.head(name)] if name in self.heads else []
            return (heads[0] if heads else make_drafter(name, VOCABULARY)), heads

        return self.seconds(self.run(make, nodes), self.costs.draft_s(name) if name in DRAFTERS else 0.0)

    def head(self, name: str) -> RecordedHead:
        """One that has to catch up if that was seen to cost anything."""
        known = self.profile.drafts.get(name)
        return RecordedHead(name, lags=known is None or known.row_s > 0.0)

    def auto(self, learned: bool) -> tuple[list[list[Step]], float]:
        """Steps of every answer with the controller, and the seconds that it takes itself for each."""
        begun = process_time()
        runs = self.run(lambda: self.controller(learned), MAX_NODES)
        return runs, (process_time() - begun) / sum(map(len, runs))

    def controller(self, learned: bool) -> tuple[Controller, list[RecordedHead]]:
        """One that knows nothing yet, and its heads."""
        names = ["suffix", *(["recycling"] if not learned and recycling_joins(self.profile) else [])]
        lookups = [drafter for name in names if (drafter := make_drafter(name, VOCABULARY))]
        heads = [self.head(name) for name in self.heads]
        costs = ToldDrafts(self.costs, self.mood, self.expected) if learned else self.costs
        priors = beside_lookups(self.expected.priors if learned else tuned_priors(self.profile))
        return Controller(lookups, heads, costs, max_nodes=MAX_NODES, chains=self.chains, priors=priors), heads


def compare(arguments: argparse.Namespace) -> None:
    profile = read_record(DeviceProfile, parse_json(arguments.costs.read_bytes()))
    answers = [answer for path in arguments.answers for answer in read_recorded(path) if len(answer.answer) >= 8]
    if not arguments.mixed:
        answers.sort(key=lambda answer: answer.task)
    lab = Lab(
        answers,
        profile,
        arguments.chains or profile.chains,
        arguments.noise,
        Expected() if arguments.bundle is None else expected_of(Bundle.load(arguments.bundle)),
        arguments.fresh,
    )
    plain = lab.fixed("none", 1)
    policies = {(name, nodes): lab.fixed(name, nodes) for name in [*DRAFTERS, *lab.heads] for nodes in WIDTHS}
    runs, own_s = lab.auto(arguments.learned)
    auto = lab.seconds(runs, own_s)
    print(f"auto's own time: {1e3 * own_s:.2f} ms a step")
    print(
        f"{'task':>15} {'n':>3}  auto  tau  best fixed          of it   {' '.join(f'{name:>9}' for name in lab.heads)}"
    )
    tasks = list(dict.fromkeys(answer.task for answer in answers))
    for task in [*tasks, None]:
        mine = [place for place, answer in enumerate(answers) if task in (None, answer.task)]

        def speedup(seconds: Sequence[float], mine: list[int] = mine) -> float:
            return median(plain[place] / seconds[place] for place in mine)

        best = max(policies, key=lambda policy: speedup(policies[policy]))
        fixed = max(1.0, speedup(policies[best]))
        steps = [step for place in mine for step in runs[place]]
        asked = " ".join(f"{sum(name in step.asked for step in steps) / len(steps):>8.0%}" for name in lab.heads)
        print(
            f"{task or 'all':>15} {len(mine):>3} {speedup(auto):5.2f} {sum(s.emitted for s in steps) / len(steps):4.2f}"
            f"  {best[0] + ' ' + str(best[1]):<14} {fixed:5.2f} {speedup(auto) / fixed:5.3f}  asked {asked}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("record")
    verb.set_defaults(run=record_answers)
    verb.add_argument("bundle", type=Path)
    verb.add_argument("--suite", type=Path, required=True)
    verb.add_argument("--count", type=int, default=10, help="Prompts of each task.")
    verb.add_argument("--max-tokens", type=int, default=128)
    verb.add_argument("--temperature", type=float, default=0.0)
    verb.add_argument("--threads", type=int, default=0)
    verb.add_argument("--output", "-o", type=Path, required=True)
    verb = verbs.add_parser("compare")
    verb.set_defaults(run=compare)
    verb.add_argument("answers", type=Path, nargs="+")
    verb.add_argument("--costs", type=Path, required=True, help="profiles/MACHINE.json that tune wrote.")
    verb.add_argument("--chains", action="store_true", help="Verify chains only.")
    verb.add_argument("--learned", action="store_true", help="The controller learns the costs of steps.")
    verb.add_argument(
        "--noise", type=float, default=0.0, help="Of what it is told: standard deviation of the logarithm."
    )
    verb.add_argument("--bundle", type=Path, help="With --learned: what it says of its heads is known beforehand.")
    verb.add_argument("--fresh", action="store_true", help="Drafters of its own for every answer.")
    verb.add_argument("--mixed", action="store_true", help="Tasks in turn instead of one after the other.")
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
