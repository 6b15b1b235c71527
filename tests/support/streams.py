"""psycopg's streams, closed where they are left."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator


def closing(stream: AsyncIterator[Any]) -> aclosing[AsyncGenerator[Any]]:
    """`aclosing` of what psycopg declares an iterator, and makes a generator."""
    return aclosing(cast("AsyncGenerator[Any]", stream))
