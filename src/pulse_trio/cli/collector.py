"""Garbage collection in a process that only runs a worker.

A job leaves a few hundred objects with cycles among them (a task, its scopes, a traceback), and imported modules stay
forever: with Python's defaults, scanning all of them repeatedly took 1-2 us of each job. `Worker` does not change the
collector of a program that embeds it.
"""

from __future__ import annotations

import gc


def settle_collector() -> None:
    """Call this once, after all imports: the collector then skips the imported objects and scans the others less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
