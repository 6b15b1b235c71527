"""A worker of the chaos run: `python -m support.chaos.app ORDER` (JSON: dsn, who, settings, skew) is `pulse-trio run`, which
also writes down what it asks the database and what it hears.

With `processes` of 2 and more it is the supervisor, whose children record as well (`supervised.py`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pulse_trio import Worker
from pulse_trio.cli import fleet, main, run
from support.chaos.orphans import die_with_parent
from support.chaos.recorder import RecordedStore, Recorder

if TYPE_CHECKING:
    from typing import NoReturn

    from pulse_trio.handlers import Handlers
    from pulse_trio.settings import WorkerSettings


class RecordedWorker(Worker):
    """A worker whose store and handlers say what they do."""

    def __init__(
        self, handlers: Handlers, dsn: str, *, recorder: Recorder, settings: WorkerSettings, **options: Any
    ) -> None:
        store = RecordedStore(
            dsn,
            recorder=recorder,
            lease=settings.lease,
            queues=settings.queues,
            concurrency=settings.concurrency,
            on_session=options.pop("on_session"),
            session=orders.session if (orders := options.get("orders")) is not None else None,
        )
        if (launch := options.get("launch")) is not None:
            # What runs in quarantine is recorded as well.
            options["launch"] = launch._replace(command=[*launch.command[:-1], "support.chaos.supervised:handlers"])
        options["instruments"] = [*options["instruments"], recorder]
        super().__init__(handlers, dsn, settings=settings, store=store, **options)


def record() -> None:
    """From now on what `pulse-trio run` makes in this process is recorded."""
    who = os.environ["CHAOS_WHO"]
    recorder = Recorder(Path(f"worker-{who}.jsonl"), who)
    skew = float(os.environ["CHAOS_SKEW"])
    recorder.line("process", skew=skew)
    if skew:
        skew_clock(skew)
    run.Worker = partial(RecordedWorker, recorder=recorder)  # pyright: ignore[reportAttributeAccessIssue] -- in its place
    fleet.WorkerStore = partial(RecordedStore, recorder=recorder)  # pyright: ignore[reportAttributeAccessIssue]


def skew_clock(seconds: float) -> None:
    """The wall clock of this process is off by so much (libfaketime's part, as far as Python code can see)."""
    true = time.time
    time.time = lambda: true() + seconds


def begin(order: dict[str, Any]) -> NoReturn:
    """One worker's life."""
    os.environ |= {"CHAOS_WHO": order["who"], "CHAOS_SKEW": str(order["skew"]), "PULSE_TRIO_DSN": order["dsn"]}
    die_with_parent()
    record()
    target = order.get("target") or ("supervised" if order["settings"].get("processes", 1) > 1 else "handlers")
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in order["settings"].items()]
    main(["run", f"support.chaos.{target}:handlers", *settings])


if __name__ == "__main__":
    begin(json.loads(sys.argv[1]))
