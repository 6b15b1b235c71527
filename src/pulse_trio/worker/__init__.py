"""The worker: a nursery tree over the store. `Worker` is all of it that others need."""

from .coordinator import Worker, WorkerReport

__all__ = ["Worker", "WorkerReport"]
