"""`runs="thread"`: a plain function in a thread of its own.

A thread cannot be cancelled: the slot and the lease are kept until it ends, whatever happens meanwhile. What it returns
after its fence was lost is refused when it is reported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from ...jobs import Job
from .outside import OutsideTrio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ..held import Held


def call_in_thread(
    call: Callable[[Job, str], Any], limiter: trio.CapacityLimiter
) -> Callable[[Held, str], Awaitable[Any]]:
    """The call of a plain function."""

    async def in_thread(held: Held, args: str) -> Any:
        job = Job(held.claim, OutsideTrio(held, "thread"))
        return await trio.to_thread.run_sync(call, job, args, abandon_on_cancel=False, limiter=limiter)

    return in_thread
