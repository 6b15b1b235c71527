"""Detours: how calls keep their numbers in the clean-up of a cancelled job that ended half-way, when a retry does the rest.

The first step of an inner compensation fails, and the outer one pays the refund. In the retry that step succeeds, so the inner
one makes more calls than it did: if they were only counted, one of them would have the refund's number, and get its line. So
each numbered call of such a clean-up is remembered with what it does: its function and arguments. A retry finds the number of a
call by these, and gives one that was not made before a number above all others.

Where the worker was lost in the clean-up nothing had failed, and the same calls come in the same order: they are counted. A
call that comes later than it did is a mismatch: one that was not made before has taken its place, and its line.
"""

from __future__ import annotations

import functools
import re
from hashlib import blake2b
from typing import TYPE_CHECKING, Any
from uuid import UUID

import trio

from ...describing import leaves_of
from ...errors import ReplayMismatch, StepFailed
from ...states import WISHES
from .call_sites import call_site
from .digests import in_one_order
from .keys import highest_number, highest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .calls import Call
    from .durable import Durable
    from .history import History

    Given = tuple[Callable[..., Any], Sequence[Any]]
    """The function and the arguments of a step."""

HALF_WAY = "0:half way"
"""The key of the moment that says that an attempt has ended with its clean-up, and that it did not end well. Its value: up to
this number the calls of the clean-up come again as they were; 0 if that is not known."""
_DOES = re.compile(r"([1-9][0-9]{0,6}):does")
"""The keys of the moments that say with their name what the call with this number does."""
_FROM = "{}:does from"
"""The same, from where it is made."""
_SIZE = 16


