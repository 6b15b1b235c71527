"""What a handler's client of `run_job` notes of an `enqueue_many` that fails half-way, or that reports its progress."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pulse_trio import INJECTED, Client, Handlers, PartlyEnqueued, SyncClient, open_client
from pulse_trio.testing import run_job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

handlers = Handlers()


@handlers.job
async def invoice(n: int) -> int:
    return n


def five(fails: bool) -> Iterator[Any]:
    yield from (invoice.request(n) for n in range(5))
    if fails:
        raise OSError("the source is gone")


async def write(client: Client, how: dict[str, Any]) -> tuple[int, list[int], str | None]:
    """How many jobs are said to be enqueued, the progress, and the error."""
    seen: list[int] = []
    try:
        done = await client.enqueue_many(five(how["fails"]), chunk=how["chunk"], progress=progress_of(seen, how))
    except PartlyEnqueued as error:
        return len(error.enqueued), seen, str(error)
    except OSError as error:
        return 0, seen, str(error)
    return len(done), seen, None


def write_sync(client: SyncClient, how: dict[str, Any]) -> tuple[int, list[int], str | None]:
    seen: list[int] = []
    try:
        done = client.enqueue_many(five(how["fails"]), chunk=how["chunk"], progress=progress_of(seen, how))
    except PartlyEnqueued as error:
        return len(error.enqueued), seen, str(error)
    except OSError as error:
        return 0, seen, str(error)
    return len(done), seen, None


def progress_of(seen: list[int], how: dict[str, Any]) -> Callable[[int], None]:
    def progress(count: int) -> None:
        seen.append(count)
        if count == how["stops"]:
            raise OSError("nobody listens")

    return progress


@handlers.job
async def order(how: dict[str, Any], client: Client = INJECTED) -> tuple[int, list[int], str | None]:
    return await write(client, how)


@handlers.job
def order_in_a_thread(how: dict[str, Any], client: SyncClient = INJECTED) -> tuple[int, list[int], str | None]:
    return write_sync(client, how)


@pytest.mark.trio
@pytest.mark.parametrize("chunk", [None, 2, 7])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("stops", [None, 2, 5])
async def test_they_are_noted_as_a_client_writes_them(
    chunk: int | None, fails: bool, stops: int | None, dsn: str
) -> None:
    how = {"chunk": chunk, "fails": fails, "stops": stops}
    async with open_client(dsn, handlers=handlers) as client:
        wanted = await write(client, how)
        written = await client.count_by_state()
    for handler in (order, order_in_a_thread):
        run = await run_job(handler, how, handlers=handlers)
        assert run.result == list(wanted)
        assert len(run.enqueued) == sum(written.values()) == wanted[0]
