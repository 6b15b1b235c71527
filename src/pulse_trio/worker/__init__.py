"""The worker: a nursery tree over the store. `Worker` is one process's runtime, `Supervisor` keeps several.

The processes of `runs="process"` import one module of this package, and not the worker.
"""

from typing import TYPE_CHECKING

from ..later import later

if TYPE_CHECKING:
    from .processes.channel import inherited_line, is_supervised
    from .processes.crash_dump import inherit_crash_dump
    from .processes.supervisor import Supervisor
    from .worker import Worker, WorkerReport
else:
    __getattr__, __dir__ = later(
        __name__,
        {
            "processes.channel": ("inherited_line", "is_supervised"),
            "processes.crash_dump": ("inherit_crash_dump",),
            "processes.supervisor": ("Supervisor",),
            "worker": ("Worker", "WorkerReport"),
        },
    )

__all__ = ["Supervisor", "Worker", "WorkerReport", "inherit_crash_dump", "inherited_line", "is_supervised"]
