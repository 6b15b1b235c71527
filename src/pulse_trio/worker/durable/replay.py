"""Replay: which call of a handler gets which line of its history, and when. Pure: no I/O, no Trio.

Lines are handed out in their order, one at a time: the call that fits the next line gets it, the others wait for theirs. The
line after it is handed out when that call has gone on. So a race between tasks has the same winner again. When no line is left,
the calls that wait go on live, in the order in which they began.

Where tasks wait for each other by other means, a limiter, say, their order may be another one than before. If it cannot be that
of the lines, a call gets its line before its turn; if none that waits has a line, they go on live, and the lines that are
left are those of the calls with their keys.
"""

from __future__ import annotations

from collections import deque
from functools import cached_property
from typing import TYPE_CHECKING

from ...lines import CALL_OF, Kind, Line
from .calls import Turn
from .keys import is_entry
from .left_out import LeftOut
from .mismatches import mismatch, returned_before_its_cancellation, stuck
from .seen import loose_in, seen_in
from .stood import CANCELLATIONS, is_late, outer_first, stood
from .unopened import Unopened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from ...errors import ReplayMismatch
    from ...lines import Resumed
    from .calls import Call
    from .stood import Stood


_RAISES = frozenset((Kind.STEP_FAILED, Kind.BLOCK_FAILED, Kind.TIMED_OUT))
"""What may cut other tasks short: those of a plain nursery that one of them raises in."""


class _OutOfOrder:
    """What a replay hands out otherwise than in the order of its lines, where tasks wait for each other by other means."""

    __slots__ = ("begun", "cancellations", "left", "raised")

    def __init__(self, cancellations: Sequence[Line]) -> None:
        self.cancellations = cancellations
        """All of the history: that of a scope may come elsewhere than its line stands."""
        self.begun = False
        """Whether a line was handed out before its turn."""
        self.raised = False
        """Whether one was that its call raises."""
        self.left: dict[str, Line] = {}
        """The lines that are left, once their order cannot be kept: each is that of the call with its key, when that comes."""


