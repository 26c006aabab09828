"""Where the compiled kernels are. A package that was installed without a C++ compiler has none."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from specexport.runtime.errors import UsageError

#: Names a library to use instead of the installed one; ``off`` means none.
VARIABLE = "SPECEXPORT_KERNELS"
NAME = "libspecexport_kernels.so"


@cache
def kernels_library() -> Path | None:
    """The library of kernels for ONNX Runtime's CPU provider, None when there is none or it is switched off.

    The answer is that of the first call, as ONNX Runtime keeps a library that it has loaded.

    Raises:
        UsageError: ``SPECEXPORT_KERNELS`` names something that is no file.
    """
    if chosen := os.environ.get(VARIABLE):
        return _chosen(chosen)
    return next((path for path in _installed() if path.is_file()), None)


def _chosen(value: str) -> Path | None:
    if value == "off":
        return None
    # Absolute, so that a later change of directory does not matter.
    path = Path(value).absolute()
    if not path.is_file():
        raise UsageError(f"{VARIABLE}={value} is no file: give the path of a {NAME}, or off, or unset it")
    return path


def _installed() -> list[Path]:
    """Where it may be: beside this file (a wheel), or where the package is installed when this is its source tree."""
    places = [Path(__file__).with_name(NAME)]
    with suppress(PackageNotFoundError):
        places.append(Path(str(distribution("specexport").locate_file(f"specexport/engines/kernels/{NAME}"))))
    return places
