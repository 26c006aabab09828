"""A bundle that answers: text in, text out, over :class:`specexport.runtime.decoder.Decoder`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

from specexport.runtime.acceptance import Logprobs
from specexport.runtime.auto import AUTO, make_controller
from specexport.runtime.bundle import Bundle
from specexport.runtime.decoder import Decoder
from specexport.runtime.drafters import DRAFTERS, GRAPH_DRAFTERS, NO_DRAFTER, Drafter, make_drafter
from specexport.runtime.engine import TargetEngine, chains_only, find_engine, width_exact
from specexport.runtime.errors import BundleError, UsageError
from specexport.runtime.rules import DEFAULT_RULE
from specexport.runtime.sampling import Sampler, SamplingParams
from specexport.runtime.statistics import RunStatistics
from specexport.runtime.stopping import FinishReason, StopChecker

if TYPE_CHECKING:
    from specexport.runtime.chat import ChatTemplate

#: Text, token ids, or the messages of a chat.
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
Cancel = threading.Event | Callable[[], bool] | None

#: Widest tree unless told otherwise, the root included.
MAX_NODES = 8


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a stream shows at once, about one target call's worth.

    Attributes:
        text: characters that became final; never a part of one, nor of a possible stop string. May be empty.
        token_ids: output tokens of this chunk. logprobs: one entry a token if asked for, else None.
        result: the whole run, on the last chunk only.
    """

    text: str
    token_ids: list[int]
    logprobs: list[Logprobs] | None = None
    result: Result | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the output ended; None on all chunks but the last."""
        return self.result.finish_reason if self.result else None


@dataclass(frozen=True, slots=True)
class Result:
    """One answer.

    Attributes:
        text: the output text, cut before a stop string. token_ids: the output tokens, without a stop token.
        finish_reason: why it ended. stop_match: the stop string or stop token that ended it, else None.
        logprobs: one entry an output token if asked for, else None. statistics: how it went.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_match: str | int | None
    logprobs: list[Logprobs] | None
    statistics: RunStatistics

    def as_dict(self) -> dict[str, Any]:
        """Everything under its stable JSON name: text and ids, then the statistics."""
        figures: dict[str, Any] = {"text": self.text, "token_ids": self.token_ids, "stop_match": self.stop_match}
        if self.logprobs is not None:
            figures["logprobs"] = [
                {"logprob": chosen, "top": [[token, value] for token, value in best]} for chosen, best in self.logprobs
            ]
        return figures | self.statistics.as_dict()


