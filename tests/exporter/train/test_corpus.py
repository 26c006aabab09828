"""Making training data: the batched target is the target, a corpus is resumable, and damage is refused."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specexport.exporter.layers import Target
from specexport.exporter.train.corpus import Corpus, Example, write_shard
from specexport.exporter.train.generate import Prompt, write_answers
from specexport.exporter.train.make import MakeOptions, Maker
from specexport.exporter.train.prompts import Chat, Item, Openers, complete_turn, read_items
from specexport.exporter.train.run import make_corpus
from specexport.runtime.errors import CheckpointError, UsageError
from tests.exporter.train.conftest import QUIET, Tiny

CAPTURES = 4


def test_answers_and_states_are_the_targets_own(tiny: Tiny) -> None:
    """Sequences of different lengths, left-padded together, give what each gives alone."""
    model = tiny.opened.model(64)
    prompts = [Prompt(tuple(tiny.opened.chat.tokenizer.encode(text))) for text in ("def add(a", "12, 13, 14, 15", "f")]
    found = write_answers(model, prompts, max_tokens=10, stop_ids=[], valid_vocab=300, seed=0)
    for prompt, example in zip(prompts, found, strict=True):
        logits, features = plain(model.target, example.tokens[:-1])
        answer = example.tokens[example.learn]
        begin = len(prompt.tokens)
        assert len(answer) == 10
        assert logits[begin - 1 :, :300].argmax(-1).tolist() == answer.tolist()
        assert torch.allclose(example.features[:-1].float(), features, rtol=0.01, atol=0.01)


def plain(target: Target, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and features of the target's own forward over a chain."""
    size, config = len(tokens), target.config
    columns = torch.arange(size)
    caches = [torch.zeros(1, config.num_kv_heads, target.slots, config.head_dim) for _ in range(2 * config.num_layers)]
    with torch.no_grad():
        logits, features, *_ = target(
            tokens[None],
            columns[None],
            torch.ones(1, size, size, dtype=torch.bool).tril(),
            torch.tensor([0]),
            torch.tensor([0]),
            torch.zeros(0, dtype=torch.int64),
            columns,
            columns,
            *caches,
        )
    return logits, features[0]


def test_a_stop_token_ends_an_answer_and_finished_rows_do_not_disturb(tiny: Tiny) -> None:
    model = tiny.opened.model(64)
    prompts = [Prompt(tuple(tiny.opened.chat.tokenizer.encode(text))) for text in ("the lazy", "12, 13", "fox", "dog")]
    whole = write_answers(model, prompts, max_tokens=12, stop_ids=[], valid_vocab=300, seed=0)
    stop = int(whole[0].tokens[whole[0].learn][2])
    cut = write_answers(model, prompts, max_tokens=12, stop_ids=[stop], valid_vocab=300, seed=0)
    for long, short in zip(whole, cut, strict=True):
        answer = long.tokens[long.learn].tolist()
        size = answer.index(stop) + 1 if stop in answer else len(answer)
        assert short.tokens[short.learn].tolist() == answer[:size]


def test_sampling_follows_the_seed(tiny: Tiny) -> None:
    model = tiny.opened.model(64)
    prompt = Prompt((9, 10, 11), temperature=1.0)

    def answer(seed: int) -> list[int]:
        return write_answers(model, [prompt], max_tokens=12, stop_ids=[], valid_vocab=300, seed=seed)[0].tokens.tolist()

    assert answer(1) == answer(1) != answer(2)


def test_a_corpus_is_completed_not_made_anew(tiny: Tiny) -> None:
    """A removed shard comes back the same; the others are not touched."""
    shards = sorted(tiny.corpus.directory.glob("*.safetensors"))
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in shards]
    assert len(shards) > 1
    shards[-1].unlink()
    make_corpus(tiny.options, tiny.opened, tiny.options.work or Path(), QUIET)
    after = [(path.read_bytes(), path.stat().st_mtime_ns) for path in shards]
    assert [content for content, _ in after] == [content for content, _ in before]
    assert after[0][1] == before[0][1]


def test_other_settings_are_another_corpus(tiny: Tiny, tmp_path: Path) -> None:
    maker = maker_of(tiny, [Item(text="def add")], MakeOptions(seed=1), tmp_path)
    assert maker.rounds == 1
    with pytest.raises(CheckpointError, match="made with seed = 1, now it is 2"):
        maker_of(tiny, [Item(text="def add")], MakeOptions(seed=2), tmp_path)


