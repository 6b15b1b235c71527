"""The store: one method for each business operation, and the only caller of `sql/`."""

from .allowance import Allowance
from .foreign import run_foreign, run_foreign_sync
from .limits import Limited
from .schedules import Broken, Fired
from .sweeping import Found
from .transactions import CommitUnknown, FencedTransactions
from .worker import (
    Beat,
    ClaimCursor,
    ClaimResult,
    HandedBack,
    Rescue,
    Settlement,
    TooSlow,
    WorkerStore,
    is_large,
    size_of,
)

__all__ = [
    "Allowance",
    "Beat",
    "Broken",
    "ClaimCursor",
    "ClaimResult",
    "CommitUnknown",
    "FencedTransactions",
    "Fired",
    "Found",
    "HandedBack",
    "Limited",
    "Rescue",
    "Settlement",
    "TooSlow",
    "WorkerStore",
    "is_large",
    "run_foreign",
    "run_foreign_sync",
    "size_of",
]
