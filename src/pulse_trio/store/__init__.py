"""The store: one method for each business operation, and the only caller of `sql/`."""

from .limits import Limited
from .schedules import Broken, Fired
from .worker import Beat, Exchange, Found, Rescue, Settlement, Slot, WorkerStore

__all__ = ["Beat", "Broken", "Exchange", "Fired", "Found", "Limited", "Rescue", "Settlement", "Slot", "WorkerStore"]
