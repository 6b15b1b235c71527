"""What `import pulse_trio` brings at once, and what it brings when it is first asked for."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import pulse_trio
import pulse_trio.worker

if TYPE_CHECKING:
    from types import ModuleType

DRIVER = "print(any(name.partition('.')[0] in ('psycopg', 'anyio') for name in sys.modules))"


def said(program: str) -> list[str]:
    """In a Python of its own: this one has imported everything."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    "imported",
    [
        "from pulse_trio import Discard, Handlers, Job, Snooze, current_job",
        "import pulse_trio.worker.jobs.kinds.child",  # what a process of runs="process" starts with
    ],
)
def test_what_declares_and_runs_handlers_needs_no_driver(imported: str) -> None:
    assert said(f"import sys; {imported}; {DRIVER}") == ["False"]


def test_every_public_name_is_there_when_it_is_asked_for() -> None:
    listed = "import pulse_trio; print(*(n for n in pulse_trio.__all__ if n not in dir(pulse_trio)))"
    assert said(listed) == []
    assert said("from pulse_trio import *; print(Worker.__name__, Client.__name__, Child.__name__)") == [
        "Worker",
        "Client",
        "Child",
    ]
    # The next look does not come by `__getattr__`.
    assert said("import pulse_trio; pulse_trio.Worker; print('Worker' in vars(pulse_trio))") == ["True"]
    assert said("import pulse_trio; print(pulse_trio.client.Client is pulse_trio.Client)") == ["True"]


@pytest.mark.parametrize("package", [pulse_trio, pulse_trio.worker])
def test_a_name_that_is_not_there_is_an_attribute_error_that_knows_the_name(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match=r"module 'pulse_trio.*' has no attribute 'Nobody'") as refused:
        package.Nobody  # noqa: B018
    assert (refused.value.name, refused.value.obj) == ("Nobody", package)
    with pytest.raises(ImportError, match="cannot import name 'Nobody'"):
        exec(f"from {package.__name__} import Nobody")  # noqa: S102