class _Calls:
    """Those of this attempt."""

    __slots__ = ("given", "latest", "left", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[str, Call] = {}
        """Those that wait for their lines, by their keys, in the order in which they began."""
        self.given: Turn | None = None
        """The one that is about to go on."""
        self.left = set[str]()
        """The keys of those that were cut short while they waited: none of them comes again."""
        self.latest = 0


class Replay:
    """The lines that the attempts before have written, in any order, and the calls of this one."""

    def __init__(self, job_id: int, lines: Iterable[Line] = ()) -> None:
        self._job_id = job_id
        self.moments: dict[str, float] = {}
        """The remembered moments by the key of their call."""
        self.unopened = Unopened()
        ordered, moments = list[Line](), list[Line]()
        for line in sorted(lines, key=lambda line: line.line):
            if line.kind is Kind.MOMENT:
                moments.append(line)
                self.moments[line.key] = float(line.value or 0)
                self.unopened.told(line)
            else:
                ordered.append(line)
        self._out_of_order = _OutOfOrder([line for line in ordered if line.kind in CANCELLATIONS])
        self.left_out = LeftOut(ordered, moments, self.moments)
        """Lines of other tasks may rest on these."""
        ordered = self.left_out.lines
        self._lines = deque(ordered)
        self._by_key = {line.key: line for line in ordered if line.kind in CALL_OF}
        self._calls = _Calls()
        self.scopes = set[str]()
        """The keys of the remembered scopes that are open."""
        self.resumed: Resumed | None = None
        """What the attempts before have left; None in the first, and in one that comes after others that left nothing."""

    @cached_property
    def seen(self) -> dict[tuple[str, str], int]:
        """Where the handler has seen that children had ended, by block and child."""
        return {} if self.resumed is None else seen_in(self.resumed.lines)

    @cached_property
    def loose(self) -> AbstractSet[tuple[str, str]]:
        """Those after which it has not gone on: nothing rests on them."""
        return frozenset() if self.resumed is None else loose_in(self.resumed.lines, self.left_out.__contains__)

    @property
    def over(self) -> bool:
        """Whether every line has been handed out, and its call has gone on. Calls that have no line may still have to."""
        return not self._lines and (self._calls.given is None or self._calls.given.line is None)

    @property
    def has_given(self) -> bool:
        """Whether a call has its line, and is about to go on."""
        return self._calls.given is not None

    @property
    def idle(self) -> bool:
        """Whether calls wait, and none of them is about to go on."""
        return bool(self._calls.waiting) and self._calls.given is None

    @property
    def out_of_order(self) -> bool:
        """Whether a line was handed out before its turn."""
        return self._out_of_order.begun

    @property
    def latest(self) -> int:
        """The number of the last line that was handed out, live too, or that tells of what came before it was added."""
        return self._calls.latest

    def came(self, number: int) -> None:
        """The line with this number was handed out."""
        self._calls.latest = number

    def is_latest(self, call: Call) -> bool:
        """Whether no call that waits began after this one."""
        return next(reversed(self._calls.waiting.values()), None) is call

    def has_line(self, key: str) -> bool:
        """Whether the call with this key has a line."""
        return key in self._by_key

    def fits(self, call: Call) -> bool:
        """Whether a line of such a call is still to come, or the job's cancellation, and it stood then."""
        line = self._by_key.get(call.key)
        comes = line is not None and bool(self._lines) and line.line >= self._lines[0].line
        is_its = line is not None and (CALL_OF[line.kind], line.name) == (call.kind, call.name)
        return (comes and is_its) or ((line is None or is_its) and self.is_cancelled_at(call.key))

    def goes_on_without(self) -> bool:
        """No call comes for the next line. Whether the replay may do without it: what cuts tasks short may have cut its task
        short sooner than then, and those that wait have theirs after it, or no other line is left. It does. (A scope that had
        cut nothing short is opened no more then.)"""
        line = self.next_line
        if line is None or not self.idle or not self._may_be_gone(line):
            return False
        if not (all(key in self._by_key for key in self._calls.waiting) or all(map(self._may_be_gone, self._lines))):
            return False
        self._lines.popleft()
        return True

    def _may_be_gone(self, line: Line) -> bool:
        return is_late(line) or self.left_out.may_be_gone(line)

    def has_begun(self, key: str) -> bool:
        """Whether the call with this key waits for its turn, or was cut short in that, or may have its line already."""
        return self.out_of_order or key in self._calls.waiting or key in self._calls.left

    def is_cancelled_at(self, key: str) -> bool:
        """Whether the job's cancellation is still to come, and the call with this key stood then."""
        return any(line.kind is Kind.CANCELLED and key in stood(line).at for line in self._lines)

    def begin(self, call: Call) -> None:
        """The call waits for its turn. Raises `ReplayMismatch` if the history has another call under its key."""
        self._check(call)
        self._calls.waiting[call.key] = call

    def _check(self, call: Call) -> None:
        line = self._by_key.get(call.key)
        if line is not None and (CALL_OF[line.kind] != call.kind or line.name != call.name):
            raise mismatch(self._job_id, line, f"the handler now calls {call}")

    def goes_on_by_keys(self) -> bool:
        """No call that waits has a line, and the calls of the next lines wait for the tasks that make these: the order of the
        lines cannot be kept, so those that wait go on live. Returns whether that may be: where a cancellation of the job is to
        come, it comes first."""
        if self._calls.given is None and self._lines and all(line.kind is not Kind.CANCELLED for line in self._lines):
            self._out_of_order.left.update({line.key: line for line in self._lines})
            self._out_of_order.begun = True
            self._lines.clear()
            return True
        return False

    def by_key(self, call: Call) -> Line | None:
        """The line of a call that begins after that. Raises `ReplayMismatch` as `begin` does."""
        if call.key not in self._out_of_order.left:
            return None
        self._check(call)
        return self._out_of_order.left.pop(call.key)

    @property
    def awaits_keys(self) -> bool:
        """Whether calls are still to come to lines of theirs, after that."""
        return any(line.kind in CALL_OF and line.kind not in CANCELLATIONS for line in self._out_of_order.left.values())

    def struck_by_key(self, key: str) -> Line | None:
        """The line which says that a scope struck, after that."""
        line = self._out_of_order.left.get(key)
        return self._out_of_order.left.pop(key) if line is not None and line.kind is Kind.SCOPE_CANCELLED else None

    def turn(
        self, is_early: Callable[[Line], bool] = lambda _: False, *, early: bool = False, anew: bool = False
    ) -> Turn | None:
        """Whose turn it is now; None if the calls that wait must go on waiting. `is_early`: whether the code has not come to
        the plain await that the cancellation found (cancelling.py). `early`: the first of those that have a line gets it
        before its turn; if none has, a cancellation comes though not all stand where it found them. `anew`: or one
        that has no line goes on live, before what came after it."""
        if self._calls.given is not None:
            return None
        turn = self._early(anew=anew) if early else self._next(is_early)
        if turn is not None:
            if turn.line is not None:
                if turn.line is not self._lines[0]:
                    self._out_of_order.begun = True
                    self._out_of_order.raised = self._out_of_order.raised or turn.line.kind in _RAISES
                self._lines.remove(turn.line)
                self.came(turn.line.line)
            if turn.call is not None:
                del self._calls.waiting[turn.call.key]
                self._calls.given = turn
        return turn

    def _next(self, is_early: Callable[[Line], bool]) -> Turn | None:
        if not self._lines:
            return Turn(next(iter(self._calls.waiting.values())), None) if self._calls.waiting else None
        line = self._lines[0]
        for key in self._places.keys() & self._calls.waiting.keys():
            if not self.stands_at(key):
                return Turn(self._calls.waiting[key], None)
        if line.kind in CANCELLATIONS:
            line = outer_first(self._lines, self.unopened.within)
            return Turn(None, line) if self._is_here(line) and not is_early(line) else None
        call = self._calls.waiting.get(line.key)
        return None if call is None else Turn(call, line)

    def _early(self, *, anew: bool) -> Turn | None:
        raises: Turn | None = None
        for line in self._lines:
            if line.kind is Kind.CANCELLED or (line.key in self.scopes and not is_late(line)):
                return raises or Turn(None, line)
            if line.kind in CANCELLATIONS:
                continue  # its task is behind those that wait
            if (call := self._calls.waiting.get(line.key)) is not None:
                if line.kind not in _RAISES:
                    return Turn(call, line)
                # It may cut those short that are behind others.
                raises = raises or Turn(call, line)
        if raises is not None:
            return raises
        without = (call for key, call in self._calls.waiting.items() if key not in self._by_key)
        return Turn(call, None) if anew and (call := next(without, None)) is not None else None

    def comes_before_others(self) -> Line | None:
        """What may cut tasks short, and would come before its turn, before calls that had their lines when it came."""
        waited, raises = False, None
        for line in self._lines:
            if line.kind is Kind.CANCELLED or (line.key in self.scopes and not is_late(line)):
                return raises or (line if waited else None)
            if line.key in self._calls.waiting:
                if line.kind not in _RAISES or not waited:
                    return None
                raises = raises or line
            waited = waited or line.kind not in CANCELLATIONS
        return raises

    @property
    def may_cut(self) -> bool:
        """Whether one of the lines that are left may cut tasks short, or one has before its turn: those that go on live now, or
        have not come to their calls, may be among them."""
        return self._out_of_order.raised or any(
            line.kind in _RAISES or line.kind in CANCELLATIONS for line in self._lines
        )

    def _is_here(self, line: Line) -> bool:
        """Whether a cancellation comes now. It comes where it came: while the same calls stand."""
        here = line.kind is Kind.CANCELLED or (line.key in self.scopes and not stood(line).late)
        # A task that a race cancels may have stood there still, with the race won already: here it is cut short before.
        return here and all(
            key in self._calls.waiting or key in self._calls.left or self._came_before(key, line)
            for key in stood(line).at
        )

    def _came_before(self, key: str, line: Line) -> bool:
        """Whether the line of a call was written, and its task had not gone on yet when the cancellation came."""
        return (own := self._by_key.get(key)) is not None and own.line < line.line

    @cached_property
    def _places(self) -> dict[str, int]:
        """Where tasks stood when cancellations came, other than in calls that have lines; with the number of the last one."""
        return {key: line.line for line in self._out_of_order.cancellations for key in stood(line).at if is_entry(key)}

    def stands_at(self, key: str) -> bool:
        """Whether a cancellation is still to come that came while a task stood at this place, the entry of a block."""
        return bool(self._lines) and self._lines[0].line <= self._places.get(key, 0)

    def comes_late(self, key: str) -> bool:
        """Whether the next line says that the scope struck too late to cut anything short."""
        line = self._out_of_order.left.get(key, self.next_line)
        return line is not None and line.key == key and is_late(line)

    def cancellations(self, kind: Kind, key: str) -> Iterator[Line]:
        """Those of the history, of a scope or of the job."""
        return (line for line in self._out_of_order.cancellations if line.kind is kind and line.key == key)

    def take_out(self, key: str, fits: Callable[[Stood], bool]) -> Line | None:
        """The line which says that a scope struck, if it says what fits. It is taken out of the history, because where it
        stands among the lines of other tasks tells nothing."""
        for line in self.cancellations(Kind.SCOPE_CANCELLED, key):
            if fits(stood(line)):
                if self._out_of_order.left.pop(key, None) is not None:
                    return line
                if line in self._lines:
                    if line is self._lines[0]:
                        # What comes now comes after it: a call of the next attempt must not have begun before it.
                        self.came(max(line.line, self.latest))
                    self._lines.remove(line)
                    return line
        return None

    def taken(self, call: Call) -> None:
        """The call goes on with what it was given."""
        if self._calls.given is not None and self._calls.given.call is call:
            self._calls.given = None

    def leave(self, call: Call) -> None:
        """The call was cancelled while it waited. A line that was its own already is handed out again."""
        if self._calls.given is not None and self._calls.given.call is call:
            if self._calls.given.line is not None:
                self._lines.appendleft(self._calls.given.line)
            self._calls.given = None
        elif self._calls.waiting.get(call.key) is call:
            del self._calls.waiting[call.key]
            self._calls.left.add(call.key)

    @property
    def next_line(self) -> Line | None:
        """The line that is handed out next."""
        return self._lines[0] if self._lines else None

    @property
    def last_line(self) -> Line | None:
        """The last line that is still to come."""
        return self._lines[-1] if self._lines else None

    @property
    def strikes_next(self) -> bool:
        """Whether the next line says that a scope struck which is open."""
        line = self.next_line
        return line is not None and line.kind is Kind.SCOPE_CANCELLED and line.key in self.scopes and not is_late(line)

    def missing(self) -> Line | None:
        """The failure that was left out, and that a call which waits had when the next line came: that may rest on it."""
        found = [line for line in self.left_out.of(self._calls.waiting) if self._fits(line)]
        found += [line for line in self.left_out.of(self.scopes) if self._is_here(line)]
        fit = [line for line in found if self._lines and line.line < self._lines[0].line]
        return min(fit, key=lambda line: line.line, default=None)

    def _fits(self, line: Line) -> bool:
        call = self._calls.waiting[line.key]
        return line.kind in CALL_OF and (call.kind, call.name) == (CALL_OF[line.kind], line.name)

    def recall(self, line: Line) -> list[Line]:
        """The failure is handed out after all, as the next line; if that is what cut a block's body short, so is the block's
        failure, in its place. Returns both."""
        found = self.left_out.recall(line)
        self._by_key.update({one.key: one for one in found if one.kind in CALL_OF})
        self._lines = deque(sorted([*self._lines, *found], key=lambda one: one.line))
        return found

    def stuck(self, *, reordered: bool = False) -> ReplayMismatch:
        """The error of a handler whose tasks all wait in durable calls, none of which is the history's next line; or for a task
        that does, if it is `reordered`."""
        line, waiting = self._lines[0], list(self._calls.waiting.values())
        now = f"the handler now stands in {', '.join(map(str, waiting))}"
        reordered = reordered or self.out_of_order
        return stuck(
            self._job_id, line, now, reordered=reordered, no_line=any(call.key not in self._by_key for call in waiting)
        )

    def left(self) -> ReplayMismatch | None:
        """The error of a handler that has returned; None if it used every line."""
        if self._lines and self._lines[0].kind is Kind.CANCELLED:
            return returned_before_its_cancellation(self._job_id)
        left = [*self._lines, *(line for line in self._out_of_order.left.values() if line.kind in CALL_OF)]
        now = "the handler has returned"
        return mismatch(self._job_id, left[0], now, reordered=self.out_of_order) if left else None
