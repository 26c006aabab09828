"""Run a bundle: ``Bundle.load``, then a ``Session`` that decodes speculatively with the tokens of plain decoding.

Needs numpy, onnxruntime, tokenizers and jinja2. Names are imported on first use, so that importing this package costs
next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specexport.runtime.bundle import Bundle as Bundle
    from specexport.runtime.bundle_writer import BundleWriter as BundleWriter
    from specexport.runtime.errors import BundleError as BundleError
    from specexport.runtime.errors import SpecExportError as SpecExportError
    from specexport.runtime.errors import UsageError as UsageError
    from specexport.runtime.manifest import Manifest as Manifest
    from specexport.runtime.sampling import SamplingParams as SamplingParams
    from specexport.runtime.session import Session as Session

_HOMES = {
    "Bundle": "bundle",
    "BundleError": "errors",
    "BundleWriter": "bundle_writer",
    "Manifest": "manifest",
    "SamplingParams": "sampling",
    "Session": "session",
    "SpecExportError": "errors",
    "UsageError": "errors",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
