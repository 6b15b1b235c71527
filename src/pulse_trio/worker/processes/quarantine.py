"""Runs suspects, the jobs whose worker died with them too often, each in a process of its own beside the worker's other jobs.

The worker claims a suspect and starts a process for it: the same program with the same handlers. That process runs the job,
beats for it and reports it, under a session that the worker has chosen. The worker is the *witness*: it outlives the process
and sees how that ends. No slot of the worker stands empty meanwhile, and nothing else is in the process that dies.

**What a crash proves.** Only a process in which nothing but this job has ever run, and which this worker saw end by itself, is
held against the job (`report_crash(alone=True)`). When the machine is switched off the witness dies too, the lease runs
out, and the watchdog's rescue proves nothing.

**Many at once.** A process whose job has ended takes the next suspect that has not been in quarantine yet, which spares the
start-up. If that one kills it, it has not run alone: it gets a process of its own next time, and only that one counts.

**How soon.** At most `places` processes run at once. A suspect that is due is seen by the claimer's next sweep, or after
`LOOK_EVERY` seconds when the claimer waits for a free slot and does not sweep; then it takes the start of a process.

When the worker is told to stop, so are the processes: they drain, and what is left is released.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import trio

from ...errors import DatabaseUnavailable, StatementRefused
from ...jobs import Outcome
from ...observe import BadRow, QuarantineEnded, QuarantineNotStarted, QuarantineStarted
from ...postgres import reconnect_delay
from ..jobs.kept import BeatStore, Kept
from ..signal import Signal
from .channel import SIGN_OF_LIFE
from .handover import decode_outcome
from .orders import SESSION_VARIABLE, Leave, encode, run_order
from .spawning import Spawned, spawn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ...jobs import Claim
    from ...store import ClaimResult, Settlement
    from ..jobs.job_table import Tally
    from ..plan import Plan
    from ..stopping import Stops

LOOK_EVERY = 2.0
"""Seconds after which this worker looks for suspects itself, if no sweep of the claimer's has done so."""
_ELSEWHERE = 1.0
"""Seconds until another try, when there was nothing to claim: another worker was first, or a limit is reached."""
_UP_WITHIN = 120.0
"""Seconds a process has to import the handlers and to reach the database."""
_NOT_UP_PAUSE = 15.0
"""Seconds before a job is due again whose process did not come up: that is not the job's fault."""
_LAST_REPORTS = 4.0
"""Seconds for what a process reports last, after the clean-up time of its handler."""
_RELEASED = 3
"""The exit code of a process that gave its job back unfinished."""
_CHUNK = 65536


class Launch(NamedTuple):
    """How to start a process with this worker's handlers."""

    command: Sequence[str]
    environment: Mapping[str, str]


class QuarantineStore(BeatStore, Protocol):
    async def suspects_are_due(self, queues: Sequence[str] | None) -> bool: ...

    async def claim_suspect(
        self, queues: Sequence[str] | None, *, session: int | None = None, fresh: bool = True
    ) -> ClaimResult: ...

    async def settle(self, outcomes: Sequence[Outcome], *, unsure: bool = False) -> Settlement: ...

    async def report_crash(self, claim: Claim, seen: str, *, alone: bool) -> bool | None: ...


@dataclass(eq=False)
class _Patient:
    """One job in quarantine, as it was given to a process."""

    kept: Kept
    since: float
    taken: trio.Event = field(default_factory=trio.Event)
    done: trio.Event = field(default_factory=trio.Event)

    @property
    def claim(self) -> Claim:
        return self.kept.claim


@dataclass(eq=False)
class _Ward:
    """One process, and the job it has."""

    spawned: Spawned
    patient: _Patient
    heard: float
    up: trio.Event = field(default_factory=trio.Event)
    first: bool = True
    """Whether nothing but its job has ever run in it."""
    ended_by_us: str | None = None
    """Why this worker killed it."""
    told_to_stop: bool = False
    unread: bytes = b""
    stuck: list[Outcome] = field(default_factory=list["Outcome"])

    @property
    def pid(self) -> int:
        return self.spawned.process.pid

    @property
    def lease(self) -> float:
        """Seconds that its job is leased for."""
        return self.patient.kept.terms.lease

    def signal(self, number: signal.Signals) -> None:
        if self.spawned.process.returncode is None:
            self.spawned.process.send_signal(number)

    def kill(self, why: str) -> None:
        self.ended_by_us = self.ended_by_us or why
        self.signal(signal.SIGKILL)


