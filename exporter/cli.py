"""The command line: verbs by name, each imported when it is called, and one place that turns errors into exit codes.

Results go to standard output, progress and messages to standard error. Exit codes: 0 done, 1 failed, 2 usage,
130 interrupted, 128 + N ended by signal N: half-done work is removed then, too.
"""

from __future__ import annotations

import io
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from typing import Any

import click

from specexport.runtime.errors import SpecExportError

#: Verb -> module that defines a command of that name. The order is that of the help.
VERBS = {
    "build": "cli_build",
    "compile": "cli_compile",
    "run": "cli_run",
    "bench": "cli_bench",
    "verify": "cli_build",
    "plan": "cli_plan",
    "tune": "cli_plan",
    "profiles": "cli_plan",
    "train": "cli_train",
    "drift": "cli_train",
    "inspect": "cli_inspect",
    "doctor": "cli_inspect",
    "demo": "cli_run",
}


#: A slip of the keyboard must not start a hundred thousand threads.
MAX_THREADS = 1024
#: The same option for every verb that computes.
threads_option = click.option(
    "--threads",
    type=click.IntRange(0, MAX_THREADS),
    default=0,
    metavar="N",
    help="Threads to use. [default: one per physical core]",
)


class _Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = getattr(import_module(f"specexport.exporter.{VERBS[cmd_name]}"), cmd_name)
        return command


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(version("specexport"), prog_name="specexport")
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error (before the verb).")
def specexport() -> None:
    """Export a causal LM and its speculative drafters to ONNX, and decode faster with the same tokens."""


class _Ended(BaseException):
    """A signal that would have ended the process on the spot."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


@contextmanager
def _unwinding() -> Iterator[None]:
    """Make exceptions of signals that end a process, so that it removes what it had half done and what it had started.

    A signal that is ignored (``nohup``) stays so. Only the main thread has handlers.
    """

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one must not stop the cleaning up
        raise _Ended(number)

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    numbers = [signal.Signals[name] for name in names if threading.current_thread() is threading.main_thread()]
    ours = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: what the verb returned, 0 for None.

    Args:
        arguments: what follows the program's name (default: ``sys.argv[1:]``).
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model writes what it likes, a terminal may not have the letters
    debug = "--debug" in arguments[: next((i for i, word in enumerate(arguments) if word in VERBS), None)]
    try:
        with _unwinding():
            code = specexport.main(arguments, prog_name="specexport", standalone_mode=False)
    except _Ended as error:
        return _fail(f"ended by {error.signal.name}", 128 + error.signal)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", 130)
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except SpecExportError as error:
        if debug:
            raise
        return _fail(str(error), error.exit_code)
    except OSError as error:  # but a broken pipe: click ends the process with 1, quietly
        if debug:
            raise
        return _fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", 1)
    return code if isinstance(code, int) else 0


def echo_json(value: Any) -> None:
    """Print one JSON object on standard output (ASCII, so that every terminal and pipe takes it)."""
    import json

    click.echo(json.dumps(value, indent=2, allow_nan=False))


def _fail(message: str, code: int) -> int:
    click.echo(f"specexport: error: {' '.join(message.split())}", err=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
