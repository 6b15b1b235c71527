"""Judges moments that cannot be: the server's clock was ahead when they were written, and is right again, or was set back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..text import count_of, duration
from .findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ..store.health import Ahead

_CHECK = "server's clock"
_WAS = "the server's clock was ahead when that was written"


def judge_moments(found: Iterable[Ahead]) -> Iterator[Finding]:
    """One finding for each kind of such moments, with what to do."""
    for ahead in found:
        what, do = _SAID[ahead.what](ahead)
        yield Finding("warning", _CHECK, what, do)


def _rates(ahead: Ahead) -> tuple[str, str]:
    return (
        f"{count_of(ahead.count, 'rate')} of {_named(ahead)} would be whole in {duration(ahead.seconds)} only: {_WAS}. What "
        "was drawn then does not count",
        "Nothing is to be mended here: the next start sets it right. Keep the server's clock from jumping (NTP).",
    )


def _workers(ahead: Ahead) -> tuple[str, str]:
    return (
        f"{count_of(ahead.count, 'worker')} ({_named(ahead)}) last gave a sign of life in {duration(ahead.seconds)} from now: "
        f"{_WAS}. One that is dead counts as live until then",
        "A live worker sets it right with its next sign of life: look again in a minute. If it stays, as the schema's owner: "
        "UPDATE pulse.session SET seen_at = now() WHERE seen_at > now()",
    )


def _leases(ahead: Ahead) -> tuple[str, str]:
    return (
        f"{count_of(ahead.count, 'running job')} ({_named(ahead)}) {'is' if ahead.count == 1 else 'are'} leased until "
        f"{duration(ahead.seconds)} from now, for longer than any lease of the worker: {_WAS}",
        "A live worker sets it right with its next heartbeat: look again in a minute. If its worker is dead, the job is "
        "rescued only then: pulse-trio jobs release ID --force puts it back now.",
    )


def _schedules(ahead: Ahead) -> tuple[str, str]:
    has, its = ("has", "its") if ahead.count == 1 else ("have", "their")
    return (
        f"{count_of(ahead.count, 'schedule')} ({_named(ahead)}) {has} been fired for a moment that is still to come, and "
        f"{its} next occurrence is in {duration(ahead.seconds)}: {_WAS}",
        "pulse-trio cron pause NAME, then pulse-trio cron resume NAME: it goes on with its next occurrence from now on. What "
        "was fired ahead of its time is not fired again.",
    )


_SAID = {"rate": _rates, "worker": _workers, "lease": _leases, "schedule": _schedules}


def _named(ahead: Ahead) -> str:
    return ", ".join(ahead.names) + (", ..." if ahead.count > len(ahead.names) else "")
