"""Calibrated codes for a whole target: GPTQ, one decoder block at a time.

A block's projections are quantised in the order in which they run, each from the inputs that the already quantised
ones before it give, in this block and the earlier ones; so later matrices make good for the errors of earlier ones.
Blocks are quantised when their first matrix is asked for, as a graph's weights are written: memory holds one block and
the hidden states of the calibration text. The same text, options and number of threads give the same codes.

Why not a library's, as of November 2026: ONNX Runtime's quantiser (``matmul_nbits_quantizer``) runs the whole float
graph again for every distinct input of a matrix, takes H from the unquantised model, rounds once more to another grid
after the errors were made good, and writes its own MatMulNBits only. NVIDIA Model Optimizer 0.47 takes a whole loaded
model and a loop that runs it, Olive 0.13 a Hugging Face one, and each brings more than ten packages (scipy, pulp,
pydantic; optuna, pandas, OpenTelemetry); Olive has no act-order with blocks. llm-compressor 0.14 pins Transformers to
5.15 and later; AutoAWQ needs Triton, AutoGPTQ accelerate, datasets and peft; GPTQModel has no wheel. None streams from
a checkpoint, and the method is a page.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import tokenizers
import torch
from torch import Tensor

from specexport.exporter.config import TargetConfig
from specexport.exporter.layers import Block, Linear
from specexport.exporter.quantize import rtn
from specexport.exporter.quantize.gptq import DEFAULTS, GptqOptions, gptq
from specexport.exporter.quantize.layerwise import Layerwise
from specexport.exporter.quantize.plan import Format, Plan
from specexport.exporter.quantize.record import Quantized
from specexport.exporter.quantize.text import Encoder, cut, prefix_of, read_tokens
from specexport.exporter.tokenizer import TokenizerFiles
from specexport.exporter.weights import WeightSource
from specexport.runtime.errors import SpecExportError, UsageError
from specexport.runtime.tokenizer import Tokenizer

#: Tokens of text unless told otherwise, and in one sequence.
DEFAULT_TOKENS = 8192
SEQUENCE = 512
#: Fewer say too little about the inputs of a matrix.
MIN_TOKENS = 128

#: Projections of the halves of a block in the order in which they run; those of a group have the same inputs.
_ATTENTION = (("attention.q_proj", "attention.k_proj", "attention.v_proj"), ("attention.o_proj",))
_MLP = (("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))


def calibration_text(path: Path, tokenizer: Encoder, count: int, slots: int) -> list[tuple[int, ...]]:
    """The start of a file as sequences of at most :data:`SEQUENCE` tokens, each with the tokenizer's prefix.

    Raises:
        UsageError: the file is no text, or has fewer than :data:`MIN_TOKENS` tokens.
    """
    tokens = read_tokens(path, tokenizer, count)
    if len(tokens) < MIN_TOKENS:
        raise UsageError(
            f"{path} has {len(tokens)} tokens (of {count} asked for): calibration needs at least {MIN_TOKENS}"
        )
    prefix = prefix_of(tokenizer)
    width = min(SEQUENCE, slots)
    windows = cut(tokens, prefix, width=width, stride=width - len(prefix))
    return [window.tokens for window in windows]


def calibrated_plan(
    plan: Plan,
    text: tuple[Path | None, int | None],
    config: TargetConfig,
    weights: WeightSource,
    slots: int,
    tokenizer: TokenizerFiles,
) -> Plan:
    """The plan with calibrated codes for the projections; as it is where no text is named.

    Args:
        text: the file and how many tokens of it, None for :data:`DEFAULT_TOKENS`.

    Raises:
        UsageError: the text is no use, or the plan has no codes to calibrate.
    """
    path, count = text
    if path is None:
        if count is not None:
            raise UsageError("--calibration-tokens is of a calibration text: name it with --calibrate")
        return plan
    if plan.weights.kind not in ("int4", "int8"):
        raise UsageError(f"--calibrate is for --precision int4 and int8, not {plan.weights.kind}")
    encoder = Tokenizer(tokenizers.Tokenizer.from_buffer(tokenizer.tokenizer_json), tokenizer.tokenizer_config)
    texts = calibration_text(path, encoder, count or DEFAULT_TOKENS, slots)
    codes = Calibrated(config, weights, slots, plan.weights, texts)
    return replace(plan, quantizer=codes, keep=False)  # codes of the checkpoint know nothing of the text


class Calibrated:
    """A :data:`~specexport.exporter.quantize.plan.Quantizer` that knows what the matrices' inputs are like.

    Ask for the matrices of one block before those of the next, each once; the others (embedding, lm_head, and formats
    that are not integers) are rounded to nearest.

    Args:
        slots: S of the bundle. form: of the projections, before it is fitted to their widths.
        sequences: the calibration text. advance: called with 1 after each block.
    """

    def __init__(
        self,
        config: TargetConfig,
        weights: WeightSource,
        slots: int,
        form: Format,
        sequences: list[tuple[int, ...]],
        options: GptqOptions = DEFAULTS,
        advance: Callable[[int], object] = lambda _: None,
    ) -> None:
        self._run = Layerwise(config, weights, slots, sequences)
        self._blocks = self._run.blocks()
        self._form, self._options, self._advance = form, options, advance
        self._codes: dict[str, Quantized] = {}

    def __call__(self, name: str, matrix: Tensor, form: Format) -> Quantized:
        if not name.startswith("layers.") or form.kind not in ("int4", "int8"):
            return rtn.quantizer(name, matrix, form)
        while name not in self._codes:
            found = next(self._blocks, None)
            if found is None:
                raise SpecExportError(f"{name} was asked for out of order: this is a fault of the exporter")
            self._codes.clear()
            self._quantize(*found)
            self._advance(1)
        return self._codes.pop(name)

    def _quantize(self, prefix: str, block: Block) -> None:
        attend = partial(self._run.attend, block)
        for half, groups in ((attend, _ATTENTION), (block.feed, _MLP)):
            for group in groups:
                self._quantize_group(prefix, [(name, _linear(block, name)) for name in group], half)
            self._run.each(half)

    def _quantize_group(self, prefix: str, group: list[tuple[str, Linear]], half: Callable[[Tensor], Tensor]) -> None:
        """Projections with the same inputs, in one half of a block."""
        form = self._form.fitted(group[0][1].weight.shape[0])
        stacked = torch.cat([linear.weight.t() for _, linear in group])
        codes = gptq(stacked, self._hessian(group[0][1], half), form, self._options)
        start = 0
        for name, linear in group:
            count = linear.weight.shape[1]
            own = codes.map_rows(partial(torch.narrow, dim=0, start=start, length=count))
            self._codes[f"{prefix}{name}.weight"] = own
            linear.weight.copy_(own.dequantize().t())
            start += count

    def _hessian(self, linear: Linear, half: Callable[[Tensor], Tensor]) -> Tensor:
        """Mean of ``x x^T`` over the inputs of a projection."""
        width = linear.weight.shape[0]
        total, count = torch.zeros(width, width), 0

        def collect(_: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
            nonlocal count
            rows = inputs[0].reshape(-1, width)
            total.addmm_(rows.t(), rows)
            count += rows.shape[0]
            raise _Collected

        handle = linear.register_forward_pre_hook(collect)
        for state in self._run.states:
            with suppress(_Collected):
                half(state)
        handle.remove()
        return total / count


def _linear(block: Block, name: str) -> Linear:
    found = block.get_submodule(name)
    assert isinstance(found, Linear)
    return found


class _Collected(Exception):
    """Half a block has run far enough."""
