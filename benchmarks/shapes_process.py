"""The handler of shapes_worker.py that runs in other processes, which import it from here."""

from __future__ import annotations

from pulse_trio import Handlers

handlers = Handlers()


@handlers.job(runs="process")
def process() -> None:
    """A no-op."""
