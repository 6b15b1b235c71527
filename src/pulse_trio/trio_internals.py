# pyright: reportPrivateUsage=false
"""The private parts of Trio that a worker depends on, in one place and checked at import.

A Trio without one of them stops the program at import, with the name of the missing part and the version, instead of failing
a job later. Four parts are optional and have fallbacks: which tasks hold a lock, whether a thread was abandoned, what the
tasks of an open nursery have failed of, and where the order of tasks is drawn.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from random import Random
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Generator, Iterator
    from types import CodeType, FrameType, ModuleType

SUPPORTED = "trio>=0.31"
"""As in pyproject.toml."""
TRIED = "0.31.0 and 0.35.0"


_OF_THREAD = ("token", "abandon_on_cancel", "cancel_register", "task_register")
"""What `trio.from_thread` reads in a thread."""


class TrioContractError(ImportError):
    """pulse-trio does not support the installed Trio; the message names the differences."""


class _Any:
    """A set that contains everything."""

    def __contains__(self, _: object) -> bool:
        return True


def _module(name: str) -> ModuleType | None:
    return sys.modules.get(f"trio._core.{name}")


def check() -> None:
    """Compare the installed Trio with the one pulse-trio was written for.

    Raises:
        TrioContractError: naming every missing part.
    """
    statuses = getattr(_module("_run"), "CancelStatus", None)
    threads = sys.modules.get("trio._threads")
    of_thread = getattr(getattr(threads, "_ParentTaskData", None), "__annotations__", {})
    unrolled_run, interrupts = getattr(_module("_run"), "unrolled_run", None), _module("_ki")
    gone = [
        name
        for name, there in {
            "Task._child_nurseries": hasattr(trio.lowlevel.Task, "_child_nurseries"),
            "Task._cancel_status": hasattr(trio.lowlevel.Task, "_cancel_status"),
            "Task._activate_cancel_status": hasattr(trio.lowlevel.Task, "_activate_cancel_status"),
            "Nursery._cancel_status": "_cancel_status" in _code(trio.Nursery.__init__).co_names,
            "CancelStatus._scope, _parent and effectively_cancelled": all(
                hasattr(statuses, name) for name in ("_scope", "_parent", "effectively_cancelled")
            ),
            "CancelScope._cancel_status and _cancel_called": hasattr(trio.CancelScope(), "_cancel_status")
            and hasattr(trio.CancelScope(), "_cancel_called"),
            "Nursery._closed": "_closed" in _code(trio.Nursery.__init__).co_names,
            "Nursery._parent_waiting_in_aexit": "_parent_waiting_in_aexit" in _code(trio.Nursery.__init__).co_names,
            "trio._core._run.unrolled_run with its local `task`": "task" in _code(unrolled_run).co_varnames,
            "trio._core._ki.KIManager": hasattr(interrupts, "KIManager"),
            "trio._threads.PARENT_TASK_DATA with its four names": set(of_thread) == {*_OF_THREAD}
            and hasattr(threads, "PARENT_TASK_DATA"),
            "trio._threads.Run.run and RunSync.run_sync": hasattr(getattr(threads, "Run", None), "run")
            and hasattr(getattr(threads, "RunSync", None), "run_sync"),
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
    """The code object of a function; if there is none, that of this function, which matches no frame of Trio."""
    return getattr(function, "__code__", _code.__code__)


def lock_owners() -> Container[trio.lowlevel.Task]:
    """The tasks that hold one of Trio's locks, which Trio keeps up to date. If Trio does not say, any task may hold one."""
    return getattr(_module("_parking_lot"), "GLOBAL_PARKING_LOT_BREAKER", _Any())


def in_abandoned_thread() -> bool:
    """Whether the caller runs in a thread of Trio's whose task went on without it (`abandon_on_cancel`). If Trio does not say,
    in none."""
    register = getattr(getattr(sys.modules.get("trio._threads"), "PARENT_TASK_DATA", None), "task_register", None)
    return register is not None and register[0] is None


check()


