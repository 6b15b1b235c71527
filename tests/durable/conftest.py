"""Durable handlers on real PostgreSQL, with workers in the test's own Trio run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.trees import Trees

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def trees(dsn: str) -> Iterator[Trees]:
    grown = Trees(dsn)
    yield grown
    grown.window.close()
