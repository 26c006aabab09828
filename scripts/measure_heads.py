"""tau of trained heads: how many tokens a target call gives, by task, over the target's own answers.

The target answers every prompt once, in batches (float32, PyTorch). Each policy then drafts along that text with the
runtime's own drafters and the bundle's graphs: a call emits what the tree has right and one token more, which is
what the decoder does under the rule "match". So one set of answers serves every policy, and no policy waits for the
target. Answers are kept under --work, and prompts that were done are not done again; ``--answers-only`` stops there.

    python scripts/measure_heads.py MODEL question.jsonl.gz --heads eagle3=E --heads medusa=M --work DIR [--every 8]

Policies: every head, ``suffix`` alone, ``suffix|HEAD``: the suffix drafter where at least three tokens match, else the
head, and ``suffix+HEAD``: both trees joined as the runtime joins them, the surest nodes of both (each drafter's word
weighed by how often it came true in the prompts before). ``cut``: the same up to the first twelve tokens that the
answer had before (small greedy targets loop, which flatters everybody). Intervals: 95%, bootstrap over prompts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specexport.exporter.bench.replay import follow
from specexport.exporter.bench.suites import read_suite
from specexport.exporter.heads.detect import open_head
from specexport.exporter.pipeline import BuildOptions, build
from specexport.exporter.progress import Progress
from specexport.exporter.train.corpus import Corpus, Example, write_shard
from specexport.exporter.train.generate import Prompt, write_answers
from specexport.exporter.train.target import open_target
from specexport.runtime.bundle import Bundle
from specexport.runtime.calibration import Calibration
from specexport.runtime.drafters.base import Drafter, DraftRequest, FeatureDrafter, Observation
from specexport.runtime.drafters.suffix import SuffixDrafter
from specexport.runtime.engine import TargetEngine, find_engine
from specexport.runtime.merge import Draft, join
from specexport.runtime.session import find_drafter
from specexport.runtime.tree import Tree

LOOP = 12
TASKS = {
    name: "mt-bench"
    for name in ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
}


class Beside:
    """A head, and a suffix lookup that sees the same tokens."""

    def __init__(self, head: FeatureDrafter, lookup: SuffixDrafter, sign: str) -> None:
        self.head, self.lookup, self.name = head, lookup, f"{lookup.name}{sign}{head.name}"

    def absorb(self, first: int, tokens: Sequence[int], features: Any) -> None:
        self.head.absorb(first, tokens, features)

    def begin(self, tokens: Sequence[int], first: int) -> None:
        self.lookup.begin(tokens, first)
        self.head.begin(tokens, first)

    def observe(self, observation: Observation) -> None:
        self.lookup.observe(observation)
        self.head.observe(observation)


class LookupElse(Beside):
    """A long match is copied, otherwise a head is asked."""

    def __init__(self, head: FeatureDrafter, vocab_size: int) -> None:
        super().__init__(head, SuffixDrafter(vocab_size, min_match=3), "|")

    def propose(self, request: DraftRequest) -> Tree:
        found = self.lookup.propose(request)
        return found if len(found) > 1 else self.head.propose(request)


class Merged(Beside):
    """A copy and a head's tree in one, cut to the nodes that are surest."""

    def __init__(self, head: FeatureDrafter, vocab_size: int) -> None:
        super().__init__(head, SuffixDrafter(vocab_size), "+")
        self.calibrations = (Calibration(), Calibration())
        self.proposed: tuple[Tree, ...] = ()

    def propose(self, request: DraftRequest) -> Tree:
        self.proposed = (self.lookup.propose(request), self.head.propose(request))
        drafts = [
            Draft(tree, calibration.chances(tree))
            for tree, calibration in zip(self.proposed, self.calibrations, strict=True)
        ]
        return join(drafts, request.root, request.max_depth).tree(request.max_nodes)

    def observe(self, observation: Observation) -> None:
        for tree, calibration in zip(self.proposed, self.calibrations, strict=False):  # none before a last token
            calibration.learn(tree, observation.emitted)
        self.proposed = ()
        super().observe(observation)


