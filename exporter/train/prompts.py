"""What the target is asked: a user's data files, and prompts that the target makes up itself.

A line of a JSONL file is a chat (``{"messages": [...]}``: answered if the user spoke last, otherwise its assistant
turns are learnt as they are), a prompt (``{"prompt": ...}`` or the field that was named), or text
(``{"text": ...}``, learnt as it is). ``.gz`` files are read too. Other files are text: one passage a paragraph.

Self-made prompts follow Magpie (Xu et al. 2024, arXiv 2406.08464): the target continues the chat template where a user
would speak. An opener that begins the turn leads it to a kind of task.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specexport.exporter.tokenizer import TokenizerFiles
from specexport.profiles.data_files import LIMIT, has_records, keys_of, open_data, read_records
from specexport.runtime.chat import ChatTemplate
from specexport.runtime.errors import UsageError
from specexport.runtime.tokenizer import Tokenizer

Message = Mapping[str, Any]
_MARK = "\u2063user text\u2063"


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to learn from: ``messages`` of a chat, or ``text``. ``task`` tags it."""

    messages: tuple[Message, ...] = ()
    text: str | None = None
    task: str = "data"

    @property
    def asks(self) -> bool:
        """Whether the target has to answer."""
        return self.text is None and self.messages[-1]["role"] != "assistant"


def read_items(path: Path, name: str = "prompt") -> Iterator[Item]:
    """The items of a file; ``name`` is the field of prompts.

    Raises:
        UsageError: no such file, or a line that is none of the kinds.
    """
    if has_records(path):
        for where, record in read_records(path):
            yield _item(record, name, where)
        return
    with open_data(path) as stream:
        for paragraph in stream.read(LIMIT).split("\n\n"):
            if paragraph.strip():
                yield Item(text=paragraph.strip())


def _item(record: dict[str, Any], name: str, where: str) -> Item:
    task = record.get("task", "data")
    if not isinstance(task, str):
        raise UsageError(f"{where}: task must be text")
    if isinstance(record.get("messages"), list) and record["messages"]:
        for message in record["messages"]:
            if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
                raise UsageError(f"{where}: a message needs a role and a content, both text")
        return Item(messages=tuple(record["messages"]), task=task)
    if isinstance(record.get(name), str):
        return Item(messages=({"role": "user", "content": record[name]},), task=task)
    if isinstance(record.get("text"), str):
        return Item(text=record["text"], task=task)
    raise UsageError(
        f'{where}: expected "messages", "{name}" or "text", got the keys {keys_of(record)}: name the field of the '
        "prompts with --field"
    )


class Chat:
    """Text to tokens as the runtime will do it: the target's tokenizer and chat template."""

    def __init__(self, files: TokenizerFiles) -> None:
        import tokenizers

        self.files = files
        self.tokenizer = Tokenizer(
            tokenizers.Tokenizer.from_str(files.tokenizer_json.decode()), files.tokenizer_config, files.chat_template
        )
        self.template: ChatTemplate | None = (
            None if files.chat_template is None else ChatTemplate(files.chat_template, self.tokenizer.special_tokens)
        )

    def encode(self, messages: Sequence[Message], *, answer: bool = True) -> list[int]:
        """Tokens of a chat; ``answer``: up to where the assistant speaks next. Base models get the bare text."""
        if self.template is None:
            return self.tokenizer.encode("\n\n".join(str(message["content"]) for message in messages))
        return self.tokenizer.encode(self.template.render(messages, add_generation_prompt=answer), add_special=False)

    def user_turn(self, messages: Sequence[Message], opener: str) -> list[int]:
        """Tokens of a chat up to where a user has begun to speak.

        Raises:
            UsageError: a target without a chat template has no user.
        """
        if self.template is None:
            raise UsageError("--self-prompts needs a target with a chat template: give prompts with --data instead")
        shown = self.template.render(
            [*messages, {"role": "user", "content": opener + _MARK}], add_generation_prompt=False
        )
        return self.tokenizer.encode(shown.split(_MARK)[0], add_special=False)

    def turns(self, messages: Sequence[Message]) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens of a whole chat, and where its assistant's turns are."""
        tokens = self.encode(messages, answer=False)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                begin, end = len(self.encode(messages[:index])), len(self.encode(messages[: index + 1], answer=False))
                spans.append((begin, min(end, len(tokens))))
        return tokens, spans


def complete_turn(text: str, ended: bool) -> str | None:
    """A made-up turn, tidied: None if it is no use. One that was cut off ends at its last sentence."""
    text = text.strip()
    if not ended:
        end = max(text.rfind(mark) for mark in ".?!\n")
        text = text[: end + 1].strip()
    return text if len(text.split()) >= 3 else None


@dataclass(slots=True)
class Openers:
    """Beginnings of user turns; an empty one leaves the turn to the target."""

    texts: Sequence[str] = field(default_factory=lambda: DEFAULT_OPENERS)
    free: float = 0.35

    def draw(self, chance: random.Random) -> str:
        return "" if not self.texts or chance.random() < self.free else chance.choice(list(self.texts))


#: Kinds of tasks that assistants are asked for, by the words they begin with.
DEFAULT_OPENERS: tuple[str, ...] = tuple(
    """\
Who|Who was|When did|When was|Where is|Where did|What is|What are|What was the|What does|How many|How do|How does|
Why do|Why is|Which|Name|Define|Explain|Explain the difference between|Compare|Describe|Describe how|List|Give me|
Give three examples of|Suggest|Recommend|Can you|Could you|I need|I want to|I am planning|My|Help me|Tell me|
Imagine you are|Pretend to be|You are a|Act as|Write a|Write an email|Write a short story about|Write a poem|
Write a letter|Write a blog post|Write a Python function that|Write a program in C++ that|Implement|
Write a SQL query|Write HTML|Fix the following code:|What is the output of|How can I|Solve|Calculate|Find the|If|A|
There are|Suppose|Prove that|Given|Is it|Are there|Do|Translate the following sentence to English:|
Translate German to English:|Translate to English: Die|Translate to English: Der|Translate to English: Das|
Translate to English: Ich|Translate to English: Es|Translate to German:|Translate to French:|
Summarize the following article:|Summarize:|Summarize this text in one paragraph:|Rewrite the following sentence|
Correct the grammar:|Classify the following|Extract the names|Extract from the text|Identify|Evaluate|Analyze|
Discuss|Outline|Create|Design|Draft|Compose|Provide|Generate|Edit the following paragraph|
Answer the question based on the text.|Read the following passage and answer|Use the following context to answer:|
In|The|What do you think about|Tell me a story about|Who wrote|Who won|Who played|What year|What is the capital of|
What is the name of|When does|Where was""".replace("\n", "").split("|")
)
