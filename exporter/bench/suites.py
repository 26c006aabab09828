"""Prompt suites: the public ones by name, or a file of the user's.

Files are JSON lines, plain or gzipped. Data is never part of this package: names are looked up in a data folder.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from specexport.profiles.data_files import prompt_of, read_records
from specexport.runtime.errors import UsageError

#: Where suites lie unless told otherwise: a folder with the files of :data:`SUITES`.
DATA_VARIABLE = "SPECEXPORT_DATA"
#: Suite -> file below the data folder.
SUITES = {
    "spec-bench": "spec_bench/question.jsonl.gz",
    "humaneval": "humaneval/HumanEval.jsonl.gz",
    "gsm8k": "gsm8k/test.jsonl.gz",
}
#: Spec-Bench's 13 categories are 6 tasks (Xia et al. 2024, arXiv 2401.07851): MT-Bench's eight are one of them.
_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@dataclass(frozen=True, slots=True)
class SuitePrompt:
    """One prompt, to be sent as a user's message, and the task it belongs to."""

    task: str
    text: str


def suite_path(name: str, data: Path | None) -> Path:
    """The file of a suite, or the file that ``name`` is.

    Raises:
        UsageError: neither, or no data folder to look in.
    """
    if name not in SUITES:
        path = Path(name)
        if not path.is_file():
            raise UsageError(f"--suite {name}: expected one of {', '.join(SUITES)}, or a file of JSON lines")
        return path
    folder = data or (Path(os.environ[DATA_VARIABLE]) if os.environ.get(DATA_VARIABLE) else None)
    if folder is None:
        raise UsageError(f"--suite {name} needs its data: name the folder with --data or {DATA_VARIABLE}")
    path = folder / SUITES[name]
    if not path.is_file():
        raise UsageError(f"--suite {name}: {path} is not there")
    return path


def read_suite(path: Path, tasks: tuple[str, ...] = (), count: int | None = None) -> list[SuitePrompt]:
    """Prompts of a file, one JSON object a line: ``turns`` (the first counts), ``prompt`` or ``question``, and maybe
    ``category`` or ``task``.

    Args:
        tasks: only these; empty: all. count: as many of each task, spread evenly over the file; None: all.

    Raises:
        UsageError: nothing to read, or a line that is not such an object.
    """
    prompts = [_prompt(record, where) for where, record in read_records(path)]
    known = list(dict.fromkeys(prompt.task for prompt in prompts))
    if missing := [task for task in tasks if task not in known]:
        raise UsageError(f"--task {missing[0]}: {path.name} has {', '.join(known) or 'no prompts'}")
    chosen: list[SuitePrompt] = []
    for task in tasks or known:
        mine = [prompt for prompt in prompts if prompt.task == task]
        wanted = len(mine) if count is None else min(count, len(mine))
        chosen += [mine[place * len(mine) // wanted] for place in range(wanted)]
    if not chosen:
        raise UsageError(f"{path} has no prompts")
    return chosen


def _prompt(record: dict[str, object], where: str) -> SuitePrompt:
    text, task = prompt_of(record, where), record.get("category", record.get("task", "all"))
    if not isinstance(task, str):
        raise UsageError(f"{where}: category or task must be text")
    return SuitePrompt("mt_bench" if task in _MT_BENCH and "turns" in record else task, text)
