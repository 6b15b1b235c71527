"""The stand-ins of suites.py for the two backends that the libraries' own suites are about."""

# Django has no types.
# pyright: basic

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from django.db import connections

from pulse_trio.django import PulseBackend
from pulse_trio.testing import PulseWorker


class DummyBackend(PulseBackend):
    """Has the two methods with which the suites look at what was enqueued."""

    def clear(self) -> None:
        with connections[self.database].cursor() as cursor:
            cursor.execute("TRUNCATE pulse.job, pulse.job_archive, pulse.attempt")

    @property
    def results(self) -> Any:
        with connections[self.database].cursor() as cursor:
            cursor.execute("SELECT id FROM pulse.jobs ORDER BY id")
            return [self.get_result(str(row[0])) for row in cursor.fetchall()]


class ImmediateBackend(PulseBackend):
    """A worker runs what was enqueued before `enqueue` returns."""

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        result = super().enqueue(task, args, kwargs)
        # In a thread that knows nothing of the caller's: asgiref would have the tasks' synchronous parts run in the thread that
        # waits here.
        with ThreadPoolExecutor(1) as alone:
            alone.submit(PulseWorker(self.dsn, self.handlers).drain_sync, timeout=20).result()
        result.refresh()
        return result
