"""Replay: which call of a handler gets which line of its history, and when. Pure: no I/O, no Trio.

Lines are handed out in their order, one at a time: the call that fits the next line gets it, the others wait for theirs. The
line after it is handed out when that call has gone on. So a race between tasks has the same winner again. When no line is left,
the calls that wait go on live, in the order in which they began.

Where tasks wait for each other by other means, a limiter, say, their order may be another one in each attempt. If it cannot be
that of the lines, a call gets its line before its turn; if none that waits has a line, they go on live, and the lines that are
left are those of the calls with their keys.
"""

from __future__ import annotations

from collections import deque
from functools import cached_property
from typing import TYPE_CHECKING

from ...errors import ReplayMismatch
from ...lines import CALL_OF, Kind, Line
from .calls import Turn
from .failures import mark
from .keys import highest_number, highest_of, is_entry
from .mismatches import mismatch
from .seen import bound_in, seen_in
from .stood import CANCELLATIONS, is_late, stood
from .unopened import Unopened, body_key, is_body

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from collections.abc import Set as AbstractSet

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
                if line.name:
                    self.unopened.within[line.key] = line.name
            else:
                ordered.append(line)
        self._out_of_order = _OutOfOrder([line for line in ordered if line.kind in CANCELLATIONS])
        self._left_out = {line.key: line for line in ordered if self._is_left_out(line)}
        """Failures that attempts have failed of, by the keys of their calls, and what says that a block's body was cut short
        for one, by the key of its scope. Lines of other tasks may rest on them."""
        self.marks: list[str] = []
        """Those which this attempt writes before a line of its own comes: an attempt that finds one would go on otherwise."""
        # What cut a body short, and its block's failure, where the main task has done something in its clean-up. Without it the
        # body would go on there, with calls of the same numbers.
        for line in self._with_clean_ups(ordered, moments):
            del self._left_out[line.key]
            self.marks.append(mark(line.line, "needed"))
            self.moments[self.marks[-1]] = float(line.line)
        ordered = [line for line in ordered if not self._is_left_out(line)]
        if ordered and self._is_loose(ordered[-1], moments):
            # What says that a block's body was cut short, if nothing rests on it: a child that has failed still cuts it again,
            # and if a person has started that child again the block would end well without the rest of its body.
            self.marks.append(mark(ordered.pop().line, "forgotten"))
        self._lines = deque(ordered)
        self._by_key = {line.key: line for line in ordered if line.kind in CALL_OF}
        self._waiting: dict[str, Call] = {}
        self._given: Turn | None = None
        self.scopes = set[str]()
        """The keys of the remembered scopes that are open."""
        self.resumed: Resumed | None = None
        """What the attempts before have left; None in the first, and in one that comes after others that left nothing."""

    @cached_property
    def seen(self) -> dict[tuple[str, str], int]:
        """Where the handler has seen that children had ended, by block and child."""
        return {} if self.resumed is None else seen_in(self.resumed.lines)

    @cached_property
    def bound(self) -> AbstractSet[tuple[str, str]]:
        """Those after which it has gone on: what it has done since may rest on them."""
        return frozenset() if self.resumed is None else bound_in(self.resumed.lines, self.leaves_out)

    def _is_left_out(self, line: Line) -> bool:
        return (
            line.kind in (Kind.STEP_FAILED, Kind.BLOCK_FAILED, Kind.SCOPE_CANCELLED)
            and mark(line.line, "forgotten") in self.moments
            and mark(line.line, "needed") not in self.moments
        )

    def _with_clean_ups(self, ordered: Iterable[Line], moments: Sequence[Line]) -> list[Line]:
        found: list[Line] = []
        for cut in self._left_out.values():
            ends = self._end_after(cut) if cut.kind is Kind.SCOPE_CANCELLED and stood(cut).count else None
            if ends is None:
                continue
            between = [line for line in ordered if cut.line < line.line < ends.line and not self.leaves_out(line)]
            waits = [line for line in moments if cut.line < line.line < ends.line]
            # Else the attempt after it had gone on without it, and did what comes then.
            together = mark(cut.line, "forgotten") not in (line.key for line in waits)
            if together and (
                highest_of(line.key for line in between) or highest_number((line.key for line in waits), ())
            ):
                found += [cut, ends]
        return found

    def _end_after(self, cut: Line) -> Line | None:
        """The failure of the block whose body was cut short so, if it is left out too."""
        ends = (one for one in self._left_out.values() if body_key(one.key) == cut.key and one.line > cut.line)
        return next(ends, None)

    def _is_loose(self, last: Line, moments: Iterable[Line]) -> bool:
        if last.kind is not Kind.SCOPE_CANCELLED or not is_body(last.key) or mark(last.line, "needed") in self.moments:
            return False
        # A handler's scope may have such a key; its moment is its deadline.
        if self.moments.get(last.key, 0.0) > 0.0:
            return False
        # What the clean-up waits for is remembered by number. The rest of the body has the same numbers.
        return not highest_number((line.key for line in moments if line.line > last.line), ())

    def leaves_out(self, line: Line) -> bool:
        """Whether the line is a failure that an attempt has failed of, and that has not been needed since."""
        return self._left_out.get(line.key) == line

    @property
    def over(self) -> bool:
        """Whether every line has been handed out, and its call has gone on. Calls that have no line may still have to."""
        return not self._lines and (self._given is None or self._given.line is None)

    @property
    def idle(self) -> bool:
        """Whether calls wait, and none of them is about to go on."""
        return bool(self._waiting) and self._given is None

    @property
    def out_of_order(self) -> bool:
        """Whether a line was handed out before its turn."""
        return self._out_of_order.begun

    def is_latest(self, call: Call) -> bool:
        """Whether no call that waits began after this one."""
        return next(reversed(self._waiting.values()), None) is call

    def has_line(self, key: str) -> bool:
        """Whether the call with this key has a line."""
        return key in self._by_key

    def is_cancelled_at(self, key: str) -> bool:
        """Whether the job's cancellation is still to come, and the call with this key stood then."""
        return any(line.kind is Kind.CANCELLED and key in stood(line).at for line in self._lines)

    def begin(self, call: Call) -> None:
        """The call waits for its turn. Raises `ReplayMismatch` if the history has another call under its key."""
        self._check(call)
        self._waiting[call.key] = call

    def _check(self, call: Call) -> None:
        line = self._by_key.get(call.key)
        if line is not None and (CALL_OF[line.kind] != call.kind or line.name != call.name):
            raise mismatch(self._job_id, line, f"the handler now calls {call}")

    def goes_on_by_keys(self) -> bool:
        """No call that waits has a line, and the calls of the next lines wait for the tasks that make these: the order of the
        lines cannot be kept, so those that wait go on live. Returns whether that may be: where a cancellation of the job is to
        come, it comes first."""
        if self._given is None and self._lines and all(line.kind is not Kind.CANCELLED for line in self._lines):
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
        if self._given is not None:
            return None
        turn = self._early(anew=anew) if early else self._next(is_early)
        if turn is not None:
            if turn.line is not None:
                if turn.line is not self._lines[0]:
                    self._out_of_order.begun = True
                    self._out_of_order.raised = self._out_of_order.raised or turn.line.kind in _RAISES
                self._lines.remove(turn.line)
            if turn.call is not None:
                del self._waiting[turn.call.key]
                self._given = turn
        return turn

    def _next(self, is_early: Callable[[Line], bool]) -> Turn | None:
        if not self._lines:
            return Turn(next(iter(self._waiting.values())), None) if self._waiting else None
        line = self._lines[0]
        for key in self._places.keys() & self._waiting.keys():
            if not self.stands_at(key):
                return Turn(self._waiting[key], None)
        if line.kind in CANCELLATIONS:
            return Turn(None, line) if self._is_here(line) and not is_early(line) else None
        call = self._waiting.get(line.key)
        return None if call is None else Turn(call, line)

    def _early(self, *, anew: bool) -> Turn | None:
        raises: Turn | None = None
        for line in self._lines:
            if line.kind is Kind.CANCELLED or (line.key in self.scopes and not is_late(line)):
                return raises or Turn(None, line)
            if line.kind in CANCELLATIONS:
                continue  # its task is behind those that wait
            if (call := self._waiting.get(line.key)) is not None:
                if line.kind not in _RAISES:
                    return Turn(call, line)
                # It may cut those short that are behind others.
                raises = raises or Turn(call, line)
        if raises is not None:
            return raises
        without = (call for key, call in self._waiting.items() if key not in self._by_key)
        return Turn(call, None) if anew and (call := next(without, None)) is not None else None

    def comes_before_others(self) -> Line | None:
        """What may cut tasks short, and would come before its turn, before calls that had their lines when it came."""
        waited, raises = False, None
        for line in self._lines:
            if line.kind is Kind.CANCELLED or (line.key in self.scopes and not is_late(line)):
                return raises or (line if waited else None)
            if line.key in self._waiting:
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
        return here and all(key in self._waiting or self._came_before(key, line) for key in stood(line).at)

    def _came_before(self, key: str, line: Line) -> bool:
        """Whether the line of a call was written, and its task had not gone on yet when the cancellation came."""
        own = self._by_key.get(key)
        return own is not None and own.line < line.line

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

    def take_out(self, key: str, fits: Callable[[Stood], bool]) -> Line | None:
        """The line which says that a scope struck, if it says what fits. It is taken out of the history, because where it
        stands among the lines of other tasks tells nothing."""
        for line in self._out_of_order.cancellations:
            if line.key == key and line.kind is Kind.SCOPE_CANCELLED and fits(stood(line)):
                if self._out_of_order.left.pop(key, None) is not None:
                    return line
                if line in self._lines:
                    self._lines.remove(line)
                    return line
        return None

    def taken(self, call: Call) -> None:
        """The call goes on with what it was given."""
        if self._given is not None and self._given.call is call:
            self._given = None

    def leave(self, call: Call) -> None:
        """The call was cancelled while it waited. A line that was its own already is handed out again."""
        if self._given is not None and self._given.call is call:
            if self._given.line is not None:
                self._lines.appendleft(self._given.line)
            self._given = None
        elif self._waiting.get(call.key) is call:
            del self._waiting[call.key]

    @property
    def next_line(self) -> Line | None:
        """The line that is handed out next."""
        return self._lines[0] if self._lines else None

    def missing(self) -> Line | None:
        """The failure that a call which waits had when the next line was written, and that was left out: that line may rest on
        it. None: there is no such failure."""
        found = [self._left_out[key] for key in self._waiting if key in self._left_out]
        found = [line for line in found if self._fits(line)]
        found += [
            self._left_out[key] for key in self.scopes if key in self._left_out and self._is_here(self._left_out[key])
        ]
        fit = [line for line in found if self._lines and line.line < self._lines[0].line]
        return min(fit, key=lambda line: line.line, default=None)

    def _fits(self, line: Line) -> bool:
        call = self._waiting[line.key]
        return line.kind in CALL_OF and (call.kind, call.name) == (CALL_OF[line.kind], line.name)

    def recall(self, line: Line) -> list[Line]:
        """The failure is handed out after all, as the next line; if that is what cut a block's body short, so is the block's
        failure, in its place. Returns both."""
        found = [line]
        if line.kind is Kind.SCOPE_CANCELLED:
            found += [one for one in [self._end_after(line)] if one is not None]
        for one in found:
            del self._left_out[one.key]
            if one.kind in CALL_OF:
                self._by_key[one.key] = one
        self._lines = deque(sorted([*self._lines, *found], key=lambda one: one.line))
        return found

    def stuck(self, *, reordered: bool = False) -> ReplayMismatch:
        """The error of a handler whose tasks all wait in durable calls, none of which is the history's next line; or for a task
        that does, if it is `reordered`."""
        line, waiting = self._lines[0], list(self._waiting.values())
        now = f"the handler now stands in {', '.join(map(str, waiting))}"
        reordered = reordered or self.out_of_order
        if reordered or all(call.key in self._by_key for call in waiting):
            return mismatch(self._job_id, line, now, reordered=reordered)
        return mismatch(
            self._job_id,
            line,
            f"{now}, which has no line. If a plain Trio scope (trio.move_on_after) cut it short in an earlier attempt, that is "
            "not remembered: use job.move_on_after or job.fail_after, whose end is",
            cause="Otherwise the code changed under a running job",
        )

    def left(self) -> ReplayMismatch | None:
        """The error of a handler that has returned; None if it used every line."""
        if self._lines and self._lines[0].kind is Kind.CANCELLED:
            return ReplayMismatch(
                f"job {self._job_id} was cancelled in an earlier attempt while its handler awaited something plain, and this "
                "time it returned before. What is left of its clean-up was not done: "
                f"pulse-trio jobs retry {self._job_id} does that"
            )
        left = [*self._lines, *(line for line in self._out_of_order.left.values() if line.kind in CALL_OF)]
        now = "the handler has returned"
        return mismatch(self._job_id, left[0], now, reordered=self.out_of_order) if left else None
