"""Making a corpus: rounds of prompts, each answered by the target and written as one shard, so a kill loses little.

A round takes its share of the user's data, has the target make up prompts, answers both, and lets some of those chats
go on for another turn. What a round does depends on the seed and its number alone.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from specexport.exporter.progress import Progress
from specexport.exporter.train.batch import BatchedTarget
from specexport.exporter.train.corpus import Example, open_directory, write_shard
from specexport.exporter.train.generate import Prompt, read_states, write_answers
from specexport.exporter.train.prompts import Chat, Item, Message, Openers, complete_turn
from specexport.runtime.errors import UsageError
from specexport.runtime.replacing import replace_text

#: Most tokens of a made-up turn.
TURN = 96


@dataclass(frozen=True, slots=True)
class MakeOptions:
    """How a corpus is made.

    Attributes:
        self_prompts: prompts that the target makes up, in all.
        max_prompt, max_answer: tokens; longer prompts are left out.
        sampled: share of the answers that is sampled at ``temperature``; the others are greedy.
        again: share of the answered chats that gets another turn.
        batch: sequences at once. round_size: prompts a round.
    """

    self_prompts: int = 0
    max_prompt: int = 1024
    max_answer: int = 160
    sampled: float = 0.2
    temperature: float = 0.8
    again: float = 0.15
    batch: int = 64
    round_size: int = 128
    seed: int = 0
    openers: Openers = field(default_factory=Openers)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A chat that waits for an answer."""

    messages: tuple[Message, ...]
    task: str
    prompt: Prompt


