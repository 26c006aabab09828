"""Text in, text out, on the toy model with a tokenizer of single characters."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from specexport.runtime.bundle import Bundle
from specexport.runtime.drafters import DRAFTERS
from specexport.runtime.drafters.ngram import NgramDrafter
from specexport.runtime.errors import BundleError, UsageError
from specexport.runtime.manifest import Manifest
from specexport.runtime.sampling import SamplingParams
from specexport.runtime.session import Result, Session, default_params
from tests.runtime.fake import FakeEngine, ToyModel
from tests.runtime.loop import AllRight, Bushy, reference

LETTERS = "abcdefghijklmnopqrstuvwxyz ."
STOP = len(LETTERS)  # the id of <end>
VOCAB = 32  # padded
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }} {{ m.content }}.{% endfor %}{% if add_generation_prompt %}a {% endif %}"
)
MakeSession = Callable[..., Session]


def spell(tokens: list[int]) -> str:
    return "".join(LETTERS[token] for token in tokens if token < STOP)


@pytest.fixture
def make_session(tmp_path: Path, manifest_dict: dict[str, Any]) -> MakeSession:
    """Sessions on a toy model; ``stops`` says whether it knows the stop token."""
    vocabulary = {letter: number for number, letter in enumerate(LETTERS)} | {"<end>": STOP}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="."))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens([tokenizers.AddedToken("<end>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": 0.7, "top_p": 0.8, "max_new_tokens": 20})
    )
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": "0" * 64} for path in tmp_path.iterdir() if path.is_file()
    }

    def make(seed: int = 0, slots: int = 400, stops: bool = False, **options: Any) -> Session:
        target = manifest_dict["target"] | {"vocab_size": VOCAB, "valid_vocab": STOP + stops, "slots": slots}
        data = manifest_dict | {
            "target": target,
            "stop_ids": [STOP] if stops else [],
            "files": files,
            "drafters": [
                {"name": "quick", "kind": "ngram", "options": {"max_ngram": 3}, "graph": None, "tree": None},
                {"name": "suffix", "kind": "suffix", "options": {}, "graph": None, "tree": None},
            ],
        }
        bundle = Bundle(tmp_path, Manifest.from_dict(data))
        return Session(bundle, **{"engine": FakeEngine(ToyModel(VOCAB, seed), slots)} | options)

    return make


def answer(session: Session, prompt: str, params: SamplingParams, count: int) -> list[int]:
    """The reference output for text."""
    model = session._decoder._engine.model  # type: ignore[attr-defined]
    valid = session.bundle.manifest.target.valid_vocab
    return reference(model, session.encode(prompt), params, count, lambda token: token == STOP, valid)


class TestAnswers:
    @pytest.mark.parametrize("name", ["none", *sorted(DRAFTERS)])
    @pytest.mark.parametrize(
        "params", [SamplingParams(max_tokens=90), SamplingParams(max_tokens=90, temperature=1.0, seed=3)]
    )
    def test_text_ids_and_reason(self, make_session: MakeSession, name: str, params: SamplingParams) -> None:
        session = make_session(drafter=name)
        result = session.generate("tell me a tale", params)
        expected = answer(session, "tell me a tale", params, 90)
        assert result.token_ids == expected and result.text == spell(expected)
        assert result.finish_reason == result.statistics.finish_reason == "length"
        assert result.statistics.drafter == session.drafter == name

    def test_stream_joins_to_generate(self, make_session: MakeSession) -> None:
        params = SamplingParams(max_tokens=60, logprobs=2)
        chunks = list(make_session().stream("tell me a tale", params))
        result = make_session().generate("tell me a tale", params)
        assert "".join(chunk.text for chunk in chunks) == result.text
        assert [token for chunk in chunks for token in chunk.token_ids] == result.token_ids
        assert [entry for chunk in chunks for entry in chunk.logprobs or []] == result.logprobs
        assert result.logprobs is not None and len(result.logprobs) == 60
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        last = chunks[-1].result
        assert last is not None and last.finish_reason == chunks[-1].finish_reason == "length"
        assert (last.text, last.token_ids) == (result.text, result.token_ids)
        assert any(len(chunk.token_ids) > 1 for chunk in chunks)

    def test_the_result_as_json(self, make_session: MakeSession) -> None:
        figures = make_session().generate("tell me a tale", SamplingParams(max_tokens=30, logprobs=1)).as_dict()
        assert json.loads(json.dumps(figures)) == figures
        for name in ("text", "token_ids", "tau", "tokens_per_second", "acceptance_by_depth", "time_share"):
            assert name in figures
        assert len(figures["logprobs"]) == 30 and set(figures["time_share"]) == {"draft", "verify", "host"}
        assert "logprobs" not in make_session().generate("a", SamplingParams(max_tokens=3)).as_dict()

    def test_ids_and_text_are_the_same_prompt(self, make_session: MakeSession) -> None:
        session, params = make_session(), SamplingParams(max_tokens=10)
        ids = session.encode("abc")
        assert ids == [0, 1, 2]
        assert session.generate(ids, params).token_ids == session.generate("abc", params).token_ids
        with pytest.raises(TypeError):
            session.encode([1.5])  # type: ignore[list-item]

    def test_chat(self, make_session: MakeSession) -> None:
        session, params = make_session(), SamplingParams(max_tokens=10)
        plain = session.generate("u hi.a ", params).token_ids
        assert session.generate("hi", params, chat=True).token_ids == plain
        messages = [{"role": "user", "content": "hi"}]
        assert session.generate(messages, params).token_ids == plain
        with pytest.raises(UsageError, match="chat needs text or messages"):
            session.generate([1, 2], params, chat=True)

    def test_text_gets_the_ends_of_the_tokenizer_and_a_template_writes_its_own(self, make_session: MakeSession) -> None:
        session = make_session(stops=True)
        session.bundle.tokenizer.backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="<end> $A", special_tokens=[("<end>", STOP)]
        )
        assert session.encode("hi") == [STOP, 7, 8]
        assert spell(session.encode("hi", chat=True)) == "u hi.a " and STOP not in session.encode("hi", chat=True)

    def test_the_next_turn_reuses_the_last(self, make_session: MakeSession) -> None:
        session, params = make_session(), SamplingParams(max_tokens=25)
        messages = [{"role": "user", "content": "tell me a tale"}]
        first = session.generate(messages, params)
        assert first.statistics.reused_tokens == 0
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "more"}]
        second = session.generate(messages, params)
        kept = first.statistics.prompt_tokens + 24
        assert second.statistics.reused_tokens == kept
        assert second.token_ids == make_session().generate(messages, params).token_ids


class TestEndings:
    @pytest.mark.parametrize("kind", [AllRight, Bushy])
    @pytest.mark.parametrize("seed", range(4))
    def test_a_stop_token(self, make_session: MakeSession, kind: type, seed: int) -> None:
        """It ends the output, is in neither text nor ids, and what follows builds on a sound cache."""
        params = SamplingParams(max_tokens=300, temperature=1.5, seed=seed, logprobs=0)
        expected = answer(make_session(seed, stops=True), "once", params, 300)
        assert expected[-1] == STOP
        drafter = kind(expected + [5] * 9, *((seed, VOCAB) if kind is Bushy else ()))
        session = make_session(seed, stops=True, drafter=drafter)
        result = session.generate("once", params)
        assert result.token_ids == expected[:-1] and result.text == spell(expected)
        assert (result.finish_reason, result.stop_match) == ("stop", STOP)
        assert result.statistics.tokens == len(expected)
        assert result.logprobs is not None and len(result.logprobs) == len(result.token_ids)
        follow = "once" + result.text + " more"
        session._decoder.drafter = None
        again = session.generate(follow, params)
        assert again.token_ids == make_session(seed, stops=True).generate(follow, params).token_ids
        assert again.statistics.reused_tokens >= len(result.token_ids)

    @pytest.mark.parametrize("at", range(0, 40, 3))
    def test_a_stop_string_anywhere(self, make_session: MakeSession, at: int) -> None:
        params = SamplingParams(max_tokens=60, temperature=1.0, seed=1)
        whole = make_session(drafter="none").generate("once", params)
        stop = whole.text[at : at + 3]
        end = whole.text.index(stop)
        session = make_session(drafter=AllRight(whole.token_ids))
        chunks = list(session.stream("once", params, stop=[stop, "@"]))
        result = chunks[-1].result
        assert result is not None
        assert "".join(chunk.text for chunk in chunks) == result.text == whole.text[:end]
        assert result.token_ids == whole.token_ids[: end + 3]
        assert (result.finish_reason, result.stop_match) == ("stop_string", stop)
        assert result.statistics.tokens == end + 3
        follow = "once" + whole.text[: end + 3] + "xyz"
        session._decoder.drafter = None
        assert session.generate(follow, params).token_ids == make_session().generate(follow, params).token_ids

    def test_the_context(self, make_session: MakeSession) -> None:
        session = make_session(slots=32)
        result = session.generate("tell me a tale", SamplingParams(max_tokens=300))
        assert result.finish_reason == "context" and len(result.token_ids) == 32 + 1 - 14
        assert result.token_ids == answer(session, "tell me a tale", SamplingParams(), 19)

    def test_min_tokens_holds_the_stop_token_off(self, make_session: MakeSession) -> None:
        hot = SamplingParams(temperature=1.5, max_tokens=300)
        short = make_session(stops=True).generate("once", hot)
        held = replace(hot, min_tokens=len(short.token_ids) + 5)
        for name in ("none", "suffix"):
            longer = make_session(stops=True, drafter=name).generate("once", held)
            assert len(longer.token_ids) >= len(short.token_ids) + 5
            assert longer.token_ids[: len(short.token_ids)] == short.token_ids


class TestInterruption:
    @pytest.mark.parametrize("as_event", [True, False])
    def test_cancel(self, make_session: MakeSession, as_event: bool) -> None:
        session, event = make_session(drafter="suffix"), threading.Event()
        params = SamplingParams(max_tokens=60)
        got: list[int] = []
        result: Result | None = None
        for chunk in session.stream("once", params, cancel=event if as_event else event.is_set):
            got += chunk.token_ids
            result = chunk.result
            if len(got) >= 10:
                event.set()
        assert result is not None and result.finish_reason == "cancelled"
        whole = make_session().generate("once", params)
        assert result.token_ids == got == whole.token_ids[: len(got)] and 10 <= len(got) < 60
        assert result.text == whole.text[: len(got)]
        assert session.generate("once", params).token_ids == whole.token_ids

    def test_cancelled_before_it_began(self, make_session: MakeSession) -> None:
        result = make_session().generate("once", cancel=lambda: True)
        assert (result.text, result.token_ids, result.finish_reason) == ("", [], "cancelled")
        assert result.as_dict()["tau"] == 0

    def test_a_dropped_stream(self, make_session: MakeSession) -> None:
        session, params = make_session(), SamplingParams(max_tokens=60)
        stream = session.stream("once", params)
        next(stream)
        next(stream)
        del stream
        assert session.generate("once", params).token_ids == make_session().generate("once", params).token_ids


class TestSettings:
    def test_the_bundle_names_the_default_drafter(self, make_session: MakeSession) -> None:
        assert make_session().drafter == "suffix"
        assert make_session(drafter="none").drafter == "none"

    def test_options_come_from_the_bundle(self, make_session: MakeSession) -> None:
        drafter = make_session(drafter="quick")._decoder.drafter
        assert isinstance(drafter, NgramDrafter) and drafter._max_ngram == 3

    def test_an_unknown_drafter_lists_what_there_is(self, make_session: MakeSession) -> None:
        with pytest.raises(UsageError, match="'eagle': expected one of auto, none, quick, suffix, ngram, recycling"):
            make_session(drafter="eagle")

    def test_auto_drafts_with_all_of_them_and_says_what_it_chose(self, make_session: MakeSession) -> None:
        params = SamplingParams(max_tokens=40)
        session, plain = make_session(drafter="auto"), make_session(drafter="none")
        for prompt in ("once upon once upon once", "another"):
            result = session.generate(prompt, params)
            assert result.token_ids == plain.generate(prompt, params).token_ids
            decided = result.statistics.decisions
            assert set(decided) == {"lookups"}
            # A step with one token left asks nobody.
            assert result.statistics.target_calls - sum(decided["lookups"].values()) in (0, 1)
        assert session.drafter == "auto"

    def test_the_rule_is_named_in_what_comes_out(self, make_session: MakeSession) -> None:
        params = SamplingParams(temperature=1.5, max_tokens=60)
        for name, lossy in (("match", False), ("typical", True)):
            figures = make_session(acceptance=name).generate("tell me a tale", params).as_dict()
            assert (figures["acceptance"], figures["lossy"]) == (name, lossy)
        assert make_session().generate("once").as_dict()["acceptance"] == "match"

    def test_a_rule_that_cannot_judge_the_drafter(self, make_session: MakeSession) -> None:
        with pytest.raises(UsageError, match="unknown acceptance 'lucky': expected one of match, rejection, typical"):
            make_session(acceptance="lucky")
        with pytest.raises(UsageError, match=r"acceptance 'rejection' needs drafts drawn at random.*'suffix'"):
            make_session(acceptance="rejection")
        with pytest.raises(UsageError, match="drafter 'none' proposes none"):
            make_session(acceptance="typical", drafter="none")

    def test_an_unknown_engine_is_refused(self, make_session: MakeSession) -> None:
        with pytest.raises(UsageError, match="unknown engine 'abacus'"):
            make_session(engine="abacus")

    def test_an_engine_that_contradicts_the_manifest(self, make_session: MakeSession) -> None:
        with pytest.raises(BundleError, match="33 and 400 cache rows, expected 32 and 400"):
            make_session(engine=FakeEngine(ToyModel(33, 0), 400))
        with pytest.raises(BundleError, match="32 and 399 cache rows"):
            make_session(engine=FakeEngine(ToyModel(VOCAB, 0), 399))

    @pytest.mark.parametrize("prompt", ["", []])
    def test_an_empty_prompt(self, make_session: MakeSession, prompt: Any) -> None:
        with pytest.raises(UsageError, match="prompt is empty"):
            make_session().stream(prompt)

    def test_a_prompt_past_the_context_or_vocabulary(self, make_session: MakeSession) -> None:
        session = make_session(slots=32)
        with pytest.raises(UsageError, match="33 tokens and the context 32"):
            session.stream("a" * 33)
        with pytest.raises(UsageError, match=f"token {STOP} is outside"):
            session.stream([STOP])

    def test_generation_defaults_apply_when_params_are_unset(self, make_session: MakeSession) -> None:
        session = make_session()
        stated = SamplingParams(temperature=0.7, top_p=0.8, max_tokens=20)
        assert session.params() == stated
        assert session.generate("once").token_ids == make_session().generate("once", stated).token_ids
        assert session.params(temperature=0.0, seed=4, top_k=None) == SamplingParams(top_p=0.8, seed=4, max_tokens=20)


@pytest.mark.parametrize(
    ("config", "overrides", "expected"),
    [
        ({}, {}, SamplingParams()),
        ({"temperature": 0.6, "top_p": 0.9}, {}, SamplingParams(top_p=0.9)),
        ({"do_sample": True}, {}, SamplingParams(temperature=1.0)),
        ({"do_sample": True, "top_k": None, "temperature": 0.5}, {}, SamplingParams(temperature=0.5)),
        ({"repetition_penalty": 1.1, "eos_token_id": 3}, {}, SamplingParams(repetition_penalty=1.1)),
        ({"max_new_tokens": 9, "min_new_tokens": 4}, {}, SamplingParams(max_tokens=9, min_tokens=4)),
        ({"min_new_tokens": 4}, {"max_tokens": 2}, SamplingParams(max_tokens=2, min_tokens=2)),
        ({"top_k": 5}, {"temperature": 0.9}, SamplingParams(temperature=0.9, top_k=5)),
    ],
)
def test_default_params(config: dict[str, Any], overrides: dict[str, Any], expected: SamplingParams) -> None:
    assert default_params(config, **overrides) == expected


def test_a_default_out_of_range_is_named() -> None:
    with pytest.raises(UsageError, match="top_p"):
        default_params({"top_p": 7})
