"""Our engines and other people's side by side: cost of a step by width, decoding end to end, start and memory.

    python scripts/bench_peers.py steps --prompts question.jsonl.gz --bundle smollm2-int8 \\
        --run "ours ORT int8" onnxruntime-cpu smollm2-int8 --run "ours OV int8" openvino-cpu smollm2-int8 \\
        --run "genai int8" genai genai-int8 --run "OpenVINO int8" openvino-genai ov-int8 \\
        --run "llama.cpp Q8_0" llamacpp smollm2.q8_0.gguf \\
        --python genai=envs/genai/bin/python --python openvino-genai=envs/openvino/bin/python ...
    python scripts/bench_peers.py decode (the same) --tasks summarization rag --count 5 --new 128
    python scripts/bench_peers.py start (the same)

Every ``--run LABEL KIND PATH`` is a process of its own (``peer_worker.py``) that works when it is asked to; rounds
alternate over the engines, figures are medians. KIND is one of our engines (``specexport doctor`` lists them), or
``genai``, ``openvino-genai``, ``llamacpp``, ``transformers``. What is missing or fails is named in the table, not left
out. Prompts are tokenised by ``--bundle`` (with its chat template) and go to every engine as the same ids.
``--env LABEL NAME=VALUE`` is one run's environment (``SPECEXPORT_KERNELS=off``), ``--drafter LABEL NAME`` another
drafter of one of our bundles (a head, ``auto``), beside plain decoding and the lookup. ``start`` starts a process per
engine and round (the first, with cold files, does not count) and lets it answer 8 tokens, then ``--past``.

Making the peers' environments and models, from one GGUF file or Hugging Face directory (one environment each):

- HF directory from GGUF: ``from_pretrained(folder, gguf_file=...)`` in Transformers (needs accelerate, gguf), clear
  ``hf_quantizer``, ``is_quantized`` and ``config.quantization_config``, set ``config.architectures`` (Gemma 3:
  ``rms_norm_eps = 1e-6``), then ``save_pretrained``.
- genai: ``pip install onnxruntime-genai onnxruntime onnx onnx-ir torch 'transformers>=5.2'``, then
  ``python -m onnxruntime_genai.models.builder -i HF -o OUT -p int4|int8|fp32 -e cpu --extra_options accuracy_level=4``
  (Gemma 3 under Transformers 5: KeyError 'rope_type', because there is one entry a kind of layer; give the builder a
  config with ``rope_theta`` and ``rope_local_base_freq`` instead of ``rope_parameters``). Its sliding-window caches
  cannot go back once they are full: ``--longest 500`` for windows of 512.
- openvino-genai: ``pip install openvino-genai openvino-tokenizers nncf optimum-intel transformers==4.57.6``, then
  ``optimum-cli export openvino -m HF --task text-generation-with-past --weight-format fp16|int8|int4 OUT``
  (without torchvision; int4 of rows that are no multiples of 128: ``--group-size 64``)
- llamacpp: ``pip install llama-cpp-python`` (builds from source); other quantisations of the same GGUF by
  ``llama_cpp.llama_model_quantize`` with ``allow_requantize``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from specexport.engines.ort import physical_cores
from specexport.exporter.bench.suites import read_suite
from specexport.runtime import Bundle
from specexport.runtime.initializers import initializers
from specexport.runtime.machine import cpu_model

WIDTHS = (1, 2, 4, 8, 16, 32)
WORKER = Path(__file__).with_name("peer_worker.py")
PEERS = ("genai", "openvino-genai", "llamacpp", "transformers")
#: What every engine decodes with; ours, and some with --drafter, more.
PLAIN, LOOKUP = "none", "lookup"


#: Prompt tokens of the first answer of ``start``, and tokens of its second.
SHORT = 8
Turn = TypeVar("Turn")


class Worker:
    """One engine in its process. ``problem`` says why it takes no part (any more)."""

    def __init__(
        self, label: str, kind: str, path: str, python: str | None, threads: int, variables: Mapping[str, str]
    ) -> None:
        self.label, self.kind, self.path, self.variables = label, kind, path, dict(variables)
        self.problem: str | None = None
        self.versions: dict[str, str] = {}
        if kind in PEERS and python is None:
            self.problem = f"skipped: no interpreter, give --python {kind}=PATH"
        elif not Path(path).exists():
            self.problem = f"skipped: {path} does not exist"
        elif python is not None and not Path(python).exists():
            self.problem = f"skipped: {python} does not exist"
        self._command = [python or sys.executable, str(WORKER), kind, path, str(threads)]
        self._environment = os.environ | {"OMP_NUM_THREADS": str(threads)} | self.variables
        if kind in PEERS:
            self._environment.pop("PYTHONPATH", None)

    def start(self) -> None:
        """Start the process and wait until it has loaded its model."""
        if self.problem:
            return
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115, the process writes it until it ends
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=self._environment,
        )
        self.versions = (self._answer() or {}).get("versions", {})

    def ask(self, **request: Any) -> dict[str, Any] | None:
        """The answer, or None where there is no engine (left)."""
        if self.problem or self._process.stdin is None:
            return None
        with suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        if "error" in found:
            self.problem = "failed: " + (found["error"].strip().splitlines() or ["?"])[-1][:200]
            return None
        return found

    def _last_words(self) -> str:
        """Why there is no answer: how the process ended, and what it wrote last."""
        code = self._process.wait()
        self._said.seek(0)
        said = self._said.read().strip().splitlines() or ["it wrote nothing"]
        return f"the process ended with {f'signal {-code}' if code < 0 else f'code {code}'}: {said[-1]}"

    def close(self) -> None:
        if hasattr(self, "_process"):
            with suppress(BrokenPipeError):
                self._process.communicate()
            self._said.close()
            del self._process

    def weight_bytes(self) -> int:
        """Bytes of the weights that a step reads: of a model whose input table is its output table too, all."""
        path = Path(self.path)
        if path.is_file():
            return path.stat().st_size
        if self.kind == "genai":
            return _products(path / "model.onnx")
        names = ["openvino_model.bin", "model.safetensors", "target.onnx.data"]
        if self.kind == "onnxruntime-cpu":
            names.append("target.cpu.onnx.data")  # the codes again, laid out for it; of fp32 next to nothing
        sizes = [file.stat().st_size for name in names if (file := path / name).is_file()]
        return max(sizes, default=0)


def _products(graph: Path) -> int:
    """Bytes of the weights without tables of which a step reads a few rows: rotations, an input table of its own."""
    tensors = initializers(graph) if graph.is_file() else []
    untied = any(tensor.name.startswith("lm_head.") for tensor in tensors)
    looked_up = ("cos_cache", "sin_cache", *(("model.embed_tokens.",) if untied else ()))
    return sum(tensor.bytes for tensor in tensors if not tensor.name.startswith(looked_up))


def bandwidth(threads: int) -> float:
    """Bytes a second that so many threads read from memory: sums over 1 GB, the best of five."""
    parts = np.array_split(np.ones(1 << 27, np.int64), threads)
    best = 0.0
    for _ in range(5):
        pool = [threading.Thread(target=part.sum) for part in parts]
        begin = time.perf_counter()
        for thread in pool:
            thread.start()
        for thread in pool:
            thread.join()
        best = max(best, sum(part.nbytes for part in parts) / (time.perf_counter() - begin))
    return best


def peak_flops(threads: int) -> float:
    """float32 operations a second: one product of ONNX Runtime's, large enough to be bound by them."""
    import onnx_ir as ir
    import onnxruntime as ort
    from onnx_ir import serde

    size = 1024
    left, right = (
        ir.Value(name=name, shape=ir.Shape([size, size]), type=ir.TensorType(ir.DataType.FLOAT)) for name in "ab"
    )
    node = ir.node("MatMul", [left, right])
    node.outputs[0].name, node.outputs[0].shape, node.outputs[0].type = "c", left.shape, left.type
    graph = ir.Graph([left, right], node.outputs, nodes=[node], name="peak", opset_imports={"": 20})
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    model = serde.serialize_model(ir.Model(graph, ir_version=10)).SerializeToString()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    inputs = {name: np.ones((size, size), np.float32) for name in "ab"}
    seconds = []
    for _ in range(12):
        begin = time.perf_counter()
        session.run(None, inputs)
        seconds.append(time.perf_counter() - begin)
    return 2 * size**3 / min(seconds)


