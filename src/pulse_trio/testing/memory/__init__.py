"""A database in memory, and workers' stores on it: what tests of handlers run on, without PostgreSQL and on Trio's clock."""

from .database import MemoryDatabase
from .rows import EPOCH, MIDNIGHT, MemoryBatch, MemoryJob, MemorySchedule
from .store import MemoryStore, unavailable

__all__ = [
    "EPOCH",
    "MIDNIGHT",
    "MemoryBatch",
    "MemoryDatabase",
    "MemoryJob",
    "MemorySchedule",
    "MemoryStore",
    "unavailable",
]
