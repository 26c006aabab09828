"""``compile``: a bundle's graphs to plans in ``engines/<profile>/``, whole or not at all.

Each graph is lowered (``passes.tensorrt``; ``passes.tree_attention`` for the plugin; ``passes.plain`` for a TensorRT
without the recent operators), compiled by ``engines.tensorrt`` and checked: attention that fell back to plain products,
or a cache that is copied, costs what speculation is to win.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from specexport.engines.ort import TARGET_FILE
from specexport.engines.plan import (
    LOG_SUFFIX,
    PlanProfile,
    PlanRecord,
    plan_graphs,
    plan_names,
    write_plan,
)
from specexport.engines.plugins.tree_attention import OPERATOR, VERSION
from specexport.engines.tensorrt import Built, Job, check_room, compile_plan, estimate
from specexport.engines.tensorrt_module import Compiler, check_capabilities, open_compiler
from specexport.exporter.compile_graph import (
    attention_nodes,
    cache_aliases,
    check_plugin,
    slow_codes,
    source_files,
    target_sizes,
    tensor_infos,
    weight_bytes,
    weight_formats,
)
from specexport.exporter.doctor import memory_sizes
from specexport.exporter.graph_file import DataFile
from specexport.exporter.passes import lone_row, plain, summary, tensorrt, tree_attention
from specexport.exporter.progress import Progress
from specexport.profiles.schema import Profile, load_profile
from specexport.runtime import contract
from specexport.runtime.bundle import ENGINES, Bundle
from specexport.runtime.drafters.recurrent import CHUNK
from specexport.runtime.errors import SpecExportError, UsageError
from specexport.runtime.replacing import NewDirectory, clear

#: Widest profile of a draft model: it is fed chains of what was accepted, and prompts.
_DRAFT_WIDTH = 16
_CACHE_FILE = "timing.cache"
#: Tokens of a prompt that a recurrent head takes at once. Each costs kernels of several megabytes.
_PROMPT_ENTRIES = (16, 64, CHUNK)
_TARGET_DIMS = {contract.NODES_DIM, contract.COMMIT_DIM, contract.ORDER_DIM, contract.SELECT_DIM}


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """What ``compile`` was asked for.

    Attributes:
        bundle: directory. profile: name or path of a device profile. backend: instead of the profile's.
        capabilities: to compile for; empty: the profile's. plugin: attend with our plugin.
        allow_fallback: warn, where attention is not fused or a cache is copied, instead of failing.
    """

    bundle: Path
    profile: str
    backend: str | None = None
    capabilities: tuple[str, ...] = ()
    plugin: bool = False
    allow_fallback: bool = False


@dataclass(frozen=True, slots=True)
class CompileResult:
    """Where the plans lie, and their records, the target's first."""

    folder: Path
    plans: tuple[PlanRecord, ...]


def compile_bundle(options: CompileOptions, progress: Progress) -> CompileResult:
    """Compile every graph of a bundle; plans of the same profile are replaced.

    Raises:
        UsageError: a device, capability or format that does not go together. SpecExportError: the compiler refuses a
            graph, attention or a cache fell back, or there is too little memory or disk.
    """
    bundle = Bundle.load(options.bundle)
    profile = load_profile(options.profile)
    compiler = open_compiler(options.backend or profile.backend)
    capabilities = _capabilities(options, profile, compiler)
    if options.plugin:
        check_plugin(bundle.manifest.target)
    graphs = [TARGET_FILE, *dict.fromkeys(d.graph for d in bundle.manifest.drafters if d.graph is not None)]
    models = {name: ir.load(bundle.path / name) for name in graphs}
    for name, model in models.items():
        check_capabilities(compiler, capabilities, sorted(weight_formats(model, name)))
        if slow := slow_codes(model):
            progress.log(
                f"warning: {name}: no kernel multiplies with {slow[0]} as it is, nor with {len(slow) - 1} more: every "
                "call writes them out in half precision; int4 wants blocks, int8 one scale a row"
            )
    folder = bundle.path / ENGINES / profile.name
    with _replacing(folder) as new:
        records = []
        for name, model in models.items():
            work = _Work(bundle, name, model, profile, compiler, capabilities, options)
            records.append(work.compile(new, progress))
        shutil.rmtree(new / _WORK)
        for record in records:
            write_plan(new, record)
    return CompileResult(folder, tuple(records))


#: Folder of lowered graphs while they are compiled.
_WORK = "lowered"


