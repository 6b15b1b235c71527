"""The store: one method for each business operation, and the only caller of `sql/`."""

from .foreign import run_foreign, run_foreign_sync
from .limits import Limited
from .schedules import Broken, Fired
from .transactions import CommitUnknown, FencedTransactions
from .worker import Beat, Exchange, Found, HandedBack, Rescue, Settlement, Slot, WorkerStore

__all__ = [
    "Beat",
    "Broken",
    "CommitUnknown",
    "Exchange",
    "FencedTransactions",
    "Fired",
    "Found",
    "HandedBack",
    "Limited",
    "Rescue",
    "Settlement",
    "Slot",
    "WorkerStore",
    "run_foreign",
    "run_foreign_sync",
]