def read_prompts(arguments: argparse.Namespace) -> list[tuple[str, list[int]]]:
    """(task, tokens) of ``--count`` prompts of each task, as far as prompt and answer fit."""
    bundle = Bundle.load(arguments.bundle)
    tokenizer = bundle.tokenizer
    template = tokenizer.chat_template() if bundle.chat_template is not None else None
    found = []
    for prompt in read_suite(arguments.prompts, tuple(arguments.tasks or ()), arguments.count):
        if template is None:
            tokens = tokenizer.encode(prompt.text)
        else:
            text = template.render([{"role": "user", "content": prompt.text}])
            tokens = tokenizer.encode(text, add_special=False)
        if len(tokens) + arguments.new <= arguments.longest:
            found.append((prompt.task, list(tokens)))
    if not found:
        raise SystemExit(f"no prompt of {arguments.prompts} leaves room for --new {arguments.new} in --longest")
    return found


def steps(arguments: argparse.Namespace, workers: list[Worker]) -> dict[str, Any]:
    """The table of step costs, and what bounds it."""
    for worker in workers:
        worker.start()
    tokens = [token for _, prompt in read_prompts(arguments) for token in prompt]
    needed = arguments.past + 8 * max(WIDTHS)
    tokens = (tokens * (needed // len(tokens) + 1))[:needed]
    samples: dict[str, dict[int, list[float]]] = {worker.label: {width: [] for width in WIDTHS} for worker in workers}
    for _ in _within(arguments, range(arguments.rounds)):
        for width in WIDTHS:
            for worker in workers:
                asked = worker.ask(op="step", tokens=tokens, past=arguments.past, width=width, repeats=3)
                samples[worker.label][width] += (asked or {}).get("seconds", [])
    speed, peak = bandwidth(arguments.threads), peak_flops(arguments.threads)
    print(f"memory {speed / 1e9:.1f} GB/s read, {peak / 1e9:.0f} GFLOP/s in float32; ms a step, past {arguments.past}")
    print(f"{'':>24} " + " ".join(f"{f'T={width}':>8}" for width in WIDTHS) + "  T=8/T=1   bytes read")
    for worker in workers:
        if worker.problem:
            print(f"{worker.label:>24} {worker.problem}")
            continue
        ms = {width: 1e3 * statistics.median(times) for width, times in samples[worker.label].items()}
        size = worker.weight_bytes()
        row = " ".join(f"{value:8.1f}" for value in ms.values())
        bound = f"{size / 1e6:.0f} MB = {1e3 * size / speed:.1f} ms"
        print(f"{worker.label:>24} {row}  {ms[8] / ms[1]:7.2f}   {bound}")
    parameters = arguments.parameters
    if parameters:
        row = " ".join(f"{2e3 * parameters * width / peak:8.1f}" for width in WIDTHS)
        print(f"{'float32 operations':>24} {row}            {parameters / 1e6:.0f} M multiply-adds a token")
    return {"samples": samples, "bytes_per_second": speed, "float32_operations_per_second": peak}


def decode(arguments: argparse.Namespace, workers: list[Worker]) -> dict[str, Any]:
    """The table of tokens a second: plain, with each engine's lookup, and with more drafters of ours."""
    prompts = read_prompts(arguments)
    more = defaultdict[str, list[str]](list)
    for label, name in arguments.drafter:
        more[label].append(name)
    asks = [(worker, drafter) for worker in workers for drafter in (PLAIN, LOOKUP, *more[worker.label])]
    for worker in workers:
        worker.start()
    for worker, drafter in asks:  # the first call allocates
        worker.ask(op="decode", tokens=prompts[0][1], new=8, drafter=drafter)
    runs: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for index, (task, tokens) in _within(arguments, enumerate(prompts)):
        turn = index % len(asks)
        for worker, drafter in asks[turn:] + asks[:turn]:
            found = worker.ask(op="decode", tokens=tokens, new=arguments.new, drafter=drafter)
            if found is not None:
                head = {"prompt": index, "task": task, "label": worker.label, "drafter": drafter}
                runs[worker.label, drafter].append(head | found)
    count = max(map(len, runs.values()), default=0)
    print(f"{count} prompts, at most {arguments.new} new tokens, greedy; tokens/s decoding (end to end), medians")
    print(f"{'':>24} {'drafter':>10} {'plain':>16} {'drafting':>16} {'gain':>6} {'same':>7}")
    for worker, drafter in asks:
        if drafter == PLAIN:
            continue
        plain, mine = runs[worker.label, PLAIN], runs[worker.label, drafter]
        if worker.problem or not mine:
            print(f"{worker.label:>24} {drafter:>10} {worker.problem or 'no run'}")
            continue
        cells = [f"{_median(each, False):.1f} ({_median(each, True):.1f})" for each in (plain, mine)]
        pairs = list(zip(plain, mine, strict=True))
        same = sum(base["tokens"] == other["tokens"] for base, other in pairs)
        gain = statistics.median(_rate(other, False) / _rate(base, False) for base, other in pairs)
        row = f"{cells[0]:>16} {cells[1]:>16} {gain:5.2f}x {f'{same}/{len(pairs)}':>7}"
        print(f"{worker.label:>24} {drafter:>10} {row}")
    return {"runs": [run for each in runs.values() for run in each]}


def start(arguments: argparse.Namespace, workers: list[Worker]) -> dict[str, Any]:
    """The table of seconds to the first token of a new process, and of its memory."""
    tokens = [token for _, prompt in read_prompts(arguments) for token in prompt]
    tokens = (tokens * (arguments.past // len(tokens) + 1))[: arguments.past]
    found: dict[str, list[dict[str, float]]] = {worker.label: [] for worker in workers}
    for turn in _within(arguments, range(arguments.rounds + 1)):
        for worker in workers:
            begin = time.perf_counter()
            worker.start()
            worker.ask(op="decode", tokens=tokens[:SHORT], new=1, drafter=PLAIN)
            seconds = time.perf_counter() - begin
            worker.ask(op="decode", tokens=tokens, new=SHORT, drafter=PLAIN)
            memory = worker.ask(op="memory")
            worker.close()
            if memory and turn:
                found[worker.label].append({"seconds": seconds} | memory)
    print(f"a new process: seconds to its first token ({SHORT} of prompt); MB after {len(tokens)} and {SHORT} new")
    print(f"{'':>24} {'seconds':>8} {'peak':>7} {'anonymous':>10} {'of files':>9}")
    for worker in workers:
        if worker.problem or not found[worker.label]:
            print(f"{worker.label:>24} {worker.problem or 'no run'}")
            continue
        seconds, *sizes = (
            statistics.median(each[name] for each in found[worker.label])
            for name in ("seconds", "peak", "anonymous", "files")
        )
        peak, anonymous, files = (size / 1e6 for size in sizes)
        print(f"{worker.label:>24} {seconds:8.2f} {peak:7.0f} {anonymous:10.0f} {files:9.0f}")
    return {"starts": found}


def _within(arguments: argparse.Namespace, turns: Iterable[Turn]) -> Iterator[Turn]:
    """The turns that begin before ``--seconds`` are over."""
    for turn in turns:
        if arguments.seconds and time.perf_counter() - arguments.begin > arguments.seconds:
            print(f"stopped after --seconds {arguments.seconds}")
            return
        yield turn


def _rate(run: dict[str, Any], end_to_end: bool) -> float:
    """Tokens a second; the first token belongs to the prefill."""
    count = len(run["tokens"])
    seconds: float = run["decode_s"] + (run["prefill_s"] if end_to_end else 0)
    return (count if end_to_end else count - 1) / max(seconds, 1e-9)


def _median(runs: list[dict[str, Any]], end_to_end: bool) -> float:
    return statistics.median(_rate(run, end_to_end) for run in runs)


def _pair(option: str, value: str) -> tuple[str, str]:
    name, equals, path = value.partition("=")
    if not equals:
        raise SystemExit(f"{option} {value}: expected NAME=VALUE")
    return name, path


def _workers(arguments: argparse.Namespace) -> list[Worker]:
    """The engines that were asked for, not started yet."""
    pythons = dict(_pair("--python", value) for value in arguments.python)
    variables = defaultdict[str, dict[str, str]](dict)
    for label, value in arguments.env:
        variables[label].update([_pair("--env", value)])
    labels = [label for label, _, _ in arguments.run]
    for label in [*variables, *(label for label, _ in arguments.drafter)]:
        if label not in labels:
            raise SystemExit(f"--env or --drafter {label}: expected the label of a --run, {', '.join(labels)}")
    if len(set(labels)) < len(labels):
        raise SystemExit(f"--run: a label names one run, got {', '.join(labels)}")
    return [
        Worker(label, kind, path, pythons.get(kind), arguments.threads, variables[label])
        for label, kind, path in arguments.run
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["steps", "decode", "start"])
    parser.add_argument("--run", nargs=3, action="append", required=True, metavar=("LABEL", "KIND", "PATH"))
    parser.add_argument("--python", action="append", default=[], metavar="KIND=INTERPRETER")
    parser.add_argument("--env", nargs=2, action="append", default=[], metavar=("LABEL", "NAME=VALUE"))
    parser.add_argument("--drafter", nargs=2, action="append", default=[], metavar=("LABEL", "NAME"))
    parser.add_argument("--bundle", type=Path, required=True, help="Whose tokenizer and template prompts go through.")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with 'turns' or 'prompt'; plain or gz.")
    parser.add_argument("--tasks", nargs="+", help="Of the prompts; all of them unless told otherwise.")
    parser.add_argument("--count", type=int, default=2, help="Prompts of each task.")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--longest", type=int, default=1024, help="Tokens of prompt and answer at most.")
    parser.add_argument("--past", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parameters", type=int, default=0, help="Multiply-adds a token, for the bound by operations.")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0, help="No new round or prompt after so many; 0: all.")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    arguments.begin = time.perf_counter()
    arguments.threads = arguments.threads or physical_cores()
    workers = _workers(arguments)
    print(f"{cpu_model()}, {arguments.threads} threads", flush=True)
    try:
        record = {"steps": steps, "decode": decode, "start": start}[arguments.what](arguments, workers)
    finally:
        for worker in workers:
            worker.close()
    if arguments.json:
        names = ("label", "kind", "path", "variables", "versions", "problem")
        engines = [{name: getattr(worker, name) for name in names} for worker in workers]
        head = {"cpu": cpu_model(), "threads": arguments.threads, "engines": engines}
        arguments.json.write_text(json.dumps(head | record, indent=1))


if __name__ == "__main__":
    main()
