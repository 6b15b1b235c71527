"""xdist's workers as forks of one process that has imported pytest, its plugins and the tests: each of seven imported them for
itself, which was two thirds of what its collection cost.

A worker collects by itself, and finds the modules there. xdist starts it as ever, but for the name of its Python: that is a
program that stands in for it (stand_in.py). Where a fork cannot be had, it becomes that Python.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from support.forking import open_forker, variables_of_start

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from typing import Any

    import pytest

TOLD = "TESTS_TO_IMPORT"
"""The variable with the arguments of the run that imports."""
_looked_in: list[str] = []
"""In a fork: `sys.path` when all was imported."""
SCRIPT = """#!{python} -IS
import sys

sys.path.insert(0, {support!r})
from stand_in import main

main({python!r}, {start!r}, {address!r}, "xdist")
"""


@contextlib.contextmanager
def workers_are_forks(config: pytest.Config, specs: Sequence[Any]) -> Generator[None]:
    """While the block runs, `specs` are of workers that are forked. A single one is left alone, and so are those that are not
    started here or with a Python of their own, and a run that is measured: what is imported would be measured elsewhere."""
    measured = any(name.startswith("COVERAGE_") for name in os.environ)
    if measured or len(specs) < 2 or not all(spec.popen and not spec.python for spec in specs):
        yield
        return
    with open_forker({**os.environ, TOLD: json.dumps([os.getcwd(), *arguments(config)])}, "xdist") as forker:
        folder = forker.stand_ins()
        python = folder / "xdist"
        python.write_text(
            SCRIPT.format(
                python=sys.executable, support=str(Path(__file__).parent), address=str(folder / "socket"),
                start=variables_of_start(os.environ),
            )
        )  # fmt: skip
        python.chmod(0o755)
        for spec in specs:
            spec.python = str(python)
        yield


def arguments(config: pytest.Config) -> list[str]:
    """Those of a run that imports what the tests' run does, and no more."""
    settings = [] if config.inipath is None else ["-c", str(config.inipath)]
    return [
        *config.args,
        *settings,
        "--rootdir",
        str(config.rootpath),
        "--collect-only",
        "-qq",
        "-p",
        "no:cacheprovider",
    ]


# In the process that forks, and in its forks


def import_tests() -> bool:
    """Whether all could be imported. Python keeps a module that could not, and a worker would find it and no test in it."""
    import pytest

    here = os.getcwd()
    folder, *given = json.loads(os.environ.pop(TOLD))
    nothing = io.StringIO()
    with contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        os.chdir(folder)
        code = pytest.main(given)
        os.chdir(here)
    _looked_in.extend(sys.path)
    return code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


def find_imported() -> None:
    """In a worker, whose `sys.path` is its own again: what imported modules have put there they will not put there again."""
    sys.path[:0] = [folder for folder in dict.fromkeys(_looked_in) if folder not in sys.path]