def maker_of(tiny: Tiny, items: list[Item], options: MakeOptions, folder: Path) -> Maker:
    return Maker(lambda: tiny.opened.model(256), tiny.opened.chat, items, options, folder, {})


def test_given_texts_and_chats_are_learnt_as_they_are(tiny: Tiny, tmp_path: Path) -> None:
    chat = Item(messages=({"role": "user", "content": "fox"}, {"role": "assistant", "content": "dog, dog"}))
    examples, notes = maker_of(tiny, [chat, Item(text="the quick brown fox")], MakeOptions(), tmp_path).round(0)
    assert [note["given"] for note in notes] == [True, True]
    decode = tiny.opened.chat.tokenizer.decode
    learnt = {decode(example.tokens[example.learn].tolist()) for example in examples}
    assert "the quick brown fox" in learnt
    assert any(text.startswith("dog, dog") for text in learnt - {"the quick brown fox"})


def test_data_of_every_kind(tmp_path: Path) -> None:
    lines = '{"prompt": "a b c", "task": "x"}\n\n{"text": "t"}\n{"messages": [{"role": "user", "content": "m"}]}\n'
    (tmp_path / "d.jsonl").write_text(lines)
    with gzip.open(tmp_path / "d.jsonl.gz", "wt") as file:
        file.write(lines)
    (tmp_path / "d.txt").write_text("one\nparagraph\n\ntwo\n\n\n")
    found = list(read_items(tmp_path / "d.jsonl"))
    assert found == list(read_items(tmp_path / "d.jsonl.gz"))
    assert [item.asks for item in found] == [True, False, True]
    assert found[0].task == "x"
    assert [item.text for item in read_items(tmp_path / "d.txt")] == ["one\nparagraph", "two"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 1: not JSON"),
        ("[1]", "expected an object"),
        ('{"question": "q"}', "got the keys question: name the field of the prompts with --field"),
        ('{"messages": [{"role": "user"}]}', "a role and a content"),
        ('{"prompt": "x", "task": 3}', "task must be text"),
    ],
)
def test_bad_lines_are_named(line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(line + "\n")
    with pytest.raises(UsageError, match=said):
        list(read_items(tmp_path / "d.jsonl"))
    (tmp_path / "d.jsonl.gz").write_text(line)
    with pytest.raises(UsageError, match="cannot be read"):
        list(read_items(tmp_path / "d.jsonl.gz"))


def test_a_base_model_makes_up_no_prompts(tiny: Tiny, tmp_path: Path) -> None:
    base = replace(tiny.opened.chat.files, chat_template=None)
    with pytest.raises(UsageError, match="needs a target with a chat template"):
        Maker(lambda: tiny.opened.model(8), Chat(base), [], MakeOptions(self_prompts=3), tmp_path, {})
    with pytest.raises(UsageError, match="nothing to learn from"):
        maker_of(tiny, [], MakeOptions(), tmp_path)


def test_made_up_turns_are_tidied() -> None:
    assert complete_turn(" Who wrote this book? ", ended=True) == "Who wrote this book?"
    assert complete_turn("Who wrote this book? And wh", ended=False) == "Who wrote this book?"
    assert complete_turn("no sentence to be", ended=False) is None
    assert complete_turn("Too short", ended=True) is None


def test_openers_lead_made_up_prompts(tiny: Tiny, tmp_path: Path) -> None:
    options = MakeOptions(
        self_prompts=8, max_prompt=130, max_answer=4, openers=Openers(("Is 1 + 2 three?",), free=0.0), again=0.0
    )
    _, notes = maker_of(tiny, [], options, tmp_path).round(0)
    assert notes
    assert all(note["messages"][0]["content"].startswith("Is 1 + 2 three?") for note in notes)


def test_a_damaged_shard_is_refused(tmp_path: Path) -> None:
    tokens = torch.arange(6)
    write_shard(tmp_path / "00000.safetensors", [Example(tokens, tokens > 2, torch.zeros(6, CAPTURES))])
    corpus = Corpus(tmp_path)
    assert torch.equal(corpus[0].tokens, tokens)
    assert corpus[0].learn.tolist() == [False] * 3 + [True] * 3
    path = tmp_path / "00000.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="not a shard of a corpus"):
        Corpus(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match="holds no shard"):
        Corpus(tmp_path)
