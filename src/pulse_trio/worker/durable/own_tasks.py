"""The tasks in a job's nursery that belong to the worker, and not to the handler."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from ...trio_internals import coroutine_of
from ..jobs.running_job import HEARTBEAT

if TYPE_CHECKING:
    from collections.abc import Callable

    import trio

F = TypeVar("F", bound="Callable[..., object]")

_CODES = {HEARTBEAT}


def own_task(function: F) -> F:
    """Marks a function as one that the worker starts in a job's nursery."""
    _CODES.add(function.__code__)
    return function


def is_own(task: trio.lowlevel.Task) -> bool:
    """Whether the task belongs to the worker."""
    return getattr(coroutine_of(task), "cr_code", None) in _CODES
