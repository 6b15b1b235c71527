"""One migrated database a module; tests keep apart by their queues. A test that must be alone asks for `alone`."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from support.stores import Window, open_kept_store

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from pulse_trio.store import WorkerStore
    from support.connections import KeptLinks
    from support.databases import Databases


@pytest.fixture(scope="module")
def room_dsn(databases: Databases) -> Generator[str]:
    with databases.migrated() as dsn:
        yield dsn


@pytest.fixture(scope="module")
def window(room_dsn: str) -> Generator[Window]:
    with Window(room_dsn) as window:
        yield window


@pytest.fixture
def queue() -> str:
    """A queue that no other test uses."""
    return f"q-{uuid4().hex}"


@pytest.fixture(scope="module")
def links(room_dsn: str) -> Generator[list[KeptLinks]]:
    """What the stores of one test leave to the next."""
    kept: list[KeptLinks] = []
    yield kept
    for one in kept:
        one.close()


@pytest.fixture
async def store(room_dsn: str, links: list[KeptLinks]) -> AsyncGenerator[WorkerStore]:
    """A worker's store on the module's database."""
    async with open_kept_store(room_dsn, links) as store:
        yield store


@pytest.fixture
async def other(room_dsn: str, links: list[KeptLinks]) -> AsyncGenerator[WorkerStore]:
    """Another worker's."""
    async with open_kept_store(room_dsn, links) as store:
        yield store


@pytest.fixture
def alone(dsn: str) -> Generator[Window]:
    """A window on a database of this test alone."""
    with Window(dsn) as window:
        yield window
