"""Runs suspects, the jobs whose worker died with them too often, each in a process of its own beside the worker's other jobs.

The worker claims a suspect and starts a process for it: the same program with the same handlers. That process runs the job,
beats for it and reports it, under a session that the worker has chosen. The worker is the *witness*: it outlives the process
and sees how it ends. No slot of the worker stands empty meanwhile, and no other job is in the process that dies.

**What a crash proves.** A crash counts against the job (`report_crash(alone=True)`) only if no other job has ever run in the
process, and this worker saw it end by itself. When the machine is switched off the witness dies too, the lease runs out, and
the watchdog's rescue proves nothing.

**Many at once.** A process whose job has ended takes the next suspect that has not been in quarantine yet, which spares the
start-up. If that one kills it, it has not run alone: it gets a process of its own next time, and only that one counts.

**How soon.** At most `places` processes run at once. The claim loop's next sweep sees a due suspect; while the loop waits for a
free slot and does not sweep, this worker looks after `LOOK_EVERY` seconds. Then a process has to start.

When the worker is told to stop, so are the processes: they drain, and jobs that still run are released.
"""

from __future__ import annotations

import math
import secrets
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import trio

from ...errors import DatabaseUnavailable, StatementRefused
from ...observe import BadRow, QuarantineStarted
from ...postgres import reconnect_delay
from ...states import STOPPED
from ..jobs.kept import BeatStore, Kept
from ..signal import Signal
from .orders import SESSION_VARIABLE, Leave, encode, run_order
from .spawning import spawn
from .verdicts import NOT_UP_PAUSE, Verdicts, VerdictStore
from .ward import Patient, Ward, hear_the_rest, kill_when_silent, take_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...jobs import Claim
    from ...store import ClaimResult
    from ..jobs.job_table import Follower, Tally
    from ..plan import Plan
    from ..stopping import Stops
    from .spawning import Launch

LOOK_EVERY = 2.0
"""Seconds after which this worker looks for suspects itself, if no sweep of the claim loop has done so."""
_ELSEWHERE = 1.0
"""Seconds until the next try after a claim brought no suspect: another worker was first, or a limit is reached."""
_UP_WITHIN = 120.0
"""Seconds a process has to import the handlers and to reach the database."""
_LAST_REPORTS = 4.0
"""Seconds for the last reports of a process, after the clean-up time of its handler."""
_RELEASED = 3
"""The exit code of a process that released its job unfinished."""


class SuspectClaims(Protocol):
    async def suspects_are_due(self, queues: Sequence[str] | None) -> bool: ...

    async def claim_suspect(
        self, queues: Sequence[str] | None, *, session: int | None = None, fresh: bool = True
    ) -> ClaimResult: ...


class QuarantineStore(Protocol):
    @property
    def claims(self) -> SuspectClaims: ...

    @property
    def beats(self) -> BeatStore: ...

    @property
    def reports(self) -> VerdictStore: ...


class Looks:
    """When this worker looks for suspects, and what it found."""

    def __init__(self) -> None:
        self.due = False
        """Whether a suspect is due, as far as is known."""
        self.news = Signal()
        self._looked_at = -math.inf
        self._not_before = -math.inf

    @property
    def paused(self) -> bool:
        """Whether no suspect may be started now."""
        return trio.current_time() < self._not_before

    @property
    def is_due(self) -> bool:
        """Whether it is time to look."""
        return not self.due and trio.current_time() >= self._looked_at + LOOK_EVERY

    def found(self, *, due: bool) -> None:
        """Records the result of a look."""
        self.due = due
        self._looked_at = trio.current_time()
        if due:
            self.news.give()

    def pause(self, seconds: float) -> None:
        """No suspect is started for that many seconds."""
        self._not_before = trio.current_time() + seconds

    async def wait(self, *, full: bool) -> None:
        """Waits until there may be something to do; `full`: no more processes may run."""
        now = trio.current_time()
        if full:
            until = math.inf
        elif now < self._not_before:
            until = self._not_before
        else:
            until = max(now + 0.01, self._looked_at + LOOK_EVERY)
        with trio.CancelScope(deadline=until):
            await self.news.wait()


