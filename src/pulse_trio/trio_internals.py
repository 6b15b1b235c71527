# pyright: reportPrivateUsage=false
"""The parts of Trio's private side that a worker stands on, gathered in one place and checked at import.

A Trio without one of them stops the program at import, with the name of what is gone and of the version, not a job at two
in the morning. One is not needed to be right, and has a stand-in: which tasks hold a lock.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import trio

if TYPE_CHECKING:
    from collections.abc import Container
    from types import CodeType, ModuleType

SUPPORTED = "trio>=0.31"
"""As in pyproject.toml."""
TRIED = "0.31.0 and 0.35.0"


class TrioContractError(ImportError):
    """The installed Trio is not one that pulse-trio was written for; the message names what differs."""


class _Any:
    """Contains everything."""

    def __contains__(self, _: object) -> bool:
        return True


def _module(name: str) -> ModuleType | None:
    return sys.modules.get(f"trio._core.{name}")


def check() -> None:
    """Compare the installed Trio with what pulse-trio was written for.

    Raises:
        TrioContractError: naming everything that is gone.
    """
    unrolled_run, interrupts = getattr(_module("_run"), "unrolled_run", None), _module("_ki")
    gone = [
        name
        for name, there in {
            "Task._child_nurseries": hasattr(trio.lowlevel.Task, "_child_nurseries"),
            "Nursery._closed": "_closed" in _code(trio.Nursery.__init__).co_names,
            "trio._core._run.unrolled_run with its local `task`": "task" in _code(unrolled_run).co_varnames,
            "trio._core._ki.KIManager": hasattr(interrupts, "KIManager"),
        }.items()
        if not there
    ]
    if gone:
        raise TrioContractError(
            f"trio {trio.__version__} differs from what pulse-trio was written for ({SUPPORTED}; tried with {TRIED}): "
            + ", ".join(f"{name} is gone" for name in gone)
            + ". Install a version that was tried, or a pulse-trio that knows this one."
        )


def _code(function: Any) -> CodeType:
    """The code of a function; that of this one, which names nothing of Trio's, where there is none."""
    return getattr(function, "__code__", _code.__code__)


def lock_owners() -> Container[trio.lowlevel.Task]:
    """The tasks that hold a lock of Trio's, which Trio keeps up to date. Where it does not say, every task may be one."""
    return getattr(_module("_parking_lot"), "GLOBAL_PARKING_LOT_BREAKER", _Any())


check()

CTRL_C = "trio._core._ki"
"""The module whose signal handler raises KeyboardInterrupt."""
_RUN = "trio._core._run"


def task_run_by(module: object, variables: dict[str, Any]) -> Any:
    """The task that a frame runs, given its module's name and its variables; None if it is not the frame of Trio's loop."""
    return variables.get("task") if module == _RUN else None


def opened_by(task: trio.lowlevel.Task) -> list[trio.Nursery]:
    """The nurseries that a task has opened and not closed, the innermost last: Trio's own list."""
    return task._child_nurseries


def forget(nursery: trio.Nursery) -> None:
    """No task may be started in a nursery from now on, as when its parent task has ended."""
    nursery._closed = True
