"""The worker: a nursery tree over the store. `Worker` is one process's runtime, `Supervisor` keeps several."""

from .coordinator import Worker, WorkerReport
from .last_words import inherit_last_words
from .overseen import inherited_line, is_supervised
from .supervisor import Supervisor

__all__ = ["Supervisor", "Worker", "WorkerReport", "inherit_last_words", "inherited_line", "is_supervised"]
