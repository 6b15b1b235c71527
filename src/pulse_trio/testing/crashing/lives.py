# pyright: reportPrivateUsage=false
"""One life of a job: a worker runs it, is struck at one point, and others run it to its end."""

from __future__ import annotations

from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import trio

from ...errors import ConfigurationError, PulseTrioError
from ...handlers import Handlers
from ...observe import JobEnded
from ...trio_internals import was_cancelled
from ..blocked import ending_blocks
from ..running import WITHOUT_REGISTRY
from ..suspended import at_once
from .durable import add_points
from .process import Process
from .strikes import Strikes
from .wrapping import with_points

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ...handlers import Handler
    from ...jobs import JobRequest
    from ...worker import Worker
    from ...worker.durable.durable import Durable
    from .grounds import Ground, Look
    from .points import CrashPoint, Place

_ATTEMPTS = 100
"""After so many attempts a job counts as one that never ends."""
_SUSPENSIONS = 10
"""After so many suspensions without a new line in its history, a durable handler counts as one that never ends."""
_VAIN = 10
"""After so many workers in a row that did not claim it, a job counts as one that something keeps waiting."""
_TOLD_WITHIN = 100
"""Turns of Trio's loop until a worker that was told of a lost lease has cancelled its handler."""
_HELD = "There it is not suspended, and waits in real time: it is in job.cleanup(), or in a scope with a deadline or a shield"


class NeverEnds(TimeoutError):
    """A handler did not end, or its job came back again and again; or something keeps the job waiting."""


@dataclass(frozen=True)
class Life:
    """What became of a job."""

    job_id: int
    look: Look
    struck: bool
    place: Place | None
    checkpoints: int
    ends: int
    written: list[str] = field(default_factory=list[str])


