"""What a pool has done so far, and how it is now."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PoolStatistics:
    """Counters since the pool was opened, and its current state. The pool counts in one of its own and hands out copies."""

    size: int = 0
    """Open connections, idle and in use."""
    idle: int = 0
    waiting: int = 0
    """Callers in the queue."""
    requests: int = 0
    """Requests for a connection."""
    queued: int = 0
    """Requests that had to wait."""
    wait_seconds: float = 0.0
    """Total time spent waiting by the requests that were served."""
    timeouts: int = 0
    connections: int = 0
    """Connections opened."""
    connect_failures: int = 0
    lost: int = 0
    """Connections found broken, in use or idle."""
    retired: int = 0
    """Connections closed for age or idleness."""