class Maker:
    """Makes the rounds of one corpus.

    Args:
        model: makes the target's module; called only if something is missing.
        items: the user's data. directory: of the corpus. identity: what else the corpus depends on (the target).
    """

    def __init__(
        self,
        model: Callable[[], BatchedTarget],
        chat: Chat,
        items: Sequence[Item],
        options: MakeOptions,
        directory: Path,
        identity: dict[str, Any],
    ) -> None:
        self._load, self.chat, self.options, self.directory = model, chat, options, directory
        self._model: BatchedTarget | None = None
        if options.self_prompts and chat.template is None:
            chat.user_turn([], "")
        if not items and not options.self_prompts:
            raise UsageError("nothing to learn from: name files with --data, or prompts to make up with --self-prompts")
        self.items = list(items)
        random.Random(options.seed).shuffle(self.items)
        self.rounds = math.ceil((len(items) + options.self_prompts) / options.round_size)
        open_directory(directory, {**identity, **asdict(options), "items": len(items)})

    @property
    def model(self) -> BatchedTarget:
        if self._model is None:
            self._model = self._load()
        return self._model

    def missing(self) -> list[int]:
        """Rounds that have no shard yet."""
        return [number for number in range(self.rounds) if not self._shard(number).exists()]

    def run(self, progress: Progress, rounds: Sequence[int] | None = None) -> None:
        """Make what is missing."""
        todo = self.missing() if rounds is None else [r for r in self.missing() if r in set(rounds)]
        if not todo:
            return
        with progress.stage("write answers", len(todo)) as stage:
            for number in todo:
                examples, notes = self.round(number)
                replace_text(self._shard(number).with_suffix(".json"), json.dumps(notes, indent=0))
                write_shard(self._shard(number), examples)
                stage.advance()
                learnt = sum(int(example.learn.sum()) for example in examples)
                progress.log(
                    f"round {number + 1} of {self.rounds}: {len(examples)} sequences, {learnt} tokens to learn"
                )

    def _shard(self, number: int) -> Path:
        return self.directory / f"{number:05}.safetensors"

    def _share(self, total: int, number: int) -> range:
        return range(total * number // self.rounds, total * (number + 1) // self.rounds)

    def round(self, number: int) -> tuple[list[Example], list[dict[str, Any]]]:
        """The examples of one round, and a note of each: task, temperature and messages."""
        options = self.options
        chance = random.Random(f"{options.seed}/{number}")
        torch.manual_seed(options.seed * 100_003 + number)
        mine = [self.items[i] for i in self._share(len(self.items), number)]
        made = [
            Item(messages=({"role": "user", "content": text},), task="self")
            for text in self._make_up([()] * len(self._share(options.self_prompts, number)), chance)
            if text
        ]
        examples, notes = [], []
        for item in mine:
            if not item.asks and (example := self._given(item)) is not None:
                examples.append(example)
                notes.append({"task": item.task, "given": True})
        asked = self._ask([(item.messages, item.task) for item in [*mine, *made] if item.asks], chance)
        answered = list(self._answer(asked, chance))
        further = [
            ((*one.messages, {"role": "assistant", "content": self._text(example)}), one.task)
            for one, example in answered
            if one.prompt.temperature == 0 and self._ended(example) and chance.random() < options.again
        ]
        if further and self.chat.template is not None:
            turns = self._make_up([messages for messages, _ in further], chance)
            again = [
                ((*messages, {"role": "user", "content": turn}), "again")
                for (messages, _), turn in zip(further, turns, strict=True)
                if turn
            ]
            answered += self._answer(self._ask(again, chance), chance)
        for one, example in answered:
            examples.append(example)
            notes.append(
                {"task": one.task, "temperature": one.prompt.temperature, "messages": one.messages, "given": False}
            )
        return examples, notes

    def _ask(self, chats: Sequence[tuple[tuple[Message, ...], str]], chance: random.Random) -> list[_Asked]:
        """Chats as prompts; repeated and long ones are left out."""
        options, seen, asked = self.options, set(), []
        for messages, task in chats:
            temperature = options.temperature if chance.random() < options.sampled else 0.0
            tokens = tuple(self.chat.encode(messages))
            if tokens not in seen and len(tokens) <= options.max_prompt:
                seen.add(tokens)
                asked.append(_Asked(messages, task, Prompt(tokens, temperature)))
        return asked

    def _answer(self, asked: Sequence[_Asked], chance: random.Random) -> Iterator[tuple[_Asked, Example]]:
        """Answers, batch by batch; sequences of like length go together."""
        ordered = sorted(asked, key=lambda one: len(one.prompt.tokens))
        for begin in range(0, len(ordered), self.options.batch):
            batch = ordered[begin : begin + self.options.batch]
            examples = write_answers(
                self.model,
                [one.prompt for one in batch],
                max_tokens=self.options.max_answer,
                stop_ids=self.chat.files.stop_ids,
                valid_vocab=self.chat.files.vocab_size,
                seed=chance.getrandbits(32),
            )
            yield from zip(batch, examples, strict=True)

    def _make_up(self, contexts: Sequence[tuple[Message, ...]], chance: random.Random) -> list[str | None]:
        """A user's next words in each of the chats, None where they are no use."""
        starts = []
        for messages in contexts:
            opener = "" if messages else self.options.openers.draw(chance)
            tokens = tuple(self.chat.user_turn(messages, opener))
            starts.append((opener, Prompt(tokens, temperature=1.0, top_p=0.95)))
        turns: list[str | None] = [None] * len(starts)
        fitting = [i for i, (_, prompt) in enumerate(starts) if len(prompt.tokens) < self.options.max_prompt]
        fitting.sort(key=lambda i: len(starts[i][1].tokens))
        for begin in range(0, len(fitting), self.options.batch):
            rows = fitting[begin : begin + self.options.batch]
            examples = write_answers(
                self.model,
                [starts[i][1] for i in rows],
                max_tokens=TURN,
                stop_ids=self.chat.files.stop_ids,
                valid_vocab=self.chat.files.vocab_size,
                seed=chance.getrandbits(32),
                keep_features=False,
            )
            for i, example in zip(rows, examples, strict=True):
                turns[i] = complete_turn(starts[i][0] + self._text(example), self._ended(example))
        return turns

    def _given(self, item: Item) -> Example | None:
        """A text, or a chat with its answers, as it is; None if it is too short."""
        limit = self.options.max_prompt + self.options.max_answer
        if item.text is not None:
            tokens = self.chat.tokenizer.encode(item.text)[:limit]
            learn = torch.ones(len(tokens), dtype=torch.bool)
        else:
            tokens, spans = self.chat.turns(item.messages)
            learn = torch.zeros(len(tokens), dtype=torch.bool)
            for begin, end in spans:
                learn[begin:end] = True
            tokens, learn = tokens[:limit], learn[:limit]
        if len(tokens) < 4 or not bool(learn.any()):
            return None
        return read_states(self.model, torch.tensor(tokens), learn)

    def _ended(self, example: Example) -> bool:
        return int(example.tokens[-1]) in self.chat.files.stop_ids

    def _text(self, example: Example) -> str:
        return self.chat.tokenizer.decode(example.tokens[example.learn].tolist())
