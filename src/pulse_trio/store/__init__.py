"""The store: one method for each business operation, and the only caller of `sql/`."""

from .worker import Beat, Exchange, Found, Rescue, Settlement, Slot, WorkerStore

__all__ = ["Beat", "Exchange", "Found", "Rescue", "Settlement", "Slot", "WorkerStore"]
