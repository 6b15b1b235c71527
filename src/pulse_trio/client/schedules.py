"""Schedules made at run time: from a handler or a kind to a checked schedule."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ..handlers import Handler, Schedule, schedule
from ..timing import timing
from .requests import request_by_name

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta

    from ..timing import CatchUp


def schedule_of(
    name: str,
    handler: Handler[Any, Any] | str,
    args: Mapping[str, Any] | None,
    cron: str | None,
    *,
    every: float | timedelta | None,
    timezone: str | None,
    catch_up: CatchUp,
    due_as: str | None,
    options: Mapping[str, Any],
) -> Schedule:
    """The schedule that `client.schedule` was asked to create. Raises `ConfigurationError` or `InvalidName`; nothing was
    written."""
    if isinstance(handler, str):
        request = partial(request_by_name, handler, **options)
    else:
        request = handler.options(**options).request_by_name
    return schedule(name, request, args, timing(cron, every, timezone), catch_up=catch_up, due_as=due_as)
