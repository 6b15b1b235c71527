"""The line between a worker and the process of its handlers."""

from __future__ import annotations

import socket
from typing import Any, cast

from pulse_trio.worker.jobs.kinds import wire
from pulse_trio.worker.jobs.kinds.line import GONE, Line, Order


def test_a_process_that_goes_before_it_has_said_that_it_runs_leaves_its_worker_alone() -> None:
    """What it was to say has no ticket: the worker, which looked for that, ended with a `ValueError`, with all its jobs."""
    pairs = [socket.socketpair(), socket.socketpair()]
    line = Line(1, pairs[0][0], *pairs[1])
    running = cast("Any", None)  # nothing of it is asked
    started = Order(wire.Importable("app", "work"), running, "{}", None, wire.Load)
    line.expect(started)
    assert line.hung_up() == []
    assert started.answer is GONE
    for pair in pairs:
        for one in pair:
            one.close()