class Detour:
    """Of one attempt."""

    __slots__ = ("_failed", "_highest", "_left", "_new", "_replaced")

    def __init__(self) -> None:
        self._left: dict[int, str] | None = None
        """What the calls do that attempts before made in the clean-up, and this one has not made yet, by their numbers."""
        self._highest = 0
        self._new: tuple[int, str, str] | None = None
        self._failed = 0
        self._replaced: dict[str, int] = {}
        """What calls before did whose lines others have got in this attempt, with their numbers."""

    def step_failed(self, number: int) -> None:
        """A step of the clean-up has failed, the main task's call with this number."""
        self._failed = self._failed or number

    def certain(self, errors: Iterable[BaseException]) -> float:
        """The value of `HALF_WAY`: the first step that failed, if nothing but steps did. Plain code may have failed before it,
        and its step not been called."""
        known = (StepFailed, trio.Cancelled, *WISHES)
        all_known = all(issubclass(type(leaf), known) for error in errors for leaf in leaves_of(error))
        return float(self._failed if all_known else 0)

    def check(self, durable: Durable, call: Call, *, does: str = "") -> None:
        """Raises `ReplayMismatch` if the call, whose number is the next one, stands where another one stood, and that has to
        come again: what it undid would be undone twice. `does`: what it does, if it has no key."""
        number = durable.keys.count + 1
        had = self._found(durable).get(number)
        if number <= durable.history.replay.moments.get(HALF_WAY, 0.0) and had is not None and had != does:
            job_id, step = durable.running.claim.id, had.split(" ")[1] or "another call"
            now = f"{call.kind} {call.name}" + (f" (key {call.key})" if call.key else "")
            if does.startswith(f"step {step} "):
                now += " with other arguments, from elsewhere in the code"
            raise durable.fail(
                ReplayMismatch(
                    f"job {job_id}: in the clean-up that failed half-way came {step} (key {number}:step), now comes {now}. "
                    "Plain code has failed before it in this attempt, or the code has changed. If it has, deploy what it was; "
                    f"then pulse-trio jobs retry {job_id} does the rest"
                )
            )

    def _is_the_same(self, durable: Durable, name: str, number: int, does: str) -> bool:
        """Whether the step that has to come again with this number comes, with arguments that no attempt has a second time: the
        number of the attempt, the time of day. It is made from the same place, where one function undoes all."""
        if not self._has_other_arguments(durable, name, number, does):
            return False
        site, in_stack = call_site()
        return not in_stack and durable.history.replay.unopened.within.get(_FROM.format(number)) == site

    def _has_other_arguments(self, durable: Durable, name: str, number: int, does: str) -> bool:
        """Whether a step of that function had this number, with arguments that no step of this attempt is known to have."""
        left = self._found(durable)
        return left.get(number, "").startswith(f"step {name} ") and does not in left.values()

    def number(self, durable: Durable, call: Call, given: Given | None) -> int:
        """The number of the main task's call, which has no key, in the clean-up. `given` is what it calls, if it is a step."""
        number = durable.keys.count + 1
        what = f"{call.kind} {call.name}"
        if given is not None:
            what = what_of(durable, call.name, given)
        if HALF_WAY in durable.history.replay.moments:
            left, failed = self._found(durable), durable.history.replay.moments[HALF_WAY]
            if given is not None and number < failed and self._is_the_same(durable, call.name, number, what):
                del left[number]
                return number
            # The one that failed has no line: with other arguments it is made as a new one, whether it is that or not.
            if number != failed or not self._has_other_arguments(durable, call.name, number, what):
                self.check(durable, call, does=what)
            found = next((one for one, does in left.items() if does == what), None)
            if found is not None:
                del left[found]
                return found
            self._highest = number = max(self._highest + 1, number)
        elif durable.history.replay.unopened.within:
            self._check_order(durable, call, number, what)
        self._new = (number, what, "" if given is None else call_site()[0])
        return number

    def _check_order(self, durable: Durable, call: Call, number: int, what: str) -> None:
        had = self._found(durable).get(number)
        if had == what:
            return
        if what in self._replaced:
            job_id, was = durable.running.claim.id, self._replaced[what]
            raise durable.fail(
                ReplayMismatch(
                    f"job {job_id}: its clean-up called {call.name} as its call {was} in an attempt before, and now as its "
                    f"call {number}: it has made another call in between, which was taken for one of those. Look what of the "
                    f"clean-up is not done, and then run the job again from the beginning: pulse-trio jobs retry {job_id} "
                    "--afresh. What a clean-up calls may depend on what durable calls returned, and not on how children are "
                    "when they are cut short"
                )
            )
        if had is not None:
            self._replaced[had] = number

    def tell(self, history: History) -> None:
        """Remembers what the call does whose number was asked for last, behind the cancellation that it was made because of."""
        if self._new is not None:
            (number, what, site), self._new = self._new, None
            history.moment(f"{number}:does", float(number), what)
            if site:
                history.moment(_FROM.format(number), float(number), site)

    def _found(self, durable: Durable) -> dict[int, str]:
        if self._left is None:
            replay = durable.history.replay
            lines = () if replay.resumed is None else replay.resumed.lines
            does = ((_DOES.fullmatch(key), what) for key, what in replay.unopened.within.items())
            self._left = {int(found[1]): what for found, what in does if found is not None}
            self._highest = max(
                highest_of(line.key for line in lines), highest_number(replay.moments, ()), *self._left, 0
            )
        return self._left


def what_of(durable: Durable, name: str, given: Given, *, with_owner: bool = True) -> str:
    """What a step does: its name, and a digest of its arguments and, if it is a method, of its object (`with_owner`)."""
    return f"step {name} {_digest_of(durable.running.claim.id, *given, with_owner=with_owner)}"


def _digest_of(job_id: int, function: Callable[..., Any], args: Sequence[Any], *, with_owner: bool) -> str:
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
    if with_owner and (owner := getattr(function, "__self__", None)) is not None:
        _add_owner(digest, owner)
    return digest.hexdigest()


def _add_owner(digest: blake2b, owner: object) -> None:
    """Of a method: its class, and what tells its object from others, a name or a number."""
    digest.update(type(owner).__qualname__.encode("utf-8", "surrogatepass"))
    for name, value in sorted(getattr(owner, "__dict__", {}).items()):
        if type(value) in (str, int, UUID):
            _add(digest, name)
            _add(digest, value)


def _add(digest: blake2b, arg: object) -> None:
    """What JSON cannot carry, as the job itself, counts by its type."""
    try:
        plain = in_one_order({"": arg})
    except Exception:  # code of the argument's own type, which may raise anything: it counts by its name then
        plain = type(arg).__qualname__.encode("utf-8", "surrogatepass")
    digest.update(len(plain).to_bytes(8, "big"))
    digest.update(plain)
