"""Worker processes under measurement: started, listened to, stopped.

Every worker, ours or a peer's, says the same on its standard output, one JSON object a line, times being CLOCK_MONOTONIC:

    {"ready": t}             it runs and will claim when there is something to claim (not every peer can say so)
    {"first": t}             its first handler was called
    {"ran": n, "at": t}      so many handlers were called so far, the last one at t; every 10 ms while it changes

and ends when its standard input is closed. The clock of a drain runs from the first handler's start to the moment the
database shows that nothing is left, which also covers completions that a peer keeps in memory for a while.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metering import Meter, Reading, costs

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

HERE = Path(__file__).parent
OUR_WORKER = (sys.executable, str(HERE / "worker.py"))


class WorkerProcess:
    """One process that speaks the protocol above."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment} if environment else None,
        )
        self.pid = self._process.pid
        self.said: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self.ran = 0
        self.first: float | None = None
        self.last: float | None = None
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                message: dict[str, Any] = json.loads(line)
            except ValueError:
                print(line, end="", file=sys.stderr)
                continue
            with self._lock:
                self.said.append(message)
            if "first" in message:
                self.first = message["first"]
            if "ran" in message:
                self.ran, self.last = message["ran"], message["at"]

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def heard(self, key: str) -> bool:
        """Whether a message with this key has come."""
        return any(key in message for message in list(self.said))

    def take(self) -> list[dict[str, Any]]:
        """The messages since the last call, which are forgotten here: for runs that would fill the memory."""
        with self._lock:
            taken, self.said = self.said, []
        return taken

    def wait_for(self, key: str, seconds: float = 60) -> None:
        """Waits for a message with this key."""
        wait_until(lambda: self.heard(key) or self.ended, seconds, f"{key!r} from a worker")
        if not self.heard(key):
            raise RuntimeError(f"A worker ended (exit {self._process.returncode}) before it said {key!r}.")

    def stop(self, seconds: float = 20) -> None:
        """Closes its input and waits for its end; kills it if that takes too long."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join(5)


@contextmanager
def workers(
    command: Sequence[str], count: int = 1, environment: Mapping[str, str] | None = None
) -> Generator[list[WorkerProcess]]:
    """So many processes of one command, stopped at the end of the block."""
    started = [WorkerProcess(command, environment) for _ in range(count)]
    try:
        yield started
    finally:
        for worker in started:
            worker.stop()


def wait_until(holds: Callable[[], bool], seconds: float, what: str, pause: float = 0.002) -> None:
    """Polls until something holds. Raises `TimeoutError`."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"Waited {seconds:g} s for {what}.")
        time.sleep(pause)


def our_worker(dsn: str, **settings: Any) -> list[str]:
    """The command of worker.py with these settings."""
    return [*OUR_WORKER, json.dumps({"dsn": dsn, **settings})]


def drain(
    dsn: str,
    command: Sequence[str],
    jobs: int,
    *,
    processes: int = 1,
    left: str = "SELECT count(*) FROM pulse.job",
    environment: Mapping[str, str] | None = None,
    limit: float = 600,
    cut: float | None = None,
    gate: Callable[[], object] | None = None,
) -> dict[str, Any]:
    """Runs workers until `jobs` handlers were called and the statement `left` gives 0; returns rate and costs.

    The worker processes start with the clock stopped; it starts when the first of them calls a handler. `cut`: after so many
    seconds the rate is that of the handlers called by then, whatever is left. `gate` is called when all workers are ready, and
    lets them have the jobs: otherwise the first of several is measured while the others start.
    """
    with Meter(dsn) as meter, workers(command, processes, environment) as started:
        if gate is not None:
            for worker in started:
                worker.wait_for("ready")
            time.sleep(0.3)  # what a worker does once, at its start
            gate()
        began = _wait_for_first(meter, started, limit)
        first = min(w.first for w in started if w.first is not None)

        def finished() -> bool:
            return sum(w.ran for w in started) >= jobs or all(w.ended for w in started)

        def too_slow() -> bool:
            return cut is not None and time.monotonic() > first + cut

        wait_until(lambda: finished() or too_slow(), limit, "the handlers")
        if not finished():
            jobs = sum(w.ran for w in started)
        else:
            wait_until(lambda: not meter.query(left)[0][0], 60, "the last completions", pause=0.005)
        ended = time.monotonic()
        used = costs(began, meter.read([w.pid for w in started]), jobs)
        ran = sum(w.ran for w in started)
        progress = [w.said for w in started]
    if ran < jobs:
        raise RuntimeError(f"Only {ran} of {jobs} handlers were called.")
    return {"rate": jobs / (ended - first), "seconds": ended - first, "ran": ran, **used, "progress": progress}


def _wait_for_first(meter: Meter, started: Sequence[WorkerProcess], limit: float) -> Reading:
    wait_until(lambda: any(w.first or w.ended for w in started), limit, "the first handler", pause=0.0005)
    if not any(w.first for w in started):
        raise RuntimeError("A worker ended before its first handler.")
    return meter.read([w.pid for w in started])


def rates(said: Sequence[dict[str, Any]], borders: Sequence[float]) -> list[float]:
    """Jobs a second between counts of handlers, from a worker's reports; the moment of each count is interpolated."""
    points = [(0, next(message["first"] for message in said if "first" in message))]
    points += [(message["ran"], message["at"]) for message in said if "ran" in message]
    times = [_time_of(border, points) for border in borders]
    steps = zip(itertools.pairwise(borders), itertools.pairwise(times), strict=True)
    return [(high - low) / (ended - began) for (low, high), (began, ended) in steps]


def _time_of(count: float, points: Sequence[tuple[int, float]]) -> float:
    for (low, began), (high, ended) in itertools.pairwise(points):
        if low <= count <= high:
            return began + (ended - began) * (count - low) / max(1, high - low)
    return points[-1][1]