@dataclass(frozen=True, slots=True)
class _Work:
    """One graph on its way to a plan."""

    bundle: Bundle
    graph: str
    model: ir.Model
    profile: Profile
    compiler: Compiler
    capabilities: tuple[str, ...]
    options: CompileOptions

    def compile(self, folder: Path, progress: Progress) -> PlanRecord:
        """Lower, compile and check; the plan and its log lie in ``folder`` then."""
        plan, _, log = plan_names(self.graph)
        weights, sources = weight_bytes(self.model), source_files(self.bundle, self.graph, self.model)
        attention = sum(node.op_type == "Attention" for node in self.model.graph)
        profiles = self._profiles()
        memory, disk = estimate(weights, attention, len(profiles))
        check_room(memory, disk + weights, folder, memory_sizes()[1])
        with progress.stage(f"lower {self.graph}"):
            plainly = self._lower(folder / _WORK)
            self._check_attention()
        inputs, outputs = (
            tensor_infos(values, self.graph) for values in (self.model.graph.inputs, self.model.graph.outputs)
        )
        aliases, nodes = cache_aliases(self.model.graph), attention_nodes(self.model.graph)
        slots = next((x.shape[2] for x in inputs if x.name.startswith("past_") and len(x.shape) == 4), 0)
        job = Job(
            module=self.compiler.name,
            onnx=str(folder / _WORK / f"{self.graph}.lowered"),
            plan=str(folder / plan),
            log=str(folder / log),
            timing_cache=str(folder / _CACHE_FILE),
            capabilities=self.capabilities if self.compiler.targets else (),
            profiles=[
                {x.name: p.shape(x) for x in inputs if any(isinstance(s, str) for s in x.shape)} for p in profiles
            ],
            memory={"WORKSPACE": self.profile.memory_bytes},
            plugin=self._plugin,
        )
        with progress.stage(f"compile {self.graph}", 100) as stage:

            def report(_: str, done: int, total: int) -> None:
                stage.advance(max(0, round(100 * done / max(total, 1)) - stage.done))

            try:
                built = compile_plan(job, self.compiler, report, nodes, aliases)
            except SpecExportError as error:
                kept = _keep_log(folder / log, folder.parent / f"{self.profile.name}.{log}")
                raise SpecExportError(f"{self.graph}: {error}; build log: {kept}") from None
        self._judge(built, plainly, folder / log, progress)
        kind = self.bundle.manifest.target.precision
        return PlanRecord(
            graph=self.graph,
            plan=plan,
            bytes=built.bytes,
            sha256=built.sha256,
            sources=sources,
            module=self.compiler.name,
            version=self.compiler.version,
            capabilities=self.capabilities,
            slots=int(slots),
            inputs=inputs,
            outputs=outputs,
            aliases=aliases,
            profiles=profiles,
            plugins=(f"::{OPERATOR}:{VERSION}",) if self._plugin else (),
            weights=kind.weights,
            activations=kind.activations,
            layers=attention,
            attention_fused=len(built.fusion.attention),
            cache_tensors=sum(x.name.startswith("present_") for x in outputs),
            cache_in_place=len(built.fusion.caches),
            plain=plainly,
            build_seconds=round(built.seconds, 2),
            peak_rss_bytes=built.peak_rss_bytes,
        )

    @property
    def _plugin(self) -> bool:
        return self.options.plugin and self.graph == TARGET_FILE

    def _profiles(self) -> tuple[PlanProfile, ...]:
        """Sizes that the plan is pinned to."""
        dims = {dim.value for value in self.model.graph.inputs for dim in value.shape or () if not isinstance(dim, int)}
        target = self.bundle.manifest.target
        sizes: list[dict[str, int]] = [{}]
        if dims == _TARGET_DIMS:
            draft = self.graph != TARGET_FILE
            most = min(target.slots // 2, _DRAFT_WIDTH if draft else target.slots)
            sizes = target_sizes(self.profile.widths, most, self.profile.prefill_chunk, target.slots)
        elif dims == {contract.COMMIT_DIM}:
            sizes = [{contract.COMMIT_DIM: size} for size in _entries(self.bundle, self.graph, target.slots)]
        elif dims:
            raise SpecExportError(f"{self.graph} has open dimensions {sorted(map(str, dims))}: build the bundle again")
        return tuple(PlanProfile(index=index, dims=size) for index, size in enumerate(sizes))

    def _lower(self, folder: Path) -> bool:
        """Write the lowered graph, its own tensors and links to the bundle's; whether it is plain."""
        folder.mkdir(exist_ok=True)
        model, lacks = self.model, self.compiler.lacks
        if self.graph == TARGET_FILE:
            summary.lower(model, self.bundle.manifest.target.valid_vocab)
        if self._plugin:
            tree_attention.lower(model, self.bundle.manifest.target.windows)
        lone_row.lower(model, nodes=not self._plugin)
        with DataFile(folder / f"{self.graph}.lowered.data") as data:
            tensorrt.lower(model, data.put)
            if lacks:
                plain.lower(model, lacks)
        for source in source_files(self.bundle, self.graph, model, missing=True):
            if source != self.graph and not (folder / source).exists():
                # Relative: of a bundle that is moved, what a killed process left must not lead out of it.
                os.symlink(os.path.relpath(self.bundle.path / source, folder), folder / source)
        # Not *.onnx: whoever loads the bundle meanwhile would have to check it.
        (folder / f"{self.graph}.lowered").write_bytes(ir.to_proto(model).SerializeToString())
        return bool(lacks) and not self._plugin

    def _check_attention(self) -> None:
        """Refuse before minutes of compiling what cannot be fused."""
        for node in self.model.graph:
            fault = tensorrt.fault(node) if node.op_type == "Attention" and not self.options.allow_fallback else None
            if fault is not None:
                raise SpecExportError(f"{self.graph}: {node.name} cannot be fused: {fault}, or pass --allow-fallback")

    def _judge(self, built: Built, plainly: bool, log: Path, progress: Progress) -> None:
        """Fail or warn where something fell back."""
        if plainly:
            progress.log(
                f"warning: {self.compiler.title} has no {', '.join(self.compiler.lacks)}, and --plugin was not asked "
                f"for: {self.graph} attends with plain products over all cache slots"
            )
            return
        if not built.fusion.reasons:
            return
        name, reason = next(iter(built.fusion.reasons.items()))
        count = len(built.fusion.reasons)
        message = f"{self.graph}: {count} attention layers or caches fell back, first {name}: {reason}"
        if not self.options.allow_fallback:
            kept = _keep_log(log, log.parent.parent / f"{self.profile.name}.{log.name}")
            raise SpecExportError(f"{message}; build log: {kept}; --allow-fallback keeps such a plan")
        progress.log(f"warning: {message}")


def _entries(bundle: Bundle, graph: str, slots: int) -> list[int]:
    """Numbers of tokens that a recurrent head takes at once: each that a step can accept, and a few for prompts."""
    depths = [drafter.options.get("depth") for drafter in bundle.manifest.drafters if drafter.graph == graph]
    depth = max((depth for depth in depths if isinstance(depth, int)), default=8)
    return sorted({size for size in [*range(1, depth + 2), *_PROMPT_ENTRIES] if size <= min(CHUNK, slots)})


def _capabilities(options: CompileOptions, profile: Profile, compiler: Compiler) -> tuple[str, ...]:
    chosen = options.capabilities or tuple(filter(None, [profile.compute_capability]))
    if not chosen:
        raise UsageError(f"profile {profile.name} has no compute_capability: name it with --capability, such as 8.9")
    if not compiler.targets and len(chosen) > 1:
        raise UsageError(f"{compiler.title} compiles for the device at hand only: name one --capability, its own")
    return tuple(dict.fromkeys(chosen))


def _keep_log(log: Path, place: Path) -> Path:
    """Keep the build log of what failed beside the folder of plans; the worker may have ended before it began one."""
    kept = place.with_suffix(f".failed{LOG_SUFFIX}")
    if log.exists():
        shutil.move(log, kept)
    return kept


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A folder to fill that takes the place of ``folder`` when all went well, and otherwise disappears."""
    folder.parent.mkdir(exist_ok=True)
    clear(folder)
    if folder.exists() and any(folder.iterdir()) and not plan_graphs(folder):
        raise UsageError(f"{str(folder)!r} holds something else than plans, so it is not replaced: move it away")
    with NewDirectory(folder) as new:
        if (folder / _CACHE_FILE).is_file():
            shutil.copyfile(folder / _CACHE_FILE, new.path / _CACHE_FILE)
        (new.path / _WORK).mkdir()
        yield new.path
        new.move()


def describe(result: CompileResult) -> list[Mapping[str, object]]:
    """``compile --json``: of each plan what can be looked at without a device."""
    return [
        {
            "graph": record.graph,
            "plan": str(result.folder / record.plan),
            "bytes": record.bytes,
            "module": f"{record.module} {record.version}",
            "capabilities": list(record.capabilities),
            "profiles": [profile.dims for profile in record.profiles],
            "build_seconds": record.build_seconds,
            "peak_rss_bytes": record.peak_rss_bytes,
            "layers": record.layers,
            "attention_fused": record.attention_fused,
            "cache_tensors": record.cache_tensors,
            "cache_in_place": record.cache_in_place,
            "plugins": list(record.plugins),
            "plain": record.plain,
        }
        for record in result.plans
    ]
