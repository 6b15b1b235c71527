"""Ctrl-C in a Trio program with a worker in it: wherever it strikes, the program hears of it and no job keeps its lease."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pulse_trio.testing.faults.processes import clean_environment
from support.stores import Window

if TYPE_CHECKING:
    from pathlib import Path

    from support.forking import Forker

PROGRAM = """
import signal, sys, warnings
warnings.simplefilter("error")
import trio
from pulse_trio import Handlers, Job, Worker, observe

dsn, strikes, embedded = sys.argv[1:]
handlers = Handlers()

@handlers.job
async def quick():
    if strikes == "handler":
        signal.raise_signal(signal.SIGINT)
    await trio.sleep(0)

@handlers.job
async def long(job: Job):
    if strikes == "child":
        job.nursery.start_soon(press)
    await trio.sleep(3600)

async def press():
    signal.raise_signal(signal.SIGINT)

struck = 0

class Instrument:
    def listeners(self):
        return {event: self.hear for event in observe.Event.__args__}

    def hear(self, event):
        # Called by whatever task of the worker's it is that tells the event.
        global struck
        if type(event).__name__ == strikes and not struck:
            struck += 1
            signal.raise_signal(signal.SIGINT)

async def main():
    worker = Worker(handlers, dsn, instruments=[Instrument()], heartbeat=0.3, lease=30, watchdog=0.2, poll=0.1)
    if embedded == "alone":
        await worker.run()
    else:
        async with trio.open_nursery() as nursery:
            await nursery.start(worker.run)
            if embedded == "busy":
                while True:
                    await trio.sleep(0.001)

trio.run(main)
"""


@pytest.mark.parametrize("embedded", ["alone", "nursery", "busy"])
@pytest.mark.parametrize(
    "strikes", ["handler", "child", "WorkerStarted", "JobStarted", "JobEnded", "UnknownKindReleased"]
)
def test_wherever_it_strikes_no_lease_is_kept(
    strikes: str, embedded: str, dsn: str, tmp_path: Path, forker: Forker
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    # Once by Python itself; else by forks, in which a warning is an error as soon as the program begins.
    command = [sys.executable, "-W", "error"] if strikes == "handler" else [str(forker.stand_ins() / "python")]
    with Window(dsn) as window:
        window.enqueue_many(20)
        for _ in range(20):
            window.enqueue(kind="quick")
            window.enqueue(kind="long")
        ended = subprocess.run(
            [*command, str(tmp_path / "program.py"), dsn, strikes, embedded],
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert "KeyboardInterrupt" in ended.stderr
        assert "TrioInternalError" not in ended.stderr
        assert ended.returncode in (1, -signal.SIGINT), ended.stderr
        assert window.run("SELECT id FROM job WHERE state = 2") == []
        assert window.run("SELECT id FROM workers WHERE state IN ('running', 'draining', 'stale')") == []