class Session:
    """One conversation partner: a bundle on an engine. Not thread safe, and one generation at a time.

    Prompts may follow each other: the cache of the tokens that a prompt shares with what was there is reused.

    Args:
        bundle: what to run.
        drafter: a drafter of the bundle or a lookup drafter by name, ``"auto"`` for the controller over all of the
            bundle's (:mod:`specexport.runtime.controller`), ``"none"`` for plain decoding, an object that follows
            :class:`~specexport.runtime.drafters.base.Drafter`, or None for the bundle's default.
        engine: entry point name, a loaded engine, or None for the bundle's default.
        threads: of the engine, 0 for one per physical core.
        max_nodes: widest tree, the root included; None: what the drafter's graph gives, or :data:`MAX_NODES`.
        prefill_chunk: most prompt tokens in one call; None: the bundle's.
        acceptance: the rule that judges drafts, a name in :data:`specexport.runtime.rules.RULES`. With ``"match"`` the
            tokens are those of plain decoding, with ``"rejection"`` their distribution; ``"typical"`` is lossy.

    Raises:
        UsageError: an unknown drafter, engine or rule, or a rule that cannot judge this drafter.
        BundleError: the engine and the manifest disagree.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        drafter: str | Drafter | None = None,
        engine: str | TargetEngine | None = None,
        threads: int = 0,
        max_nodes: int | None = None,
        prefill_chunk: int | None = None,
        acceptance: str = DEFAULT_RULE,
    ) -> None:
        target = bundle.manifest.target
        self.bundle = bundle
        self._template: ChatTemplate | None = None
        engine_name = engine if isinstance(engine, str) else bundle.manifest.engine
        if engine is None or isinstance(engine, str):
            engine = find_engine(engine_name)(bundle.path, threads=threads)
        if (engine.vocab_size, engine.slots) != (target.vocab_size, target.slots):
            raise BundleError(
                f"the engine has vocabulary {engine.vocab_size} and {engine.slots} cache rows, expected "
                f"{target.vocab_size} and {target.slots} by the manifest: build the bundle again"
            )
        chains = chains_only(target.precision, engine)
        if drafter == AUTO or (drafter is None and bundle.manifest.drafter == AUTO):
            drafter = make_controller(bundle, engine, engine_name, threads, chains=chains)
        self._engine = engine
        found = find_drafter(bundle, drafter, engine)
        if max_nodes is None:
            max_nodes = getattr(found, "max_nodes", MAX_NODES)
        self._decoder = Decoder(
            engine,
            found,
            valid_vocab=target.valid_vocab,
            max_nodes=max_nodes,
            prefill_chunk=prefill_chunk or target.prefill_chunk,
            acceptance=acceptance,
            chains=chains,
        )

    @property
    def drafter(self) -> str:
        """Name of what proposes; ``"none"`` for plain decoding."""
        return self._decoder.drafter.name if self._decoder.drafter else NO_DRAFTER

    @property
    def width_exact(self) -> bool:
        """Whether the engine promises the tokens of plain decoding, not only up to rounding."""
        return width_exact(self._engine)

    def forget(self) -> None:
        """Empty the cache: nothing of the next prompt is reused."""
        self._decoder.forget()

    def params(self, **overrides: Any) -> SamplingParams:
        """Sampling parameters: the model's generation defaults with ``overrides`` (None: not overridden)."""
        return default_params(self.bundle.generation_config, **overrides)

    def encode(self, prompt: Prompt, *, chat: bool = False) -> list[int]:
        """Token ids of a prompt.

        Args:
            prompt: messages go through the chat template; so does text if ``chat``, as one user message.

        Raises:
            UsageError: messages that the template refuses, or a bundle without a chat template.
        """
        if isinstance(prompt, str):
            if not chat:
                return self.bundle.tokenizer.encode(prompt)
            prompt = [{"role": "user", "content": prompt}]
        if len(prompt) and isinstance(prompt[0], Mapping):
            messages = cast(Sequence[Mapping[str, Any]], prompt)
            if self._template is None:
                self._template = self.bundle.tokenizer.chat_template()
            return self.bundle.tokenizer.encode(self._template.render(messages), add_special=False)
        if chat:
            raise UsageError("chat needs text or messages, got token ids: apply the template before encoding")
        return [index(cast(int, token)) for token in prompt]  # index: 1.5 is a mistake, not token 1

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        cancel: Cancel = None,
        chat: bool = False,
    ) -> Result:
        """Answer a prompt; the arguments and errors are those of :meth:`stream`."""
        result = None
        for chunk in self.stream(prompt, params, stop=stop, cancel=cancel, chat=chat):
            result = chunk.result
        assert result is not None
        return result

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        cancel: Cancel = None,
        chat: bool = False,
    ) -> Iterator[Chunk]:
        """Answer a prompt piece by piece; the last chunk carries the result.

        The prompt is checked at once, the work begins with the first chunk. A stream that is dropped, cancelled or
        fails leaves the session ready for the next prompt.

        Args:
            prompt: text, token ids or chat messages. params: None for the model's generation defaults.
            stop: strings that end the output. cancel: an event or a function, looked at before each target call.
            chat: treat text as a user's message.

        Raises:
            UsageError: an empty or too long prompt, an id outside the vocabulary, an impossible parameter.
        """
        begun = perf_counter()
        params = params or self.params()
        tokens = self.encode(prompt, chat=chat)
        self._decoder.check_prompt(tokens)
        manifest = self.bundle.manifest
        sampler = Sampler(params, manifest.target.vocab_size, manifest.target.valid_vocab, manifest.stop_ids)
        checker = StopChecker(
            manifest.stop_ids,
            stop,
            params.max_tokens,
            self.bundle.tokenizer.detokenizer(),
            min_tokens=params.min_tokens,
        )
        statistics = RunStatistics(first_token_s=perf_counter() - begun)
        return self._run(tokens, sampler, checker, cancel, statistics)

    def _run(
        self, tokens: list[int], sampler: Sampler, checker: StopChecker, cancel: Cancel, statistics: RunStatistics
    ) -> Iterator[Chunk]:
        cancelled = cancel.is_set if isinstance(cancel, threading.Event) else cancel or (lambda: False)
        max_tokens = sampler.params.max_tokens
        logprobs: list[Logprobs] | None = None if sampler.params.logprobs is None else []
        shown = 0
        for block in self._decoder.decode(
            tokens, sampler, max_tokens=max_tokens, stop=checker.push, cancelled=cancelled, statistics=statistics
        ):
            fresh = checker.token_ids[shown:]
            of_block = None if block.logprobs is None else block.logprobs[: len(fresh)]
            if logprobs is not None and of_block is not None:
                logprobs += of_block
            shown += len(fresh)
            if statistics.finish_reason:
                break
            yield Chunk(checker.take(), fresh, of_block)
        else:
            fresh, of_block = [], None  # cancelled between two blocks
        checker.finish(statistics.finish_reason or "cancelled")
        reason = checker.finish_reason
        assert reason is not None
        statistics.finish_reason = reason
        result = Result(checker.text, checker.token_ids, reason, checker.stop_match, logprobs, statistics)
        yield Chunk(checker.take(), fresh, of_block, result)