class Follower(Protocol):
    """What has to know of each job's end."""

    def ended(self, claims: Sequence[Claim]) -> None: ...

    def none_runs(self) -> None: ...


class Quarantine:
    """One worker's. What is given back because the worker stops is counted in `tally`."""

    def __init__(
        self, store: QuarantineStore, launch: Launch, stops: Stops, follower: Follower, tally: Tally, plan: Plan
    ) -> None:
        settings = plan.settings
        self._store = store
        self._launch = launch
        self._stops = stops
        self._follower = follower
        self._tally = tally
        self._queues = settings.queues
        self._places = settings.quarantine_slots
        self._terms = plan.terms
        self._grace = settings.grace
        self._cleanup = settings.cleanup
        self._observer = plan.observer
        self._wards: set[_Ward] = set()
        self._news = Signal()
        self._due = False
        self._looked_at = -math.inf
        self._not_before = -math.inf
        self._failures = 0
        self.running = 0
        """Processes that run, or are being started."""

    def swept(self, due_in: float | None) -> None:
        """What a sweep of the claimer's found: seconds until a suspect is due, None if there is none."""
        self._due = due_in is not None and due_in <= 0
        self._looked_at = trio.current_time()
        if self._due:
            self._news.give()

    # Life

    async def run(self) -> None:
        """Until the worker claims nothing more, and the last process has ended."""
        async with trio.open_nursery() as enders:
            enders.start_soon(self._pass_on)
            async with trio.open_nursery() as self._nursery:
                while not self._stops.hushed.is_set():
                    try:
                        if not await self._begin_one():
                            await self._wait()
                    except (DatabaseUnavailable, StatementRefused) as error:
                        if isinstance(error, StatementRefused):
                            self._observer.emit(BadRow(None, "", "quarantine", str(error)))
                        # That the database is away, the claimer says.
                        self._not_before = trio.current_time() + reconnect_delay(self._failures)
                        self._failures += 1
                        await self._wait()
                    else:
                        self._failures = 0
            enders.cancel_scope.cancel()

    async def _begin_one(self) -> bool:
        if self.running >= self._places or trio.current_time() < self._not_before:
            return False
        if not self._due and trio.current_time() >= self._looked_at + LOOK_EVERY:
            self.swept(0.0 if await self._store.suspects_are_due(self._queues) else None)
        if not self._due:
            return False
        session = secrets.randbits(63) or 1
        claims, sent, *_ = await self._store.claim_suspect(self._queues, session=session)
        # Nothing may be awaited from here on: the job is ours already.
        if not claims:
            self._due = False
            self._not_before = trio.current_time() + _ELSEWHERE
            return False
        self.running += 1
        self._nursery.start_soon(self._serve, self._patient(claims[0], sent))
        return True

    def _patient(self, claim: Claim, sent: float) -> _Patient:
        kept = Kept(self._store, claim, sent, self._terms.of(claim.queue))
        return _Patient(kept, trio.current_time())

    async def _wait(self) -> None:
        """Until there may be something to do."""
        now = trio.current_time()
        if self.running >= self._places:
            until = math.inf
        elif now < self._not_before:
            until = self._not_before
        else:
            until = max(now + 0.01, self._looked_at + LOOK_EVERY)
        with trio.CancelScope(deadline=until):
            await self._news.wait()

    async def _pass_on(self) -> None:
        """What the worker is told, its processes are told."""
        await self._stops.hushed.wait()
        self._news.give()
        await self._stops.stopping.wait()
        self._tell(signal.SIGTERM)
        with trio.move_on_after(self._grace):
            await self._stops.now.wait()
        # Another signal than the first: two of one kind that come before the process looks are one.
        self._tell(signal.SIGINT)
        await trio.sleep(self._cleanup + _LAST_REPORTS)
        for ward in self._wards:
            ward.kill("it did not stop in time")

    def _tell(self, number: signal.Signals) -> None:
        for ward in self._wards:
            ward.told_to_stop = True
            ward.signal(number)

    def _ended(self, claim: Claim) -> None:
        self._follower.ended([claim])
        self._follower.none_runs()

    # One process

    async def _serve(self, patient: _Patient) -> None:
        try:
            await self._serve_in_process(patient)
        finally:
            self.running -= 1
            self._news.give()
            self._ended(patient.claim)

    async def _serve_in_process(self, patient: _Patient) -> None:
        environment = {**self._launch.environment, SESSION_VARIABLE: str(patient.claim.session)}
        try:
            spawned = await spawn(self._launch.command, environment)
        except BaseException as error:  # noqa: ASYNC103 -- all but a refusal of the system is raised again
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _LAST_REPORTS):
                await self._not_started(patient, error)
            if not isinstance(error, OSError):
                raise
            return  # noqa: ASYNC104 -- a refusal
        ward = _Ward(spawned, patient, trio.current_time())
        self._wards.add(ward)
        if self._stops.stopping.is_set():
            # It was being started while the others were told.
            ward.told_to_stop = True
            ward.signal(signal.SIGTERM)
        claim = patient.claim
        self._observer.emit(QuarantineStarted(claim.id, claim.kind, claim.attempt, ward.pid))
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._listen, ward)
                nursery.start_soon(kill_when_silent, ward)
                nursery.start_soon(self._feed, ward)
                await spawned.process.wait()
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await self._end(ward)

    async def _not_started(self, patient: _Patient, error: BaseException) -> None:
        refused = isinstance(error, OSError)
        if refused:
            self._not_before = trio.current_time() + _NOT_UP_PAUSE
            claim = patient.claim
            self._observer.emit(QuarantineNotStarted(claim.id, claim.kind, str(error), _NOT_UP_PAUSE))
        await self._give_back(patient, _NOT_UP_PAUSE if refused else 0.0)

    async def _feed(self, ward: _Ward) -> None:
        """Gives the process its job, and one after another when that has ended."""
        with trio.move_on_after(_UP_WITHIN) as patience:
            if not await ward.patient.kept.until(ward.up.wait):
                ward.kill("the job's lease was lost before it began")
                return
        if patience.cancelled_caught:
            ward.kill(f"it did not begin within {_UP_WITHIN:g} s")
            return
        try:
            while True:
                kept = ward.patient.kept
                await ward.spawned.line.send_all(encode(run_order(kept.claim, kept.sent, kept.terms.lease)) + b"\n")
                if not await kept.until(ward.patient.taken.wait):
                    ward.kill("the job's lease was lost before it began")
                    return
                await ward.patient.done.wait()
                self._tell_end(ward.patient, ward.pid)
                self._ended(kept.claim)
                if not await self._next(ward):
                    break
            await ward.spawned.line.send_all(encode(Leave()) + b"\n")
        except trio.BrokenResourceError:
            return  # it is dead: whoever waits for its end reports that
        await trio.sleep(self._cleanup + _LAST_REPORTS)
        ward.kill("its job had ended, and it did not end")

    async def _next(self, ward: _Ward) -> bool:
        """Claims one more job for a process. Shielded: a claim whose answer nobody hears would be a crash that was none."""
        if self._stops.hushed.is_set():
            return False
        session = ward.patient.claim.session
        with trio.CancelScope(shield=True), suppress(DatabaseUnavailable, StatementRefused):
            claims, sent, *_ = await self._store.claim_suspect(self._queues, session=session, fresh=False)
            if claims:
                claim = claims[0]
                ward.first = False
                ward.patient = self._patient(claim, sent)
                self._observer.emit(QuarantineStarted(claim.id, claim.kind, claim.attempt, ward.pid))
                return True
        return False

    async def _listen(self, ward: _Ward) -> None:
        try:
            async for chunk in ward.spawned.line:
                _take_in(ward, bytes(chunk))
        except trio.BrokenResourceError:
            return  # its end; whoever waits for that sees it

    # Its end

    async def _end(self, ward: _Ward) -> None:
        """The process has ended, or the worker is being cancelled: then it is ended."""
        process = ward.spawned.process
        if process.returncode is None:
            ward.told_to_stop = True
            ward.signal(signal.SIGINT)
            with trio.move_on_after(self._cleanup + _LAST_REPORTS):
                await process.wait()
            ward.kill("the worker stops")
            await process.wait()
        self._wards.discard(ward)
        _hear_the_rest(ward)
        await ward.spawned.line.aclose()
        words = ward.spawned.words.read()
        ward.spawned.words.close()
        patient = ward.patient
        if ward.told_to_stop and (process.returncode == _RELEASED or not patient.done.is_set()):
            self._tally.released += 1
        if patient.done.is_set():
            return
        with trio.move_on_after(_LAST_REPORTS if ward.told_to_stop else patient.kept.terms.lease):
            if ward.stuck:
                await self._until_written(patient, lambda: self._settle(ward.stuck))
            elif ward.told_to_stop:
                await self._give_back(patient, 0.0)
            elif not patient.taken.is_set():
                await self._did_not_come_up(ward)
            else:
                where = f"\n\n{words.stack}" if words.stack else ""
                await self._report_death(ward, process.returncode or 0, where)
        self._ended(patient.claim)

    async def _did_not_come_up(self, ward: _Ward) -> None:
        claim = ward.patient.claim
        why = ward.ended_by_us or how_it_ended(ward.spawned.process.returncode or 0)
        if not ward.up.is_set():
            self._not_before = trio.current_time() + _NOT_UP_PAUSE
        self._observer.emit(QuarantineNotStarted(claim.id, claim.kind, f"process {ward.pid}: {why}", _NOT_UP_PAUSE))
        await self._give_back(ward.patient, _NOT_UP_PAUSE)

    async def _report_death(self, ward: _Ward, code: int, where: str) -> None:
        claim = ward.patient.claim
        alone = ward.first and ward.ended_by_us is None and code != -signal.SIGALRM
        how = f"killed because {ward.ended_by_us}" if ward.ended_by_us is not None else how_it_ended(code)
        seen = f"its quarantine process {ward.pid}: {how}{where}"
        self._tell_end(ward.patient, ward.pid, how, counts=alone)
        await self._until_written(ward.patient, lambda: self._store.report_crash(claim, seen, alone=alone))

    def _tell_end(self, patient: _Patient, pid: int, crash: str | None = None, *, counts: bool = False) -> None:
        claim = patient.claim
        seconds = trio.current_time() - patient.since
        self._observer.emit(QuarantineEnded(claim.id, claim.kind, claim.attempt, pid, seconds, crash, counts))

    async def _give_back(self, patient: _Patient, delay: float) -> None:
        released = Outcome(patient.claim, "released", delay=delay)
        await self._until_written(patient, lambda: self._settle([released]))

    async def _settle(self, outcomes: Sequence[Outcome]) -> bool | None:
        return None if (await self._store.settle(outcomes)).again else True

    async def _until_written(self, patient: _Patient, write: Callable[[], Any]) -> None:
        """Again while the database cannot be reached, or somebody has locked the row; no longer than the lease lasts."""
        failures = 0
        with trio.move_on_after(patient.kept.terms.lease):
            while True:
                with suppress(DatabaseUnavailable):
                    if await write() is not None:
                        return
                await trio.sleep(reconnect_delay(failures))
                failures += 1


