"""Where a running job is: the Trio tasks of its nursery as a tree, each with the Python frames it waits in."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

from ...trio_internals import coroutine_of
from ..jobs.running_job import HEARTBEAT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType

    import trio


_OURS = ("pulse_trio.worker", "pulse_trio.handlers", "trio", "outcome")


LIMIT = 65536
"""Bytes of a stack. A handler may have thousands of tasks, and nothing else runs while the stack is read."""


def task_tree(task: trio.lowlevel.Task) -> str:
    """The task and all below it, a line for each frame, the innermost last; cut after `LIMIT` characters."""
    lines, size = list[str](), 0
    for line in _lines(task, ""):
        lines.append(line)
        size += len(line) + 1
        if size > LIMIT:
            break
    return "\n".join(lines)


def _lines(task: trio.lowlevel.Task, indent: str) -> Iterator[str]:
    yield f"{indent}task {task.name}"
    for line in frames_text(task.iter_await_frames()).splitlines():
        yield f"{indent}  {line}"
    for nursery in task.child_nurseries:
        for child in sorted(nursery.child_tasks, key=lambda t: t.name):
            # The job's heartbeat is not the handler's.
            if getattr(coroutine_of(child), "cr_code", None) is HEARTBEAT:
                continue
            yield from _lines(child, f"{indent}    ")


def frames_text(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Frames, outermost first, without the worker's and Trio's frames around and below the handler's own (all of them if the
    handler has none)."""
    found = list(frames)
    own = [pair for pair in found if not is_ours(pair[0])]
    return "".join(traceback.StackSummary.extract(iter(own or found)).format()).rstrip()


def is_ours(frame: FrameType) -> bool:
    """Whether a frame belongs to the worker or Trio and not to the handler."""
    module = str(frame.f_globals.get("__name__", ""))
    return any(module == name or module.startswith(f"{name}.") for name in _OURS)


def await_frames(coro: Any) -> Iterator[tuple[FrameType, int]]:
    """The frames in which a suspended coroutine waits, outermost first."""
    while coro is not None:
        frame = getattr(coro, "cr_frame", None) or getattr(coro, "gi_frame", None)
        if frame is None:
            return
        yield frame, frame.f_lineno
        coro = getattr(coro, "cr_await", None) or getattr(coro, "gi_yieldfrom", None)
