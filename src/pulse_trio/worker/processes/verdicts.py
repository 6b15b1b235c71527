"""Reports a job whose quarantine process has ended: as a crash, or as released."""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import trio

from ...errors import DatabaseUnavailable
from ...jobs import Outcome
from ...observe import QuarantineEnded, QuarantineNotStarted
from ...postgres import reconnect_delay
from ...states import GIVEN_BACK
from .ward import how_it_ended

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...jobs import Claim
    from ...observe import Observer
    from ...store import Settlement
    from .ward import Patient, Ward

NOT_UP_PAUSE = 15.0
"""Seconds before a job is due again whose process did not start: that is not the job's fault."""


class VerdictStore(Protocol):
    async def settle(self, outcomes: Sequence[Outcome], *, unsure: bool = False) -> Settlement: ...

    async def report_crash(self, claim: Claim, seen: str, *, alone: bool) -> bool | None: ...


class Verdicts:
    """Writes the verdicts for one worker."""

    def __init__(self, store: VerdictStore, observer: Observer) -> None:
        self._store = store
        self._observer = observer

    async def not_started(self, patient: Patient, refusal: OSError | None) -> None:
        """Its process could not be started: the system refused it, or the worker is being cancelled."""
        if refusal is not None:
            claim = patient.claim
            self._observer.emit(QuarantineNotStarted(claim.id, claim.kind, str(refusal), NOT_UP_PAUSE))
        await self.give_back(patient, NOT_UP_PAUSE if refusal is not None else 0.0)

    async def did_not_come_up(self, ward: Ward) -> None:
        """Its process ended before it took the job."""
        claim = ward.patient.claim
        why = ward.ended_by_us or how_it_ended(ward.spawned.process.returncode or 0)
        self._observer.emit(QuarantineNotStarted(claim.id, claim.kind, f"process {ward.pid}: {why}", NOT_UP_PAUSE))
        await self.give_back(ward.patient, NOT_UP_PAUSE)

    async def report_death(self, ward: Ward, code: int, where: str) -> None:
        """Its process ended with the job in it."""
        claim = ward.patient.claim
        alone = ward.first and ward.ended_by_us is None and code != -signal.SIGALRM
        how = f"killed because {ward.ended_by_us}" if ward.ended_by_us is not None else how_it_ended(code)
        seen = f"its quarantine process {ward.pid}: {how}{where}"
        self.tell_end(ward.patient, ward.pid, how, counts=alone)
        await self._until_written(ward.patient, lambda: self._store.report_crash(claim, seen, alone=alone))

    def tell_end(self, patient: Patient, pid: int, crash: str | None = None, *, counts: bool = False) -> None:
        """Emits the event for the end of its quarantine."""
        claim = patient.claim
        seconds = trio.current_time() - patient.since
        self._observer.emit(QuarantineEnded(claim.id, claim.kind, claim.attempt, pid, seconds, crash, counts))

    async def settle(self, patient: Patient, outcomes: Sequence[Outcome]) -> None:
        """Writes the outcomes that the process could not write."""
        await self._until_written(patient, lambda: self._settle(outcomes))

    async def give_back(self, patient: Patient, delay: float, why: str = GIVEN_BACK) -> None:
        """Releases the job unfinished; it is due again after `delay` seconds."""
        released = Outcome(patient.claim, "released", delay=delay, error=why)
        await self._until_written(patient, lambda: self._settle([released]))

    async def _settle(self, outcomes: Sequence[Outcome]) -> bool | None:
        return None if (await self._store.settle(outcomes)).again else True

    async def _until_written(self, patient: Patient, write: Callable[[], Any]) -> None:
        """Repeats while the database cannot be reached or another transaction has locked the row, but no longer than the lease
        lasts."""
        failures = 0
        with trio.move_on_after(patient.kept.terms.lease):
            while True:
                with suppress(DatabaseUnavailable):
                    if await write() is not None:
                        return
                await trio.sleep(reconnect_delay(failures))
                failures += 1
