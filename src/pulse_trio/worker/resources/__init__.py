"""What a worker opens once, before its first job, and closes after its last."""

from .opening import WorkerResources

__all__ = ["WorkerResources"]
