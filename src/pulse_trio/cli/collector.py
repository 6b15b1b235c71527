"""Garbage collection in a process that only runs a worker.

A job leaves a few hundred objects with cycles among them (a task, its scopes, a traceback), and what was imported never
goes: with Python's defaults, looking through all of it again and again took 1-2 us of each job. An embedding program's
collector is its own business, so `Worker` leaves it alone.
"""

from __future__ import annotations

import gc


def settle_collector() -> None:
    """Call it once, when everything is imported: that is looked at no more, and the rest less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
