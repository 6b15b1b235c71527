"""One attempt of `run_job`: what its worker tells of its life, and when and why it is cancelled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import trio

from ..jobs import CancelReason
from ..observe import AttemptFailed, JobEnded, JobStarted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_REASONS = [reason for reason in get_args(CancelReason) if reason not in ("timeout", "deadline", "suspended")]
"""Those that a test may ask for: the others follow from a handler's options, or from its only waiting."""
_BEATS = {"lease": 1.0, "heartbeat": 0.1}
"""Seconds, where the lease is to be lost soon."""


@dataclass(frozen=True, slots=True)
class Cancellation:
    after: float | None
    reason: CancelReason
    message: str | None

    def __post_init__(self) -> None:
        if self.reason in ("timeout", "deadline"):
            raise ValueError(
                f"cancel_reason={self.reason!r}: run_job(handler.options({self.reason}=...)) has that reason."
            )
        if self.reason == "suspended":
            raise ValueError("cancel_reason='suspended': a durable handler that only waits has that reason by itself.")
        if self.reason not in _REASONS:
            raise ValueError(f"cancel_reason={self.reason!r} is none of {', '.join(_REASONS)}.")

    @property
    def noticed_by(self) -> dict[str, float]:
        """Settings with which the worker notices it soon: it is a heartbeat that finds the lease lost."""
        return _BEATS if self.after is not None and self.reason in ("fence-lost", "lease-unproven") else {}


NOT_CANCELLED = Cancellation(None, "user", None)


class Watch:
    """The attempt's life, as its worker tells it."""

    def __init__(self) -> None:
        self.started = trio.Event()
        self.ended = trio.Event()
        self.suspended = False
        self.exception: BaseException | None = None

    def listeners(self) -> Mapping[type[Any], Callable[[Any], None]]:
        return {JobStarted: self._starts, JobEnded: self._ends, AttemptFailed: self._fails}

    def _starts(self, _: JobStarted) -> None:
        self.started.set()

    def _fails(self, event: AttemptFailed) -> None:
        self.exception = event.exception

    def _ends(self, event: JobEnded) -> None:
        self.suspended = event.outcome == "suspended"
        self.ended.set()
