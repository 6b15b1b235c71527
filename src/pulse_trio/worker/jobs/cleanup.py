"""`job.cleanup()`: shields what a handler must do to its end, for `cleanup` seconds from the moment of its cancellation.

A handler that is not cancelled is not hurried: its compensation after a failure may take as long as all else that it does. The
time begins when the job is cancelled (by a request, its timeout, its deadline, its lease, the end of its worker), which moves
the shield's deadline while the block is open. The handler's own scopes are looked at once, when the block is entered: one that
is cancelled by then, or has a deadline, begins the time too. One that is cancelled later does not (Trio tells nobody), and the
block then ends by itself or with the job.

In a durable handler those do not count: it goes on after its scope, and no line would say that its clean-up there was cut
short. The next attempt would begin that again where its history has what came after it.
"""

from __future__ import annotations

import math
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

from ...observe import CleanupCut
from ...states import WISHES

if TYPE_CHECKING:
    from collections.abc import Generator

    from .common import Common
    from .running_job import RunningJob


class CleanUp:
    """The clean-ups of one job that has begun one."""

    __slots__ = ("_common", "_end", "_fixed", "_follows", "_job")

    def __init__(self, job: RunningJob, common: Common) -> None:
        self._job = job
        self._common = common
        self._end = math.inf
        """When all clean-ups of the job must be over, once it is cancelled: clients that wait for it know how long it takes."""
        self._follows: set[trio.CancelScope] = set()
        """The shields whose deadline depends on the job's, which moves with each heartbeat."""
        self._fixed: set[trio.CancelScope] = set()
        """Those that something has cancelled already, or that stand in a scope of the handler's that will end sooner."""

    @contextmanager
    def block(self, *, waits: bool = False) -> Generator[trio.CancelScope]:
        """`waits`: this one waits for the clean-ups of others, for half of the time that is left. They go on without it, so
        nothing is left undone when it is over."""
        scope = self._shield()
        if waits:
            scope.deadline = trio.current_time() + (scope.deadline - trio.current_time()) / 2
        self._common.stops.cleaning.add(self)
        handled, attempt = sys.exception(), getattr(self._job, "durability", None)
        if attempt is not None:
            attempt.cleans_up(scope)
        try:
            with scope:
                yield scope
        except Exception as error:
            # The handler's word on its job, and what it handles, may be raised in it.
            if attempt is not None and error is not handled and not issubclass(type(error), WISHES):
                attempt.clean_up_failed(error)
            raise
        finally:
            if self._job.cancel_reason is not None and scope in self._follows:
                self._end = min(self._end, scope.deadline)
            self._follows.discard(scope)
            self._fixed.discard(scope)
            if not self._follows and not self._fixed:
                self._common.stops.cleaning.discard(self)
        if scope.cancelled_caught and not waits:
            claim, reason = self._job.claim, self._job.cancel_reason
            if reason is not None:
                self._job.cut = (
                    f"CleanupCut: job.cleanup() was cut short, {self._common.cleanup:.3g} s after the cancellation ({reason}): "
                    "what it would still have done is not done"
                )
            self._common.observer.emit(CleanupCut(claim.id, claim.kind, claim.attempt, self._common.cleanup))

    def _shield(self) -> trio.CancelScope:
        limit, around = self._common.cleanup, trio.current_effective_deadline()
        if self._job.cancel_reason is not None:
            deadline = self._end = min(self._end, trio.current_time() + limit)
        elif hasattr(self._job, "durability"):
            around = self._job.deadline
            deadline = around + limit
        elif around == -math.inf:  # a scope of the handler's own is cancelled
            deadline = trio.current_time() + limit
        else:
            deadline = around + limit
        scope = trio.CancelScope(shield=True, deadline=deadline)
        (self._follows if around == self._job.deadline else self._fixed).add(scope)
        return scope

    def deadline_moved(self) -> None:
        """The job's deadline is another one: its lease was renewed, or its timeout begins now."""
        for scope in self._follows:
            scope.deadline = self._job.deadline + self._common.cleanup

    def cancelled(self) -> None:
        """The job is cancelled: the time begins."""
        self._end = min(self._end, trio.current_time() + self._common.cleanup)
        self._fixed |= self._follows
        self._follows.clear()
        for scope in self._fixed:
            scope.deadline = min(scope.deadline, self._end)