class _Ends:
    """Hears of the ends of attempts, before they are reported."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.ended = trio.Event()

    def listeners(self) -> Mapping[type[Any], Callable[[Any], None]]:
        return {JobEnded: self._ended}

    def _ended(self, _: JobEnded) -> None:
        if not self._process.killed and self._process.strikes.ends_dead():
            self._process.kill()
        self.ended.set()


async def live(
    ground: Ground,
    handler: Handler[..., Any],
    registry: Handlers | None,
    request: JobRequest,
    point: CrashPoint,
    seconds: float,
) -> Life:
    """Runs a job until it has ended, struck at `point`. Retries are due at once. Raises `NeverEnds`."""
    strikes = Strikes(point, handler.function)
    job_id = await ground.enqueue(request)
    look = await ground.look(job_id)
    waits: list[int] = []
    vain = 0
    for _ in range(_ATTEMPTS):
        before = look.attempt
        await _attempt(ground, handler, registry, strikes, job_id, seconds)
        look = await ground.look(job_id)
        vain = vain + 1 if look.attempt == before and not look.finished else 0
        if vain == _VAIN:
            raise NeverEnds(await _not_started(ground, handler, job_id, ""))
        if look.suspended:
            waits.append(await ground.until_due(job_id))
            if waits[-_SUSPENSIONS:] == [waits[-1]] * _SUSPENSIONS:
                raise NeverEnds(
                    f"the job of {handler.kind!r} was suspended {_SUSPENSIONS} times and its history did not grow. Are the "
                    "keys of its children others in each attempt?"
                )
            look = await ground.look(job_id)
        if look.finished:
            return Life(
                job_id, look, strikes.struck, strikes.place, strikes.checkpoints, strikes.ends, list(ground.written)
            )
        if look.state != "available":
            await ground.hasten(job_id)
    raise NeverEnds(
        f"the job of {handler.kind!r} came back {_ATTEMPTS} times and has not ended; it is {look.state}"
        + (f": {look.error}" if look.error else "")
    )


async def _attempt(
    ground: Ground,
    handler: Handler[..., Any],
    registry: Handlers | None,
    strikes: Strikes,
    job_id: int,
    seconds: float,
) -> None:
    """One worker, from its start to its end or its death."""
    process, struck_before = Process(strikes), strikes.struck
    process.is_durable = handler.durability is not None
    ends = _Ends(process)
    handlers = _alone(handler, process, registry)
    failed: list[Exception] = []
    watching = ExitStack()

    async def work(worker: Worker) -> None:
        try:
            await worker.run()
        except PulseTrioError as error:
            failed.append(error)

    late, dead, blocked = "", False, ""
    may_die = not struck_before and strikes.point.strike == "kill"
    trio.lowlevel.add_instrument(process)
    try:
        async with (
            ground.worker(handlers, ends, may_die=may_die) as worker,
            ground.beside(partial(_keeps_slot, process, worker)),
            trio.open_nursery() as nursery,
        ):
            if ground.has_sockets:
                add_points(worker, process)
            if process.is_durable:
                nursery.start_soon(_stop_when_ended, worker, ends)
            watch = watching.enter_context(ending_blocks("crash_points", worker, seconds))
            process.spawn(nursery, work, worker)
            if not struck_before:
                nursery.start_soon(_lose, ground, process, worker, job_id)
            try:
                with trio.move_on_after(seconds) as patience:
                    await process.over()
                if patience.cancelled_caught:
                    late = _where(worker, handler, process)
                    process.kill()
                    await process.over()
                dead, blocked = process.killed, watch.said
            finally:
                # Also when the test is cancelled or `_lose` fails: a cancellation does not reach a task that waits, shielded,
                # for the loss of its lease, and the nursery waits for that task.
                process.kill()
            nursery.cancel_scope.cancel()
    finally:
        # The abandoned tasks end before the instrument goes.
        with trio.CancelScope(shield=True):
            process.kill()
            await process.over()
        trio.lowlevel.remove_instrument(process)
        watching.close()
        if process.child is not None:
            process.child.collect()
    if blocked:
        raise NeverEnds(blocked)
    if late and (await ground.look(job_id)).waits:
        raise NeverEnds(await _not_started(ground, handler, job_id, f" within {seconds:g} s"))
    if late:
        held = (
            ". A killed attempt may still hold a lock (of a connection that crash_points cannot cut)"
            if struck_before
            else ""
        )
        raise NeverEnds(f"the handler {handler.kind!r} did not end within {seconds:g} s: {late}{held}")
    if failed:
        if registry is None and isinstance(failed[0], ConfigurationError):
            failed[0].add_note(WITHOUT_REGISTRY)
        raise failed[0]
    if dead:
        await ground.rescue(job_id, dead=True)


async def _not_started(ground: Ground, handler: Handler[..., Any], job_id: int, within: str) -> str:
    """What is said of a job that no worker has claimed."""
    reasons = " ".join(await ground.waits_for(job_id)) or "Is its row locked by another transaction?"
    return f"the job of {handler.kind!r} waits, and no worker could start it{within}: {reasons}"


async def _stop_when_ended(worker: Worker, ends: _Ends) -> None:
    """A burst looks for other jobs before it ends, and a durable handler has many attempts."""
    await ends.ended.wait()
    worker.stop()


def _alone(handler: Handler[..., Any], process: Process, registry: Handlers | None) -> Handlers:
    """The handler with its crash points, among the resources and middleware of its registry."""
    handlers = Handlers() if registry is None else copy(registry)
    # Not registered again: that would look for its resources again, in the signature that it shares with the user's.
    handlers._by_kind = {handler.kind: replace(at_once(handler), function=with_points(handler, process))}
    handlers._schedules, handlers._queues, handlers.codec = {}, {}, None
    return handlers


async def _lose(ground: Ground, process: Process, worker: Worker, job_id: int) -> None:
    """When the time comes: the job is rescued by others, or cancelled, and the worker hears of it from its next heartbeat."""
    strikes = process.strikes
    await strikes.losing.wait()
    if strikes.point.strike == "cancel":
        await ground.cancel(job_id)
        await _tell(process, worker)
        return
    worker.quiet()
    if not await ground.rescue(job_id, dead=False):
        # A transaction of the handler's own has locked the job's row, so no worker can take it. As in production the handler
        # goes on: it commits, and has kept its lease; or it rolls back, and the next rescue takes the job.
        strikes.lost()
        worker.stop()
        while not await ground.rescue(job_id, dead=False):
            pass
        return
    await _tell(process, worker)
    worker.stop()


async def _tell(process: Process, worker: Worker) -> None:
    """The next heartbeat says what has happened to the job. Returns when its handler is cancelled."""
    parts = worker._parts
    assert parts is not None  # noqa: S101 -- it runs a job
    held = list(parts.jobs.held)
    async with trio.open_nursery() as nursery:
        for job in held:
            job.beat_due = trio.current_time()
        process.spawn(nursery, parts.services.heartbeats._beat, trio.current_time())
    for _ in range(_TOLD_WITHIN):
        scopes = [job.scope_nursery.cancel_scope for job in held if job.scope_nursery is not None]
        if all(scope.cancel_called for scope in scopes):
            break
        await trio.lowlevel.checkpoint()
    process.strikes.lost()


def _keeps_slot(process: Process, worker: Worker) -> bool:
    """Whether the handler waits where it is not suspended: outside of its durable calls, in a step, in a transaction, under a
    deadline or a shield of its own, for children that it has cancelled, or in a remembered scope that has struck."""
    if process.waits_outside():
        return True
    return any(
        durable.running.transaction is not None
        or any(block.closing for block in durable.blocks)
        or any(was_cancelled(scope.inner) for scope in durable.scopes)
        or durable.suspension.held_by_a_plain_scope
        or any(call.kind == "step" for call in durable.standing.values())
        for durable in _attempts(worker)
    )


def _attempts(worker: Worker) -> list[Durable]:
    """Those of durable handlers that run."""
    parts = worker._parts
    held = () if parts is None else parts.jobs.held
    return [cast("Durable", job.durability) for job in held if hasattr(job, "durability")]


def _where(worker: Worker, handler: Handler[..., Any], process: Process) -> str:
    if handler.runs == "trio":
        waiting = [str(place) for place in process.waits_at()]
    else:
        parts = worker._parts
        waiting = [] if parts is None else [parts.services.calls.where_is(job) for job in parts.jobs.held]
    if any(durable.suspension.held_by_a_plain_scope for durable in _attempts(worker)):
        waiting.append(_HELD)
    return "\n".join(["it waits at", *waiting]) if waiting else "no handler runs"