def replay(drafter: Drafter, prompt: list[int], answer: list[int], features: Any, nodes: int) -> list[int]:
    """Tokens of each call that the decoder would make along ``answer``."""

    def no_logits(_: int) -> Any:
        raise IndexError

    reads = isinstance(drafter, FeatureDrafter)
    past, done, calls = len(prompt), 1, []
    if reads:
        drafter.absorb(0, prompt, features[:past])
    drafter.begin(prompt, answer[0])
    while done < len(answer):
        left = len(answer) - done
        root = answer[done - 1]
        tree = Tree.chain([root])
        if left > 1:
            tree = drafter.propose(DraftRequest(root, nodes, left - 1)).pruned(nodes)
        path, emitted = follow(tree, answer[done:])
        if reads:
            drafter.absorb(past, tree.tokens[path].tolist(), features[past : past + len(path)])
        drafter.observe(Observation(emitted, tree, path, no_logits))
        calls.append(len(emitted))
        done, past = done + len(emitted), past + len(path)
    return calls


def first_repeat(answer: Sequence[int]) -> int:
    """Tokens before the answer first repeats :data:`LOOP` tokens of its own."""
    seen: dict[tuple[int, ...], int] = {}
    for end in range(LOOP, len(answer) + 1):
        gram = tuple(answer[end - LOOP : end])
        if gram in seen:
            return end - LOOP
        seen[gram] = end
    return len(answer)


def answers(
    arguments: argparse.Namespace, captures: tuple[Any, ...], done: set[int]
) -> Iterator[tuple[int, str, Example]]:
    """(number, task, example) of the prompts that are left, batch by batch."""
    progress = Progress()
    opened = open_target(arguments.model, progress, dtype=torch.float32)
    prompts = list(enumerate(read_suite(arguments.prompts)))[:: arguments.every]
    store = arguments.work / f"answers-t{arguments.temperature:g}"
    store.mkdir(exist_ok=True)
    left = []
    for number, prompt in prompts:
        tokens = tuple(opened.chat.encode([{"role": "user", "content": prompt.text}]))
        if number in done or len(tokens) + arguments.max_tokens > arguments.window:
            continue
        task, kept = TASKS.get(prompt.task, prompt.task), store / f"{number:05}"
        if (kept / "0.safetensors").exists():
            yield number, task, Corpus(kept)[0]
        else:
            left.append((number, task, tokens))
    left.sort(key=lambda entry: len(entry[2]))
    if not left:
        return
    opened = replace(opened, captures=captures)
    model = opened.model(arguments.window)
    for begin in range(0, len(left), arguments.batch):
        part = left[begin : begin + arguments.batch]
        found = write_answers(
            model,
            [Prompt(tokens, arguments.temperature) for _, _, tokens in part],
            max_tokens=arguments.max_tokens,
            stop_ids=opened.chat.files.stop_ids,
            valid_vocab=opened.chat.files.vocab_size,
            seed=begin,
        )
        for (number, task, _), example in zip(part, found, strict=True):
            folder = store / f"{number:05}"
            folder.mkdir(exist_ok=True)
            write_shard(folder / "0.safetensors", [example], torch.float32)
            yield number, task, example


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--heads", action="append", required=True, metavar="NAME=DIR")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1, help="Every K-th prompt.")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--nodes", type=int, default=16, help="Of a tree, the root included.")
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--answers-only", action="store_true")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    captures = tuple(
        dict.fromkeys(c for heads in arguments.heads for c in open_record(arguments.model, heads.split("=", 1)[1]))
    )
    if arguments.answers_only:
        for _ in answers(arguments, captures, set()):
            pass
        return
    bundle = bundle_of(arguments)
    results = arguments.work / f"t{arguments.temperature:g}-n{arguments.nodes}.jsonl"
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    engine = find_engine(bundle.manifest.engine)(bundle.path, threads=0)
    valid = bundle.manifest.target.valid_vocab
    policies: dict[str, Drafter] = {"suffix": SuffixDrafter(valid)}
    for heads in arguments.heads:
        name = heads.split("=", 1)[0]
        alone, behind, joined = (_head(bundle, name, engine) for _ in range(3))
        policies |= {name: alone, f"suffix|{name}": LookupElse(behind, valid), f"suffix+{name}": Merged(joined, valid)}
    done = {line["prompt"] for line in lines}
    with results.open("a") as file, torch.no_grad():
        for number, task, example in answers(arguments, captures, done):
            begin = int(example.learn.nonzero()[0])
            prompt, answer = example.tokens[:begin].tolist(), example.tokens[begin:].tolist()
            features = example.features.numpy()
            line = {"prompt": number, "task": task, "tokens": len(answer), "cut": first_repeat(answer)}
            line["calls"] = {
                name: replay(drafter, prompt, answer, features, arguments.nodes) for name, drafter in policies.items()
            }
            lines.append(line)
            file.write(json.dumps(line) + "\n")
            file.flush()
    show(lines, arguments)


