"""The store: one method for each business operation, and the only caller of `sql/`."""

from .allowance import Allowance
from .foreign import run_foreign, run_foreign_sync
from .limits import Limited
from .schedules import Broken, Fired
from .sweeping import Found
from .transactions import CommitUnknown, FencedTransactions
from .worker import Beat, Exchange, HandedBack, Rescue, Settlement, Slot, TooSlow, WorkerStore, is_large, size_of

__all__ = [
    "Allowance",
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
    "TooSlow",
    "WorkerStore",
    "is_large",
    "run_foreign",
    "run_foreign_sync",
    "size_of",
]