class _Order:
    """Whether the tasks of one pass go on in the order in which they were started: for ever, or while blocks are open, which
    several threads may have."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._for_ever = False
        self._blocks = 0
        self._before: bool = False
        """Trio's own switch, before the first block."""

    def keep(self) -> None:
        with self._lock:
            self._for_ever = True
            self._set(True, _turn_round)

    def begin(self) -> None:
        with self._lock:
            before = self._set(True, _turn_round)
            if self._blocks == 0:
                self._before = before
            self._blocks += 1

    def end(self) -> None:
        with self._lock:
            self._blocks -= 1
            if self._blocks == 0 and not self._for_ever:
                self._set(self._before, None)

    @staticmethod
    def _set(switch: bool, shuffle: Callable[..., None] | None) -> bool:
        """Returns what Trio's switch was."""
        run: Any = _module("_run")
        drawn, before = getattr(run, "_r", None), getattr(run, "_ALLOW_DETERMINISTIC_SCHEDULING", None)
        if before is None or not isinstance(drawn, Random) or not hasattr(trio.lowlevel.Task, "_counter"):
            return False
        # Made for tests under Hypothesis: a pass sorts its tasks, shuffles them, and takes them from the end.
        run._ALLOW_DETERMINISTIC_SCHEDULING = switch
        vars(drawn).pop("shuffle", None)
        if shuffle is not None:
            vars(drawn)["shuffle"] = shuffle
        return before


_order = _Order()


def keep_order() -> None:
    """From now on the tasks of this process that can go on in one pass of Trio's loop do so in the order in which they were
    started: also those that wait for one event, or that are cancelled together, which Trio keeps in sets. As it is, Trio
    draws the order of each pass, so that no program relies on it. If Trio draws elsewhere, it stays so."""
    _order.keep()


@contextmanager
def order_kept() -> Generator[None]:
    """The same while the block runs; then Trio draws again, unless `keep_order` was called."""
    _order.begin()
    try:
        yield
    finally:
        _order.end()


def _turn_round(tasks: list[trio.lowlevel.Task]) -> None:
    tasks.reverse()


CTRL_C = "trio._core._ki"
"""The module whose signal handler raises KeyboardInterrupt."""
_RUN = "trio._core._run"


def runs_tasks(module: object) -> bool:
    """Whether the frames of this module are those of Trio's loop."""
    return module == _RUN


def task_run_by(module: object, variables: dict[str, Any]) -> Any:
    """The task that a frame runs, given its module's name and its variables; None if it is not the frame of Trio's loop."""
    return variables.get("task") if module == _RUN else None


def opened_by(task: trio.lowlevel.Task) -> list[trio.Nursery]:
    """The nurseries that a task has opened and not closed, the innermost last: Trio's own list."""
    return task._child_nurseries


def failures_in(nursery: trio.Nursery) -> list[BaseException]:
    """What tasks of a nursery that is open, and its body, have ended with. If Trio does not say, none has."""
    return list(getattr(nursery, "_pending_excs", ()))


def tasks_from(root: trio.lowlevel.Task | None) -> Iterator[trio.lowlevel.Task]:
    """The task and all below it, in the nurseries that they have opened. None: there is none."""
    tasks = [] if root is None else [root]
    while tasks:
        task = tasks.pop()
        for opened in opened_by(task):
            tasks.extend(opened.child_tasks)
        yield task


def scopes_around(task: trio.lowlevel.Task) -> Iterator[trio.CancelScope]:
    """The scopes that a task is in, the innermost first, those around the nursery that it was started in included."""
    status = task._cancel_status
    while status is not None:
        yield status._scope
        status = status._parent


def is_cancelled(task: trio.lowlevel.Task) -> bool:
    """Whether a scope around a task is cancelled, and no clean-up inside of it goes on."""
    return task._cancel_status.effectively_cancelled


def is_cancelled_in(scope: object) -> bool:
    """Whether what stands in an `innermost_scope` is cancelled. If Trio does not say, it is not."""
    return bool(getattr(scope, "effectively_cancelled", False))


def is_cancelled_around(scope: trio.CancelScope) -> bool:
    """The same of what is around an open scope."""
    status = scope._cancel_status
    return status is not None and status._parent is not None and status._parent.effectively_cancelled


def was_cancelled(scope: trio.CancelScope) -> bool:
    """`cancel_called` of a scope without a deadline, for those who ask often: that one asks for the time, too."""
    return scope._cancel_called