def _head(bundle: Bundle, name: str, engine: TargetEngine) -> FeatureDrafter:
    head = find_drafter(bundle, name, engine)
    assert isinstance(head, FeatureDrafter)
    return head


def bundle_of(arguments: argparse.Namespace) -> Bundle:
    """The bundle of these heads, built once."""
    path = arguments.work / "bundle"
    if not (path / "manifest.json").exists():
        from specexport.exporter.heads.build import DraftOptions

        draft = DraftOptions(depth=arguments.depth, nodes=arguments.nodes - 1)
        options = BuildOptions(
            source=arguments.model,
            output=path,
            heads=tuple(arguments.heads),
            window=arguments.window,
            draft=draft,
        )
        build(options, Progress())
    return Bundle.load(path)


def open_record(model: str, heads: str) -> tuple[Any, ...]:
    """What a head reads."""
    from specexport.exporter.checkpoint import open_checkpoint
    from specexport.exporter.config import read_config

    return open_head(heads, target=read_config(open_checkpoint(model).config)).record.captures


def tau(lines: Sequence[dict[str, Any]], policy: str, cut: bool) -> tuple[float, float, float]:
    """tau with the ends of its interval."""
    pairs = []
    for line in lines:
        tokens, calls = 0, 0
        for size in line["calls"][policy]:
            if cut and 1 + tokens >= line["cut"]:
                break
            tokens, calls = tokens + size, calls + 1
        pairs.append((tokens, calls))
    counts = np.array(pairs, np.float64)
    draws = np.random.default_rng(0).integers(0, len(counts), (2000, len(counts)))
    sums = counts[draws].sum(1)
    low, high = np.quantile(sums[:, 0] / np.maximum(sums[:, 1], 1), [0.025, 0.975])
    total = counts.sum(0)
    return float(total[0] / max(total[1], 1)), float(low), float(high)


def show(lines: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> None:
    print(
        f"{len(lines)} prompts, temperature {arguments.temperature:g}, {arguments.max_tokens} tokens, trees of "
        f"{arguments.nodes} nodes, {sum(line['cut'] < line['tokens'] for line in lines)} answers loop"
    )
    for cut in (False, True):
        print("\nup to the first repeat" if cut else "\nwhole answers")
        for task in [*sorted({line["task"] for line in lines}), None]:
            chosen = [line for line in lines if task in (None, line["task"])]
            figures = {name: tau(chosen, name, cut) for name in chosen[0]["calls"]}
            shown = "  ".join(f"{name} {t:.2f} ({low:.2f}-{high:.2f})" for name, (t, low, high) in figures.items())
            print(f"{task or 'all':>15} {len(chosen):>4}  {shown}")


if __name__ == "__main__":
    main()
