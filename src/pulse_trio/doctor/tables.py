"""Judges the tables: HOT updates, indexes, the archive's days, and what keeps dead rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..store import health as looking
from ..text import count_of, duration
from .findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..store.health import Health, Server, Storage

HOT_SHARE, ENOUGH = 0.9, 1000
"""The share of HOT updates below which something is wrong, and how many updates the share needs to be meaningful."""
MAINTAINED = 3 * 3600.0
"""Seconds after which a worker should have maintained the archive."""


def storage_of(storage: Storage, server: Server) -> Iterator[Finding]:
    share = storage.hot_updates / storage.updates if storage.updates else 1.0
    if storage.cold:
        yield Finding(
            "error",
            "indexes",
            f"{', '.join(storage.cold)} cover columns that every claim and heartbeat writes: no such update can be HOT",
            "Drop these indexes; read pulse.jobs or pulse.workers instead.",
        )
    elif storage.updates >= ENOUGH and share < HOT_SHARE:
        yield Finding(
            "warning",
            "HOT updates",
            f"only {share:.0%} of {storage.updates:,} updates of live jobs were HOT",
            "Look for long transactions (below); was the table's fillfactor changed?",
        )
    else:
        yield Finding("ok", "HOT updates", f"{share:.0%} of {storage.updates:,} updates of live jobs")
    if server.version >= 160000 and not storage.lease_index:
        yield Finding(
            "warning",
            "lease index",
            "the watchdog has no index: the server was upgraded from a version in which it would have cost too much",
            "CREATE INDEX job_lease ON ...job USING brin (lease_until) WITH (pages_per_range = 16)",
        )
    late = storage.maintained_ago is None or storage.maintained_ago > MAINTAINED
    if storage.missing_days or storage.astray:
        what = f"{count_of(storage.missing_days, 'day')} of the next four have no partition"
        yield Finding(
            "warning",
            "archive",
            what if storage.missing_days else "finished jobs are in the default partition instead of their days'",
            "Run a worker whose role may maintain, or: SELECT pulse.maintain() (jobs in the default partition are deleted in "
            "time)",
        )
    elif late:
        ago = "never" if storage.maintained_ago is None else f"{duration(storage.maintained_ago)} ago"
        yield Finding(
            "warning",
            "archive",
            f"last maintained: {ago}",
            "A worker does it every hour; or: SELECT pulse.upkeep('7 days')",
        )
    else:
        yield Finding(
            "ok", "archive", f"maintained {duration(storage.maintained_ago or 0)} ago; the next days' partitions exist"
        )


def holders(found: Health) -> Iterator[Finding]:
    for holder in found.holders:
        age = f"{duration(holder.age)} old" if holder.age is not None else "of unknown age"
        yield Finding(
            "warning",
            "old transaction",
            f"{holder.what} is {age}: the whole server keeps dead rows for it, and heartbeats of long jobs become more "
            f"expensive",
            "End it (pg_terminate_backend, ROLLBACK PREPARED, pg_drop_replication_slot).",
        )
    if not found.holders:
        unseen = (
            "" if found.server.sees_others else " that this role can see (GRANT pg_read_all_stats shows the others')"
        )
        yield Finding("ok", "old transactions", f"none older than {duration(looking.LONG)}{unseen}")
