"""The store: one method for each business operation; the only package that runs the statements of `sql/`."""

from .allowance import Allowance
from .beats import Beat
from .claimed import ClaimCursor, ClaimResult
from .foreign import foreign_block, foreign_block_sync, run_foreign, run_foreign_sync
from .histories import Written
from .limits import Limited
from .outcomes import Settlement
from .reports import TooSlow, is_large, size_of
from .schedules import Broken, Fired
from .sweeping import Found, Sweep
from .transactions import CommitUnknown, FencedTransactions, ended_by_limit
from .upkeep import HandedBack, Rescue
from .worker import WorkerStore

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
    "Sweep",
    "TooSlow",
    "WorkerStore",
    "Written",
    "ended_by_limit",
    "foreign_block",
    "foreign_block_sync",
    "is_large",
    "run_foreign",
    "run_foreign_sync",
    "size_of",
]
