"""The worker: a nursery tree over the store. `Worker` is one process's runtime, `Supervisor` keeps several."""

from .processes.channel import inherited_line, is_supervised
from .processes.crash_dump import inherit_crash_dump
from .processes.supervisor import Supervisor
from .worker import Worker, WorkerReport

__all__ = ["Supervisor", "Worker", "WorkerReport", "inherit_crash_dump", "inherited_line", "is_supervised"]