async def kill_when_silent(ward: _Ward) -> None:
    """Kills a process that gave no sign of life for its job's lease and a second. Its own alarm clock does so after two
    leases, and says less."""
    await ward.up.wait()
    while True:
        heard, lease = ward.heard, ward.lease
        await trio.sleep_until(heard + lease)
        if ward.heard != heard:
            continue  # the lease counts from the last sign
        # This worker may have been stopped itself: then the signs of life wait in the line.
        await trio.sleep(2 * SIGN_OF_LIFE)
        if ward.heard == heard:
            ward.kill(f"its event loop did not turn for {lease:g} s")
            return


def _take_in(ward: _Ward, chunk: bytes) -> None:
    *lines, ward.unread = (ward.unread + chunk).split(b"\n")
    for line in lines:
        ward.heard = trio.current_time()
        message = json.loads(line)
        if "session" in message:
            ward.up.set()
        if message.get("taken") == ward.patient.claim.id:
            ward.patient.taken.set()
        if message.get("done") == ward.patient.claim.id:
            ward.patient.done.set()
        if "stuck" in message:
            ward.stuck.append(decode_outcome(message["stuck"]))


def _hear_the_rest(ward: _Ward) -> None:
    """What it said just before its end. Not until the line's: what the process has started may hold that open."""
    with suppress(OSError):  # it would block
        while chunk := os.read(ward.spawned.line.socket.fileno(), _CHUNK):
            _take_in(ward, chunk)


def how_it_ended(code: int) -> str:
    """A process's end, from its exit code."""
    if code >= 0:
        return f"ended with exit code {code} before the job had ended"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown to this system"
    return f"killed by signal {-code} ({name})"
