"""Which processes a handler has left running, as its own process finds them in /proc."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pulse_trio.worker.jobs.kinds.left_running import left_running

if TYPE_CHECKING:
    from collections.abc import Generator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the children of a thread")
NO_THREAD = "2147483647"


@pytest.fixture
def started() -> Generator[int]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the next listings of our own threads hold beside them: such as have ended since."""
    listdir, gone = os.listdir, list[list[str]]()
    monkeypatch.setattr(
        os, "listdir", lambda path: listdir(path) + (gone.pop() if gone and path == "/proc/self/task" else [])
    )
    return gone


def test_a_process_that_runs_is_found(started: int) -> None:
    assert started in (found := left_running())
    assert 0 not in found


def test_a_thread_that_ends_as_they_are_listed_is_no_process_that_was_left(
    started: int, listed: list[list[str]]
) -> None:
    listed += [[NO_THREAD], [NO_THREAD]]
    assert started in (found := left_running())
    assert 0 not in found
    assert listed == []


def test_where_the_system_does_not_say_one_is_thought_to_be_left(started: int, listed: list[list[str]]) -> None:
    listed += [[NO_THREAD] for _ in range(1000)]
    assert left_running() == {0}
