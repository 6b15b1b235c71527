"""No room on the server's disk: what was acknowledged is there, what was not is said to be nowhere, and with room it goes on.

Without a small file system of its own, and so without root: the kernel refuses to let a file of the server's processes grow
past a limit (RLIMIT_FSIZE). PostgreSQL ignores the signal that comes with it, and its write fails like one on a full disk.
"""

from __future__ import annotations

import base64
import random
import re
import resource
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import DatabaseUnavailable, Handlers, SyncClient
from pulse_trio.client import request_by_name
from pulse_trio.embedded import embedded_server
from pulse_trio.migrate import migrate_sync
from pulse_trio.observe import DatabaseFound, DatabaseLost, FenceLost, LeaseUnproven
from pulse_trio.store import WorkerStore
from support.embedded_workers import WITHIN, working
from support.workers import rows, until

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from pulse_trio.jobs import Outcome
    from pulse_trio.store import ClaimCursor, ClaimResult, Settlement

pytestmark = pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="only Linux limits another process's files")

MB = 2**20
STARTED = "SELECT pg_postmaster_start_time()"


def words(size: int, seed: int) -> str:
    """So many characters that do not compress."""
    return base64.b85encode(random.Random(seed).randbytes(size))[:size].decode()


class Server:
    """A PostgreSQL of the test's own, with a disk of any size."""

    def __init__(self, dsn: str, data: Path) -> None:
        self.dsn = dsn
        self._data = data

    def limit(self, size: int) -> None:
        """No file grows past `size` bytes."""
        for pid in self._processes():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def make_room(self) -> None:
        """There is room again."""
        self.limit(resource.RLIM_INFINITY)

    def log(self) -> str:
        """What it has said."""
        return (self._data.parent / "server.log").read_text()

    def _processes(self) -> list[int]:
        # The first of all before its children: those that it starts from now on have its limit.
        first = (self._data / "postmaster.pid").read_text().split("\n")[0]
        return [int(first), *map(int, Path(f"/proc/{first}/task/{first}/children").read_text().split())]


@pytest.fixture
def server() -> Generator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="pulse-trio-disk-"))
    folder.chmod(0o711)  # as for the tests' own server
    try:
        # A checkpoint writes what is past the limit, and is no part of this.
        with embedded_server(folder / "pg", settings={"autovacuum": "off", "checkpoint_timeout": "1h"}) as embedded:
            migrate_sync(embedded.dsn)
            yield Server(embedded.dsn, embedded.folder / "data")
    finally:
        shutil.rmtree(folder)


def note_accepted(store: WorkerStore) -> set[int]:
    """From now on the set has the id of every job whose outcome a statement of the store's has accepted."""
    accepted = set[int]()
    complete_and_claim, settle = store.claims.complete_and_claim, store.reports.settle

    async def claiming(limit: int, slots: Sequence[ClaimCursor], completed: Sequence[Outcome] = ()) -> ClaimResult:
        result = await complete_and_claim(limit, slots, completed)
        accepted.update(o.claim.id for o in result.settlement.accepted)
        return result

    async def settling(outcomes: Sequence[Outcome], *, unsure: bool = False) -> Settlement:
        settlement = await settle(outcomes, unsure=unsure)
        accepted.update(o.claim.id for o in settlement.accepted)
        return settlement

    store.claims.complete_and_claim, store.reports.settle = claiming, settling
    return accepted


def archived(dsn: str) -> set[int]:
    return {row[0] for row in rows(dsn, "SELECT id FROM pulse.jobs WHERE state = 'completed'")}


