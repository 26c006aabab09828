"""One engine behind JSON lines, for ``bench_peers.py``: runs in the engine's own environment and needs nothing of ours.

    python peer_worker.py KIND PATH THREADS

A request is one line on standard input, its answer one line on standard output; an error is ``{"error": ...}``:

    {"op": "step", "tokens": [...], "past": 256, "width": 8, "repeats": 3}      -> {"seconds": [...]}
    {"op": "decode", "tokens": [...], "new": 128, "drafter": "none"}            -> {"prefill_s", "decode_s", "tokens"}
    {"op": "memory"}                                                            -> {"peak", "anonymous", "files"}

A step is one forward of ``width`` new tokens after ``past`` cached ones; logits are of all of them where the engine can
(llama.cpp: of the last, its own way of evaluating a batch). Decoding is greedy. The drafter ``lookup`` is the engine's
own speculation from the prompt, at most five drafts a step (ours: ``suffix``, as many as it likes); ours take the names
of a bundle's drafters, ``auto`` among them. Memory is this process's, in bytes: the most so far, and what it holds now.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Seconds = list[float]
DRAFTS, NGRAM, CONTEXT = 5, 3, 1024
PLAIN, LOOKUP = "none", "lookup"


class Ours:
    """A bundle on one of our engines. A session a drafter lives through all prompts, as a server's would."""

    packages = ("specexport", "onnxruntime", "openvino")

    def __init__(self, path: str, threads: int, engine: str) -> None:
        from specexport.runtime import Bundle
        from specexport.runtime.engine import find_engine

        self.bundle, self.threads = Bundle.load(Path(path)), threads
        self.engine = find_engine(engine)(self.bundle.path, threads=threads)
        self.sessions: dict[str, Any] = {}

    def step(self, tokens: list[int], past: int, width: int, repeats: int) -> Seconds:
        from specexport.runtime.engine import Step

        def run(start: int, stop: int, select: Sequence[int]) -> float:
            call = Step.chain(tokens[start:stop], start, select)
            begin = time.perf_counter()
            self.engine.run(call)
            return time.perf_counter() - begin

        self.engine.reset()
        run(0, past, [0])
        return [run(past, past + width, range(width)) for _ in range(repeats + 1)][1:]

    def decode(self, tokens: list[int], new: int, drafter: str) -> dict[str, Any]:
        from specexport.runtime import SamplingParams, Session

        name = "suffix" if drafter == LOOKUP else drafter
        if name not in self.sessions:
            self.sessions[name] = Session(self.bundle, drafter=name, engine=self.engine, threads=self.threads)
        self.sessions[name].forget()  # no answer reuses the cache of another
        result = self.sessions[name].generate(tokens, SamplingParams(max_tokens=new))
        figures = result.statistics.as_dict()
        return {
            "prefill_s": figures["prefill_s"],
            "decode_s": figures["decode_s"],
            "tokens": list(result.token_ids),
            "tau": figures["tau"],
            "decisions": figures["decisions"],
        }


class Genai:
    """A folder of onnxruntime-genai's model builder."""

    packages = ("onnxruntime-genai", "onnxruntime")

    def __init__(self, path: str, threads: int, _: str) -> None:
        import onnxruntime_genai as og

        self.og = og
        config = og.Config(path)
        # Its default number of threads halves its speed on two cores.
        options = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self.model = og.Model(config)

    def _generator(self, lookup: bool = False) -> Any:
        params = self.og.GeneratorParams(self.model)
        params.set_search_options(max_length=CONTEXT, do_sample=False)
        if lookup:
            params.set_speculative_options(ngram_size=NGRAM, max_draft_tokens=DRAFTS)
        return self.og.Generator(self.model, params)

    def step(self, tokens: list[int], past: int, width: int, repeats: int) -> Seconds:
        generator = self._generator()
        generator.append_tokens([tokens[:past]])
        seconds = []
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            generator.append_tokens([tokens[past : past + width]])
            seconds.append(time.perf_counter() - begin)
            generator.rewind_to(past)
        return seconds[1:]

    def decode(self, tokens: list[int], new: int, drafter: str) -> dict[str, Any]:
        generator = self._generator(_lookup(drafter))
        begin = time.perf_counter()
        generator.append_tokens([tokens])
        generator.generate_next_token()
        first = time.perf_counter()
        while not generator.is_done() and len(generator.get_sequence(0)) - len(tokens) < new:
            generator.generate_next_token()
        end = time.perf_counter()
        found = [int(token) for token in generator.get_sequence(0)[len(tokens) :]][:new]
        return {"prefill_s": first - begin, "decode_s": end - first, "tokens": found}


