"""`pulse-trio top`: queues, workers and jobs in a terminal, live, with keys to filter and to act."""

from .command import top

__all__ = ["top"]
