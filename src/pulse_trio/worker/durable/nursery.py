"""`job.durable_nursery()`: children that are jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import UsageError

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from .durable import Durable


def open_nursery(durable: Durable, *, collect: bool, key: str | None) -> AbstractAsyncContextManager[Any]:
    """The block of one `job.durable_nursery()`."""
    raise UsageError("job.durable_nursery is not there yet")
