"""Detours: how calls keep their numbers in the clean-up of a cancelled job that failed half-way, when a retry does the rest.

The first step of an inner compensation fails, and the outer one pays the refund. In the retry that step succeeds, so the inner
one makes more calls than it did: if they were only counted, one of them would have the refund's number, and get its line. So
from such a failure on each numbered call of the main task is remembered with what it does: its function and arguments. A later
attempt finds the number of a call by these, and gives one that was not made before a number above all others.
"""

from __future__ import annotations

import functools
import re
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import trio

from ...trio_internals import scopes_around
from .digests import in_one_order
from .keys import highest_number, highest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .calls import Call
    from .durable import Durable

    Given = tuple[Callable[..., Any], Sequence[Any]]
    """The function and the arguments of a step."""

_MADE = re.compile(r"([1-9][0-9]{0,6}):detour")
"""The keys of the moments that say with their name what the call with this number does."""
_SIZE = 16


class Detour:
    """Of one attempt."""

    __slots__ = ("_highest", "_left", "_taken")

    def __init__(self) -> None:
        self._taken = False
        self._left: dict[int, str] | None = None
        """What the calls do that attempts before made on theirs, and this one has not made yet, by their numbers."""
        self._highest = 0

    def begins(self) -> None:
        """A compensation of the cancelled job has failed, or a call of it: what comes next need not come so in a retry."""
        self._taken = True

    def cut(self, durable: Durable) -> None:
        """A call was cut short. If it stood in a clean-up, what comes next need not come so in a retry."""
        if durable.cancelling.noted and not durable.failures.clean_ups.isdisjoint(
            scopes_around(trio.lowlevel.current_task())
        ):
            self._taken = True

    def number(self, durable: Durable, call: Call, given: Given | None) -> int | None:
        """The number of the main task's call, which has no key and no number yet; None if it is the next one. `given`: what it
        calls, if it is a step."""
        left = self._found(durable)
        following = durable.keys.count + 1
        if not self._taken and not (left and following >= min(left)):
            return None
        self._taken = True
        what = f"{call.kind} {call.name}"
        if given is not None:
            what = f"{what} {_digest_of(durable.running.claim.id, *given)}"
        number = next((one for one, made in left.items() if made == what), None)
        if number is not None:
            del left[number]
            return number
        self._highest = max(self._highest + 1, following)
        durable.history.moment(f"{self._highest}:detour", float(self._highest), what)
        return self._highest

    def _found(self, durable: Durable) -> dict[int, str]:
        if self._left is None:
            replay = durable.history.replay
            resumed = replay.resumed
            lines = () if resumed is None else resumed.lines
            made = ((_MADE.fullmatch(key), what) for key, what in replay.unopened.within.items())
            self._left = {int(found[1]): what for found, what in made if found is not None}
            self._highest = max(
                highest_of(line.key for line in lines), highest_number(replay.moments, ()), *self._left, 0
            )
        return self._left


def _digest_of(job_id: int, function: Callable[..., Any], args: Sequence[Any]) -> str:
    """What stands for the arguments of a step. It is keyed by the job's id, so that those of two jobs do not look alike."""
    digest = blake2b(key=str(job_id).encode(), digest_size=_SIZE)
    for arg in args:
        _add(digest, arg)
    while isinstance(function, functools.partial):
        for arg in function.args:
            _add(digest, arg)
        for name, arg in sorted(function.keywords.items()):
            _add(digest, name)
            _add(digest, arg)
        function = function.func
    return digest.hexdigest()


def _add(digest: blake2b, arg: object) -> None:
    """What JSON cannot carry, as the job itself, counts by its type."""
    try:
        plain = in_one_order({"": arg})
    except Exception:  # whatever a type of the handler's raises
        plain = type(arg).__qualname__.encode("utf-8", "surrogatepass")
    digest.update(len(plain).to_bytes(8, "big"))
    digest.update(plain)