def innermost_scope(owner: trio.lowlevel.Task | trio.Nursery) -> object:
    """The innermost scope that is open in a task, or was when a nursery was opened. With a Trio that keeps it elsewhere each
    job gets a new nursery."""
    return getattr(owner, "_cancel_status", owner)


def leave_foreign_scopes(task: trio.lowlevel.Task) -> bool:
    """Has a task stand in the nursery that it was started in, and in no scope of its own, where another task has closed scopes
    around it. Trio would end that nursery with an error when the task ends. Returns whether it was so."""
    nursery = task.parent_nursery
    if nursery is None or task._cancel_status is nursery._cancel_status:
        return False
    task._activate_cancel_status(nursery._cancel_status)
    return True


def forget(nursery: trio.Nursery) -> None:
    """Close a nursery for new tasks, as when its parent task has ended."""
    nursery._closed = True


def waits_for_children(nursery: trio.Nursery) -> bool:
    """Whether a nursery's own task is at the end of its block, and waits for tasks that still run."""
    return nursery._parent_waiting_in_aexit and bool(nursery.child_tasks)


def waits_for_its_own(task: trio.lowlevel.Task) -> bool:
    """Whether a task is there, with the nursery that it has opened last."""
    nurseries = opened_by(task)
    return bool(nurseries) and waits_for_children(nurseries[-1])


_SYNCHRONISATION = frozenset(("trio._sync", "trio._channel", "trio._core._parking_lot"))


_driven: WeakKeyDictionary[trio.lowlevel.Task, Any] = WeakKeyDictionary()
"""The coroutines that a driver of ours stands for in Trio's eyes."""


def put_between(task: trio.lowlevel.Task, driver: Any) -> None:
    """From now on Trio runs the `driver`, which runs the coroutine of a task that has not begun."""
    _driven[task] = task.coro
    task.coro = driver


def coroutine_of(task: trio.lowlevel.Task) -> Any:
    """That of the function which the task was started with, whoever drives it."""
    return _driven.get(task, task.coro) if _driven else task.coro


def waits_for_another_task(task: trio.lowlevel.Task) -> bool:
    """Whether a task waits in a lock, a limiter, a semaphore, an event or a channel of Trio's, for what another task does. If
    Trio keeps these elsewhere, no task does."""
    return _synchronised(task) is not None


def waits_for_others(task: trio.lowlevel.Task) -> bool:
    """Whether a task waits for other tasks, in one of these or at the end of a nursery of its own."""
    return waits_for_its_own(task) or waits_for_another_task(task)


def holders_of_what_awaits(task: trio.lowlevel.Task) -> Container[object]:
    """The tasks that hold the lock or the limiter which a task waits for. Of what has no holders any task may be one."""
    frame = _synchronised(task)
    awaited: Any = None if frame is None else frame.f_locals.get("self")
    if isinstance(awaited, trio.CapacityLimiter):
        return awaited.statistics().borrowers
    return [awaited.statistics().owner] if isinstance(awaited, trio.Lock) else _Any()


def _synchronised(task: trio.lowlevel.Task) -> FrameType | None:
    """The frame of the method, of what it waits in."""
    if getattr(task, "_abort_func", None) is None:
        return None  # it is about to run
    awaited: Any = coroutine_of(task)
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None and frame.f_globals.get("__name__") in _SYNCHRONISATION:
            return frame
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return None


_threads: Any = sys.modules["trio._threads"]


def as_thread_of(task: list[trio.lowlevel.Task], cancelled: list[Any], token: trio.lowlevel.TrioToken | None) -> None:
    """From now on `trio.from_thread` works in this thread as in one that `task` waits for in `trio.to_thread.run_sync`.
    `cancelled` holds what raises the task's cancellation, or None."""
    data = _threads.PARENT_TASK_DATA
    data.token, data.abandon_on_cancel, data.cancel_register, data.task_register = token, False, cancelled, task


def as_thread_of_none() -> None:
    """From now on `trio.from_thread` knows no task in this thread."""
    _threads.PARENT_TASK_DATA.__dict__.clear()


async def run_from_thread(message: Any) -> None:
    """Run what `trio.from_thread` sent to the task that waits for its thread, in this task."""
    if isinstance(message, _threads.RunSync):
        message.run_sync()
    else:
        await message.run()
