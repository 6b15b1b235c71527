"""What the tests of the web page share: an app on a database of the test's own, and a window on that database."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.sites import open_site
from support.stores import Window

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    import httpx


@pytest.fixture
def window(dsn: str) -> Generator[Window]:
    """Looks at the test's database, and fills it."""
    with Window(dsn) as window:
        yield window


@pytest.fixture
async def site(dsn: str) -> AsyncGenerator[httpx.AsyncClient]:
    """A client of an app over the test's database, under Trio."""
    async with open_site(dsn) as client:
        yield client
