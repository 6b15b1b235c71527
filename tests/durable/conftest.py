"""Durable handlers on real PostgreSQL, with workers in the test's own Trio run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pulse_trio import states
from pulse_trio.client import sync
from pulse_trio.testing.kept import connected, keeping
from pulse_trio.worker.durable import cut_blocks, quiet, resuming, seen
from pulse_trio.worker.jobs.running_job import RunningJob
from support.grounds import Ground
from support.stores import Window
from support.trees import Trees, cut_clean_ups

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.databases import Databases


@pytest.fixture(autouse=True)
def late_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed attempt is due again in an hour, so that no burst runs it by chance: the delay is drawn from 0 on."""
    monkeypatch.setattr(states, "retry_delay", lambda _: 3600.0)


@pytest.fixture(autouse=True)
def no_replay_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that stands still, which would go on after ten seconds, never does: the test fails."""
    _stand_still(monkeypatch, 3600.0)


@pytest.fixture(autouse=True)
def lost_workers_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """When they know that they have lost a job."""
    lose = RunningJob.lose

    def lose_and_cut(job: RunningJob) -> None:
        lose(job)
        if job.transaction != "settling":  # the worker waits for the answer to its COMMIT
            cut_clean_ups(job)

    monkeypatch.setattr(RunningJob, "lose", lose_and_cut)


@pytest.fixture
def replay_stands_still(no_replay_stands_still: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on after half a second: the plain code of the test is another one in a later attempt."""
    _stand_still(monkeypatch, 0.5)


def _stand_still(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(seen, "_LONG", seconds)
    monkeypatch.setattr(resuming, "_LONG", seconds)
    monkeypatch.setattr(quiet, "_LONGEST", seconds)
    monkeypatch.setattr(cut_blocks, "_LONGEST", seconds)


@pytest.fixture(autouse=True)
def kept_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A blocking client leaves its connection to the next call of one: a new one costs the server twenty times what a call
    does."""
    monkeypatch.setattr(sync, "connect_sync", connected)


@pytest.fixture(scope="module")
def ground(databases: Databases) -> Iterator[Ground]:
    ground = Ground(databases)
    yield ground
    ground.close()


@pytest.fixture
def trees(ground: Ground) -> Iterator[Trees]:
    """On a database without jobs."""
    with ground.taken() as window:
        yield Trees(window)


@pytest.fixture
def own_trees(dsn: str) -> Iterator[Trees]:
    """For a test that changes the database itself, or looks at its sessions."""
    with keeping(dsn), Window(dsn) as window:
        yield Trees(window)