class OpenVino:
    """A folder of ``optimum-cli export openvino``: steps on the plain runtime, decoding in OpenVINO GenAI."""

    packages = ("openvino", "openvino-genai")

    def __init__(self, path: str, threads: int, _: str) -> None:
        self.path, self.config = path, {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        self.request: Any = None
        self.pipelines: dict[bool, Any] = {}

    def step(self, tokens: list[int], past: int, width: int, repeats: int) -> Seconds:
        import numpy as np
        import openvino as ov

        if self.request is None:
            model = ov.Core().compile_model(f"{self.path}/openvino_model.xml", "CPU", self.config)
            self.names = {name for each in model.inputs for name in each.get_names()}
            self.request = model.create_infer_request()

        def run(start: int, stop: int) -> float:
            inputs = {
                "input_ids": np.array([tokens[start:stop]]),
                "attention_mask": np.ones((1, stop), np.int64),
                "position_ids": np.arange(start, stop)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
            begin = time.perf_counter()
            self.request.infer({name: array for name, array in inputs.items() if name in self.names}, share_inputs=True)
            return time.perf_counter() - begin

        self.request.reset_state()
        run(0, past)
        # Its cache cannot be cut from here without a copy: repeats follow each other.
        return [run(past + index * width, past + (index + 1) * width) for index in range(repeats + 1)][1:]

    def decode(self, tokens: list[int], new: int, drafter: str) -> dict[str, Any]:
        import numpy as np
        import openvino as ov
        import openvino_genai as genai

        lookup = _lookup(drafter)
        if lookup not in self.pipelines:
            options = dict(self.config)
            if lookup:
                scheduler = genai.SchedulerConfig()
                scheduler.enable_prefix_caching = False  # a repeated prompt would cost nothing
                options |= {"prompt_lookup": True, "scheduler_config": scheduler}
            self.pipelines[lookup] = genai.LLMPipeline(self.path, "CPU", **options)
        settings = genai.GenerationConfig(max_new_tokens=new, do_sample=False)
        settings.eos_token_id = self.pipelines[lookup].get_generation_config().eos_token_id
        settings.stop_token_ids = self.pipelines[lookup].get_generation_config().stop_token_ids
        settings.apply_chat_template = False
        if lookup:
            settings.num_assistant_tokens, settings.max_ngram_size = DRAFTS, NGRAM
        begin = time.perf_counter()
        result = self.pipelines[lookup].generate(ov.Tensor(np.array([tokens])), settings)
        seconds = time.perf_counter() - begin
        first = result.perf_metrics.get_ttft().mean / 1e3
        found = [int(token) for token in result.tokens[0]]
        return {"prefill_s": first, "decode_s": seconds - first, "tokens": found}


class LlamaCpp:
    """A GGUF file in llama-cpp-python."""

    packages = ("llama-cpp-python",)

    def __init__(self, path: str, threads: int, _: str) -> None:
        self.path, self.threads = path, threads
        self.models: dict[bool, Any] = {}

    def _model(self, lookup: bool) -> Any:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        if lookup not in self.models:
            draft = LlamaPromptLookupDecoding(num_pred_tokens=DRAFTS, max_ngram_size=NGRAM) if lookup else None
            options = {"n_ctx": CONTEXT, "n_threads": self.threads, "n_threads_batch": self.threads}
            self.models[lookup] = llama_cpp.Llama(
                self.path, draft_model=draft, logits_all=lookup, verbose=False, **options
            )
        return self.models[lookup]

    def step(self, tokens: list[int], past: int, width: int, repeats: int) -> Seconds:
        model = self._model(False)
        model.reset()
        model.eval(tokens[:past])
        seconds = []
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            model.eval(tokens[past : past + width])  # drops what lies behind n_tokens first
            seconds.append(time.perf_counter() - begin)
            model.n_tokens = past
        return seconds[1:]

    def decode(self, tokens: list[int], new: int, drafter: str) -> dict[str, Any]:
        model = self._model(_lookup(drafter))
        model.reset()
        begin = first = time.perf_counter()
        found: list[int] = []
        for token in model.generate(tokens, temp=0.0, top_k=1, repeat_penalty=1.0):
            if not found:
                first = time.perf_counter()
            found.append(int(token))
            if token == model.token_eos() or len(found) == new:
                break
        return {"prefill_s": first - begin, "decode_s": time.perf_counter() - first, "tokens": found}


class Transformers:
    """A Hugging Face directory in Transformers, float32."""

    packages = ("transformers", "torch")

    def __init__(self, path: str, threads: int, _: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def step(self, tokens: list[int], past: int, width: int, repeats: int) -> Seconds:
        ids = self.torch.tensor([tokens])
        seconds = []
        with self.torch.inference_mode():
            cache = self.model(ids[:, :past], use_cache=True).past_key_values
            for _ in range(repeats + 1):
                begin = time.perf_counter()
                self.model(ids[:, past : past + width], past_key_values=cache, use_cache=True)
                seconds.append(time.perf_counter() - begin)
                cache.crop(past)
        return seconds[1:]

    def decode(self, tokens: list[int], new: int, drafter: str) -> dict[str, Any]:
        ids = self.torch.tensor([tokens])
        options = {"prompt_lookup_num_tokens": DRAFTS, "max_matching_ngram_size": NGRAM} if _lookup(drafter) else {}

        def run(count: int) -> tuple[float, list[int]]:
            begin = time.perf_counter()
            found = self.model.generate(
                ids, attention_mask=self.torch.ones_like(ids), max_new_tokens=count, do_sample=False, **options
            )
            return time.perf_counter() - begin, found[0, len(tokens) :].tolist()

        first, _ = run(1)
        seconds, found = run(new)
        return {"prefill_s": first, "decode_s": seconds - first, "tokens": found}


def _lookup(drafter: str) -> bool:
    """Whether a peer, which has nothing else, drafts with its lookup."""
    if drafter not in (PLAIN, LOOKUP):
        raise ValueError(f"drafter {drafter}: expected {PLAIN} or {LOOKUP} of an engine that is not ours")
    return drafter == LOOKUP


def memory() -> dict[str, int]:
    """Bytes of this process: ``peak`` resident so far; resident now ``anonymous``, and pages of mapped ``files``."""

    def read(path: str) -> dict[str, int]:
        lines = (line.split() for line in Path(path).read_text().splitlines())
        return {words[0]: int(words[1]) << 10 for words in lines if words[-1] == "kB"}

    now = read("/proc/self/smaps_rollup")
    return {
        "peak": read("/proc/self/status")["VmHWM:"],
        "anonymous": now["Anonymous:"],
        "files": now["Rss:"] - now["Anonymous:"],
    }


#: Kinds that are not an engine of ours.
PEERS = {"genai": Genai, "openvino-genai": OpenVino, "llamacpp": LlamaCpp, "transformers": Transformers}


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    kind, path, threads = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")  # engines that print must not break the protocol
    os.dup2(2, 1)

    def answer(record: dict[str, Any]) -> None:
        answers.write(json.dumps(record) + "\n")
        answers.flush()

    engine: Any = None
    try:
        made = PEERS.get(kind, Ours)
        engine = made(path, int(threads), kind)
        answer({"versions": _versions(made.packages)})
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        return
    for line in sys.stdin:
        request = json.loads(line)
        operation = request.pop("op")
        try:
            found = memory() if operation == "memory" else getattr(engine, operation)(**request)
            answer({"seconds": found} if operation == "step" else found)
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