class Quarantine:
    """Runs the suspects of one worker. `tally` counts the jobs that are released because the worker stops."""

    def __init__(
        self, store: QuarantineStore, launch: Launch, stops: Stops, follower: Follower, tally: Tally, plan: Plan
    ) -> None:
        self._store = store
        self._launch = launch
        self._stops = stops
        self._follower = follower
        self._tally = tally
        self._plan = plan
        self._verdicts = Verdicts(store.reports, plan.observer)
        self._wards: set[Ward] = set()
        self._looks = Looks()
        self.running = 0
        """The number of processes that run or are being started."""

    def swept(self, due_in: float | None) -> None:
        """Takes a finding of the claim loop's sweep: seconds until a suspect is due, None if there is none."""
        self._looks.found(due=due_in is not None and due_in <= 0)

    # Life

    async def run(self) -> None:
        """Runs suspects until the worker claims nothing more and the last process has ended."""
        failures = 0
        async with trio.open_nursery() as enders:
            enders.start_soon(self._pass_on)
            async with trio.open_nursery() as nursery:
                while not self._stops.hushed.is_set():
                    try:
                        if not await self._begin_one(nursery):
                            await self._looks.wait(full=self._is_full)
                    except (DatabaseUnavailable, StatementRefused) as error:
                        if isinstance(error, StatementRefused):
                            self._plan.observer.emit(BadRow(None, "", "quarantine", str(error)))
                        # The claim loop reports that the database is away.
                        self._looks.pause(reconnect_delay(failures))
                        failures += 1
                        await self._looks.wait(full=self._is_full)
                    else:
                        failures = 0
            enders.cancel_scope.cancel()

    @property
    def _is_full(self) -> bool:
        return self.running >= self._plan.settings.quarantine_slots

    async def _begin_one(self, nursery: trio.Nursery) -> bool:
        looks, queues = self._looks, self._plan.settings.queues
        if self._is_full or looks.paused:
            return False
        if looks.is_due:
            looks.found(due=await self._store.claims.suspects_are_due(queues))
        if not looks.due:
            return False
        session = secrets.randbits(63) or 1
        claims, sent, *_ = await self._store.claims.claim_suspect(queues, session=session)
        # Do not await anything from here on: this worker already owns the job.
        if not claims:
            looks.due = False
            looks.pause(_ELSEWHERE)
            return False
        self.running += 1
        nursery.start_soon(self._serve, self._patient(claims[0], sent))
        return True

    def _patient(self, claim: Claim, sent: float) -> Patient:
        kept = Kept(self._store.beats, claim, sent, self._plan.terms.of(claim.queue))
        return Patient(kept, trio.current_time())

    async def _pass_on(self) -> None:
        """Passes the orders to the worker on to its processes."""
        await self._stops.hushed.wait()
        self._looks.news.give()
        await self._stops.stopping.wait()
        self._tell(signal.SIGTERM)
        with trio.move_on_after(self._plan.settings.grace):
            await self._stops.now.wait()
        # Another signal than the first: two of one kind that arrive before the process looks count as one.
        self._tell(signal.SIGINT)
        await trio.sleep(self._plan.settings.cleanup + _LAST_REPORTS)
        for ward in self._wards:
            ward.kill("it did not stop in time")

    def _tell(self, number: signal.Signals) -> None:
        for ward in self._wards:
            ward.told_to_stop = True
            ward.signal(number)

    def _ended(self, claim: Claim) -> None:
        self._follower.ended([claim])
        self._follower.last_job_ended()

    # One process

    async def _serve(self, patient: Patient) -> None:
        try:
            await self._serve_in_process(patient)
        finally:
            self.running -= 1
            self._looks.news.give()
            self._ended(patient.claim)

    async def _serve_in_process(self, patient: Patient) -> None:
        environment = {**self._launch.environment, SESSION_VARIABLE: str(patient.claim.session)}
        try:
            spawned = await spawn(self._launch.command, environment)
        except BaseException as error:  # noqa: ASYNC103 -- all but a refusal of the system is raised again
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _LAST_REPORTS):
                refusal = error if isinstance(error, OSError) else None
                if refusal is not None:
                    self._looks.pause(NOT_UP_PAUSE)
                await self._verdicts.not_started(patient, refusal)
            if not isinstance(error, OSError):
                raise
            return  # noqa: ASYNC104 -- a refusal
        ward = Ward(spawned, patient, trio.current_time())
        self._wards.add(ward)
        if self._stops.stopping.is_set():
            # It was being started while the others were signalled.
            ward.told_to_stop = True
            ward.signal(signal.SIGTERM)
        claim = patient.claim
        self._plan.observer.emit(QuarantineStarted(claim.id, claim.kind, claim.attempt, ward.pid))
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

    async def _feed(self, ward: Ward) -> None:
        """Gives the process its job, and further ones after each has ended."""
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
                self._verdicts.tell_end(ward.patient, ward.pid)
                self._ended(kept.claim)
                if not await self._next(ward):
                    break
            await ward.spawned.line.send_all(encode(Leave()) + b"\n")
        except trio.BrokenResourceError:
            return  # it is dead: the task that waits for its end reports that
        await trio.sleep(self._plan.settings.cleanup + _LAST_REPORTS)
        ward.kill("its job had ended, and it did not end")

    async def _next(self, ward: Ward) -> bool:
        """Claims one more job for a process. Shielded: a claim whose answer is lost would look like a crash that never was."""
        if self._stops.hushed.is_set():
            return False
        session = ward.patient.claim.session
        with trio.CancelScope(shield=True), suppress(DatabaseUnavailable, StatementRefused):
            claims, sent, *_ = await self._store.claims.claim_suspect(
                self._plan.settings.queues, session=session, fresh=False
            )
            if claims:
                claim = claims[0]
                ward.first = False
                ward.patient = self._patient(claim, sent)
                self._plan.observer.emit(QuarantineStarted(claim.id, claim.kind, claim.attempt, ward.pid))
                return True
        return False

    async def _listen(self, ward: Ward) -> None:
        try:
            async for chunk in ward.spawned.line:
                take_in(ward, bytes(chunk))
        except trio.BrokenResourceError:
            return  # its end; the task that waits for it sees it

    # Its end

    async def _end(self, ward: Ward) -> None:
        """The process has ended; or the worker is being cancelled, and the process is ended."""
        process = ward.spawned.process
        if process.returncode is None:
            ward.told_to_stop = True
            ward.signal(signal.SIGINT)
            with trio.move_on_after(self._plan.settings.cleanup + _LAST_REPORTS):
                await process.wait()
            ward.kill("the worker stops")
            await process.wait()
        self._wards.discard(ward)
        hear_the_rest(ward)
        await ward.spawned.line.aclose()
        words = ward.spawned.words.read()
        ward.spawned.words.close()
        patient = ward.patient
        begun = patient.taken.is_set()
        if ward.told_to_stop and begun and (process.returncode == _RELEASED or not patient.done.is_set()):
            self._tally.released += 1
        if patient.done.is_set():
            return
        with trio.move_on_after(_LAST_REPORTS if ward.told_to_stop else patient.kept.terms.lease):
            if ward.stuck:
                await self._verdicts.settle(patient, ward.stuck)
            elif ward.told_to_stop:
                await self._verdicts.give_back(patient, 0.0, STOPPED)
            elif not begun:
                if not ward.up.is_set():
                    self._looks.pause(NOT_UP_PAUSE)
                await self._verdicts.did_not_come_up(ward)
            else:
                where = f"\n\n{words.stack}" if words.stack else ""
                await self._verdicts.report_death(ward, process.returncode or 0, where)
        self._ended(patient.claim)
