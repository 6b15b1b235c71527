"""The tasks in a job's nursery that belong to the worker, and not to the handler."""

from __future__ import annotations

from contextlib import suppress
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, ParamSpec

import trio

from ...trio_internals import coroutine_of
from ..jobs.running_job import HEARTBEAT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

P = ParamSpec("P")

_CODES = {HEARTBEAT}


def own_task(function: Callable[P, Awaitable[None]]) -> Callable[P, Coroutine[Any, Any, None]]:
    """Marks a function as one that the worker starts in a job's nursery. A cancellation ends it quietly: by a task that raises
    `Cancelled` the nursery takes its job for one that was cut short, and so did the worker where the handler had returned."""

    async def quietly(*args: P.args, **kwargs: P.kwargs) -> None:
        with suppress(trio.Cancelled):
            await function(*args, **kwargs)

    _CODES.add(quietly.__code__)
    update_wrapper(quietly, function)
    return quietly


def is_own(task: trio.lowlevel.Task) -> bool:
    """Whether the task belongs to the worker."""
    return getattr(coroutine_of(task), "cr_code", None) in _CODES
