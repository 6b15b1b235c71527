"""What tests of clients have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.stores import Window

if TYPE_CHECKING:
    from collections.abc import Generator


@pytest.fixture(params=["trio", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Both loops, for a test marked `anyio`."""
    return request.param


@pytest.fixture
def window(dsn: str) -> Generator[Window]:
    """Looks at the test's database, and changes it."""
    with Window(dsn) as window:
        yield window
