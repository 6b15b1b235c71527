"""What the line of a cancellation, the job's or a scope's, remembers: where the handler stood when it came."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ...lines import Kind

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Iterator, Mapping

    from ...lines import Line

CANCELLATIONS = frozenset((Kind.SCOPE_CANCELLED, Kind.CANCELLED))


class Stood(msgspec.Struct, frozen=True):
    """What a line of a cancellation remembers: the keys of the calls that stood then, and the job's reason."""

    at: tuple[str, ...] = ()
    reason: str = ""
    count: int = 0
    """After that number the main task's calls go on, where a scope of it was cut short, or the job."""
    after: float = 0.0
    """Seconds since a task had come to a durable call, or out of one, if it came in a plain await: of the job's, or of a scope
    with a clean-up in it."""
    begun: int = 0
    """How many calls the main task had begun then, if not `count`."""
    asked: bool = False
    """Whether the task that had opened the scope called `scope.cancel()`: it comes to that call again."""
    read: bool = False
    """Whether the scope's task has found by `scope.cancel_called` that it had struck, before anything was cut short: it finds
    that there again."""
    calls: int | None = None
    """How many calls the scope's task had begun in it; None of a line that older workers have written."""
    late: bool = False
    """Whether the scope had cut nothing short when its block ended."""
    opened: bool = False
    """Whether the scope struck as it was opened, whatever was on its way then."""
    outer: bool = False
    """Whether it was that late because what is around it had struck, and cut short what was in both."""
    before: bool = False
    """Whether it had come before its task began the call that it cut short."""
    place: tuple[str, ...] = ()
    """Where in the code the plain await was, if it is known (places.py)."""


def is_late(line: Line) -> bool:
    """Whether the scope had cut nothing short."""
    return line.kind is Kind.SCOPE_CANCELLED and stood(line).late


def may_be_swallowed(line: Line) -> bool:
    """Whether the handler may have swallowed the `Cancelled` of this line in a plain await, before anything told of it."""
    return (said := stood(line)).late or said.before


def outer_first(lines: deque[Line], within: Mapping[str, str]) -> Line:
    """The next line, that of a cancellation. A scope that was cut short by one around it has its line first, as its task leaves
    it first: the outer one's is moved before it, or the task would wait for that in the inner one."""
    first = lines[0]
    if first.kind is not Kind.SCOPE_CANCELLED or not stood(first).outer:
        return first
    following = next((line for line in lines if not is_late(line)), None)
    if following is None or following.kind not in CANCELLATIONS:
        return first
    if following.kind is Kind.CANCELLED or following.key in _around(first.key, within):
        lines.remove(following)
        lines.appendleft(following)
    return lines[0]


def _around(key: str, within: Mapping[str, str]) -> Iterator[str]:
    """The keys of the remembered scopes around one, the innermost first."""
    while (outer := within.get(key)) is not None:
        yield outer
        key = outer


def stood(line: Line) -> Stood:
    """What a line of a cancellation remembers."""
    return msgspec.json.decode(line.value or "{}", type=Stood)


def late_key(scope: str) -> str:
    """Under which it is remembered that the scope with this key had cut nothing short, though its line does not say so."""
    return f"{scope} late"


def is_opened(said: Stood) -> bool:
    """Whether the scope struck as it was opened."""
    return said.opened


def struck_too(_: Stood) -> bool:
    """Whether it struck."""
    return True


def is_left_so(said: Stood) -> bool:
    """Whether its task had left it, or found that it had struck, before it cut anything short."""
    return said.late or said.read