async def test_on_a_full_disk_nothing_is_acknowledged_that_is_not_there_and_with_room_all_goes_on(
    server: Server,
) -> None:
    handlers = Handlers()
    # Made once: a handler that made them held up the heartbeats of a loaded machine for longer than half of a lease.
    result = words(200_000, 0)

    @handlers.job
    async def big(seed: int) -> str:
        return f"{seed:06}{result}"

    dsn, client = server.dsn, SyncClient(server.dsn)
    ((started,),) = rows(dsn, STARTED)
    server.limit(17 * MB)  # above a segment of the log, whose own lack of room is the next test's

    # A producer: until the disk is full.
    acknowledged: list[int] = []
    for seed in range(1000):
        try:
            acknowledged.append(client.enqueue("big", {"seed": seed, "pad": words(100_000, seed)}, delay=3600).id)
        except DatabaseUnavailable as error:
            said = str(error)
            break
    else:
        pytest.fail("the disk had room for all of them")
    assert 100 < len(acknowledged) < 1000
    assert "no room" in said
    assert "disk space" in said
    with pytest.raises(DatabaseUnavailable, match="disk space"):
        client.enqueue_many([request_by_name("big", {"pad": words(100_000, seed)}, delay=3600) for seed in range(50)])
    assert [row[0] for row in rows(dsn, "SELECT id FROM pulse.job ORDER BY id")] == acknowledged

    # A worker: its reports do not fit any more, and it keeps what it has done until they do.
    due = [client.enqueue("big", {"seed": seed}).id for seed in range(150)]
    store = WorkerStore(dsn, lease=6.0, concurrency=20)
    accepted = note_accepted(store)
    async with working(handlers, dsn, store=store, lease=6.0, heartbeat=2.0, watchdog=0.5, concurrency=20) as heard:
        with trio.fail_after(WITHIN):
            while not any("no room" in lost.error for lost in heard.of(DatabaseLost)):  # noqa: ASYNC110 -- one of many
                await trio.sleep(0.05)
        assert any("disk space" in lost.error for lost in heard.of(DatabaseLost))
        ((now,),) = rows(dsn, "SELECT extract(epoch FROM clock_timestamp())::float8")
        # For longer than a lease it is kept by beats, and nothing is accepted that is not there.
        await until(
            dsn, f"SELECT FROM pulse.job WHERE state = 2 HAVING min(extract(epoch FROM lease_until)) > {now + 12}"
        )
        assert 0 < len(accepted) < len(due)
        assert accepted <= archived(dsn)

        server.make_room()
        await until(dsn, f"SELECT FROM pulse.jobs WHERE state = 'completed' HAVING count(*) = {len(due)}")
        assert heard.of(DatabaseFound) != []
        assert heard.of(LeaseUnproven) == heard.of(FenceLost) == []
        acknowledged.append(client.enqueue("big", {"seed": 0, "pad": words(100_000, 0)}, delay=3600).id)
    assert accepted == archived(dsn) == set(due)
    # Each ran once: a report that did not fit cost no attempt, and no result was lost.
    assert rows(dsn, "SELECT DISTINCT attempt FROM pulse.jobs WHERE state = 'completed'") == [(1,)]
    assert {row[0] for row in rows(dsn, "SELECT id FROM pulse.jobs WHERE state = 'scheduled'")} == set(acknowledged)
    assert rows(dsn, STARTED) == [(started,)]


async def test_when_there_is_no_room_for_the_log_the_server_stops_and_what_it_acknowledged_is_there_afterwards(
    server: Server,
) -> None:
    handlers = Handlers()

    @handlers.job
    async def small(n: int) -> int:
        return n

    dsn, client = server.dsn, SyncClient(server.dsn)
    ran = [client.enqueue("small", {"n": n}).id for n in range(20)]
    async with working(handlers, dsn, lease=6.0, heartbeat=2.0, watchdog=0.5, poll=0.2) as heard:
        await until(dsn, f"SELECT FROM pulse.jobs WHERE state = 'completed' HAVING count(*) = {len(ran)}")
        acknowledged = [client.enqueue("small", {"n": n}, delay=3600).id for n in range(20)]
        # Less than a segment of the log: neither can this one be written to its end, nor the next one be made.
        server.limit(8 * MB)
        with pytest.raises(DatabaseUnavailable):
            acknowledged += (client.enqueue("small", {"pad": words(100_000, n)}, delay=3600).id for n in range(1000))
        await heard.until(DatabaseLost)
        server.make_room()
        with trio.fail_after(2 * WITHIN):
            while True:
                try:
                    after = client.enqueue("small", {"n": 99}).id
                    break
                except DatabaseUnavailable:
                    await trio.sleep(0.2)
        await until(dsn, f"SELECT FROM pulse.jobs WHERE id = {after} AND state = 'completed'")
        await heard.until(DatabaseFound)
    found = {row[0] for row in rows(dsn, "SELECT id FROM pulse.jobs WHERE state = 'scheduled'")}
    # The one whose answer was lost may be there too.
    assert set(acknowledged) <= found
    assert len(found) <= len(acknowledged) + 1
    assert archived(dsn) == {*ran, after}
    assert re.search(r"PANIC: .*File too large", server.log())