def find_drafter(bundle: Bundle, drafter: str | Drafter | None, engine: TargetEngine) -> Drafter | None:
    """The drafter that a session was asked for; see :class:`Session`. A drafter with a graph runs it on ``engine``."""
    if drafter is None:
        drafter = bundle.manifest.drafter or NO_DRAFTER
    if not isinstance(drafter, str):
        return drafter
    offered = {info.name: info for info in bundle.manifest.drafters}
    info = offered.get(drafter)
    kind, options = (info.kind, info.options) if info else (drafter, {})
    try:
        if info and info.graph is not None and kind in GRAPH_DRAFTERS:
            return GRAPH_DRAFTERS[kind](info, bundle, engine)
    except TypeError as error:
        raise BundleError(f"drafter {drafter!r}: {error}") from error
    if kind != NO_DRAFTER and kind not in DRAFTERS:
        names = dict.fromkeys([AUTO, NO_DRAFTER, *offered, *DRAFTERS])
        raise UsageError(f"unknown drafter {drafter!r}: expected one of {', '.join(names)}")
    return make_drafter(kind, bundle.manifest.target.valid_vocab, **options)


#: generation_config.json -> SamplingParams, for keys that mean the same.
_SHARED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


def default_params(generation_config: Mapping[str, Any], **overrides: Any) -> SamplingParams:
    """Sampling parameters of a Hugging Face generation config: what it states, and greedy unless it samples.

    Args:
        overrides: fields of :class:`SamplingParams`; None leaves a field as it is.
    """
    keys = {name: name for name in _SHARED} | _RENAMED
    stated = {
        ours: generation_config[theirs] for theirs, ours in keys.items() if generation_config.get(theirs) is not None
    }
    if not generation_config.get("do_sample", False):
        stated["temperature"] = 0.0
    elif "temperature" not in stated:
        stated["temperature"] = 1.0
    values = stated | {name: value for name, value in overrides.items() if value is not None}
    # A default must not contradict what the caller asked for.
    if "max_tokens" in overrides and "min_tokens" not in overrides and overrides["max_tokens"] is not None:
        values["min_tokens"] = min(values.get("min_tokens", 0), overrides["max_tokens"])
    return SamplingParams(**values)
