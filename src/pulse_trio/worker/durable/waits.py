"""`job.sleep` and `job.wait_for_event`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import UsageError

if TYPE_CHECKING:
    from datetime import datetime

    from .durable import Durable


async def sleep(durable: Durable, seconds: float, key: str | None) -> None:
    raise UsageError("job.sleep is not there yet")


async def sleep_until(durable: Durable, moment: datetime, key: str | None) -> None:
    raise UsageError("job.sleep_until is not there yet")


async def wait_for_event(durable: Durable, name: str, type_: Any, limit: float | None, key: str | None) -> Any:
    raise UsageError("job.wait_for_event is not there yet")
