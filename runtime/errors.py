"""User-facing errors: one line that names the value, what was expected and the fix."""

from __future__ import annotations


class SpecExportError(Exception):
    """Something outside the program is wrong (a file, a bundle, a device).

    The message is a single line fit for a terminal. The command line prints it without a traceback and exits with
    :attr:`exit_code`.
    """

    exit_code = 1


class UsageError(SpecExportError):
    """The caller asked for something impossible (a bad option or argument value)."""

    exit_code = 2


class BundleError(SpecExportError):
    """A bundle is damaged, hostile, incomplete, or of a schema this version does not read."""


class CheckpointError(SpecExportError):
    """A checkpoint holds a tensor, key, dtype or file that is not understood, or lacks one that is needed."""
