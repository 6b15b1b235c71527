"""The failures of steps and blocks: whether one is remembered.

A block's is a line at once. A step's is held until the next durable call begins, and is no line if the attempt ends before.
A call of another task may begin while the exception still goes up through the task that made the step, and may rest on it:
nobody can tell. So the line is written, and marks beside it (moments, whose keys begin with the line's number) say what became
of it:

`open`: a step's failure that got its line by another task's call. A block's needs no such mark. `taken`: the task that has the
exception has gone on to a durable call: the one that made the step, and after its end the task around it. Where a task has
ended without raising it, any task has gone on. From then on the line binds every attempt. `forgotten`: an attempt has failed
of it before: the next one does it again. `needed`: without it that one did not come to the lines after it, so it got the
failure again, and so does every later one. The line which says that the body of a block was cut short for a child's failure is
marked `forgotten` and `needed` as that is. A failure that the handler has ended with is `needed`, too, when a task in the
job's nursery makes a call in its `job.cleanup()`: it is cancelled for that failure alone.

`discard`, `retry-after`, `retry-afresh`, `snooze`: the step has raised what says something of its job, and so it does again
in later attempts. Workers before 0102 raise `StepFailed` there.
"""

from __future__ import annotations

import math
from contextlib import suppress
from functools import partial
from inspect import CORO_CLOSED, getcoroutinestate
from typing import TYPE_CHECKING, Any, Literal

import trio

from ...describing import leaves_of
from ...jobs import Discard
from ...lines import BeyondLimit, Kind, Line
from ...states import WISHES
from ...trio_internals import coroutine_of, scopes_around
from .detours import Detour

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator

    from ...jobs import CancelReason
    from .calls import Call
    from .history import History

OfJob = Literal["discard", "retry-after", "retry-afresh", "snooze"]
Mark = Literal["open", "taken", "forgotten", "needed"]


class _Failure:
    __slots__ = ("binds", "cut", "ends", "error", "fate", "line", "of_step", "task", "undoes")

    def __init__(
        self,
        error: BaseException,
        task: trio.lowlevel.Task,
        line: int | None = None,
        cut: int | None = None,
        *,
        of_step: bool,
        undoes: bool,
    ) -> None:
        self.binds = False
        """Whether an attempt before has gone on after it, so that this one is not what it fails of."""
        self.error = error
        self.of_step = of_step
        self.undoes = undoes
        """Whether it came in the clean-up of a job that is cancelled."""
        self.task = task
        self.line = line
        """The number of its line, once it has one."""
        self.cut = cut
        """That of the line which says that the block's body was cut short because of it."""
        self.ends = False
        """Whether it has ended a task of the job's own nursery, and so the attempt."""
        self.fate: Mark | None = None
        """What its line is marked with when that comes after the handler has ended with it."""

    @property
    def lines(self) -> list[int]:
        """The numbers of those that it has."""
        return [line for line in (self.cut, self.line) if line is not None]


class CleanUps:
    """The `job.cleanup()` of one attempt: their `scopes`, and what has left them."""

    __slots__ = ("failed", "scopes", "unanswered")

    def __init__(self) -> None:
        self.scopes = set[trio.CancelScope]()
        self.failed: BaseException | None = None
        """What the last one that has failed has raised."""
        self.unanswered: list[BaseException] = []
        """What those have raised after which the handler has not gone on with anything but clean-ups: what they did not come to
        is not undone, though the handler may have logged that, and gone on with the others."""

    @property
    def around(self) -> bool:
        """Whether the current task is in one."""
        return not self.scopes.isdisjoint(scopes_around(trio.lowlevel.current_task()))

    def fails(self, error: BaseException) -> None:
        """One ends with this exception."""
        self.failed = error
        self.unanswered.append(error)

    def call_begins(self, reason: CancelReason | None) -> None:
        """A durable call begins."""
        if self.unanswered and reason is None and not self.around:
            self.unanswered.clear()

    def forget(self) -> None:
        """The attempt has ended."""
        self.failed = None
        self.unanswered.clear()


class Failures:
    """Of one attempt: those after which their task has not gone on."""

    __slots__ = (
        "_ended",
        "_history",
        "_left",
        "_open",
        "_taken",
        "_undoing",
        "answered",
        "clean_ups",
        "detour",
        "handler_failed",
        "instead",
        "undone",
    )

    def __init__(self, history: History) -> None:
        self._history = history
        self._open: list[_Failure] = []
        self._taken: list[_Failure] = []
        """Those after which the task has gone on: each attempt gets them."""
        self._ended: list[_Failure] = []
        """Those that the handler has ended with, and the next attempt does without, while tasks in the job's nursery run."""
        self._undoing: list[_Failure] = []
        """Those of clean-ups after which the task has gone on: an outer one undoes, too, and then raises the same."""
        self.detour = Detour()
        self.clean_ups = CleanUps()
        self.undone: list[BaseException] = []
        """The failures of plain code because of which a `job.cleanup()` has made durable calls."""
        self.handler_failed: BaseException | None = None
        """Of plain code, with which the handler has ended while tasks in the job's nursery run: they are cancelled for it."""
        self.instead: dict[Call, Exception] = {}
        """What calls fail of that wait for their turn in the replay (half_undone.py)."""
        self.answered: list[BaseException] = []
        """What durable calls have raised, a wait's `TimeoutError` too, and others were made because of: it comes again."""
        self._left: list[tuple[trio.lowlevel.Task, Callable[[], None]]] = []
        """The tasks with an exception that has left a remembered scope, and what is done when they have gone on after it."""

    def raised(
        self, error: BaseException, key: str, name: str, value: str, of_job: tuple[OfJob, float] | None, *, undoes: bool
    ) -> None:
        """A step of this task is about to raise. `of_job`: what it says of its job. `undoes`: in a clean-up."""
        failure = _Failure(error, trio.lowlevel.current_task(), of_step=True, undoes=undoes)
        self._open.append(failure)
        self._history.hold(Kind.STEP_FAILED, key, name, value, gets=partial(self._gets, failure, of_job))

    def _gets(self, failure: _Failure, of_job: tuple[OfJob, float] | None, line: Line) -> None:
        failure.line = line.line
        if failure in self._open or failure.fate is not None:
            self._mark(line.line, "open")
        if failure.fate is not None:
            self._mark(line.line, failure.fate)
        if of_job is not None:
            said, seconds = of_job
            self._history.moment(mark(line.line, said), seconds)

    def raised_with_line(
        self, error: BaseException, line: Line, *, cut: int | None = None, undoes: bool = False
    ) -> None:
        """This task is about to raise a failure that has its line: a block's, or one that an earlier attempt has written.
        `cut`: the number of the line which says that the block's body was cut short. `undoes`: it is a step's in a clean-up."""
        of_step = line.kind is Kind.STEP_FAILED
        failure = _Failure(error, trio.lowlevel.current_task(), line.line, cut, of_step=of_step, undoes=undoes)
        failure.binds = self.binds(line)
        self._open.append(failure)

    def binds(self, line: Line) -> bool:
        """Whether an attempt before has gone on after it, so that none may fail of it and do it again."""
        marks = self._history.replay.moments
        if mark(line.line, "taken") in marks or mark(line.line, "needed") in marks:
            return True
        return line.kind is Kind.STEP_FAILED and mark(line.line, "open") not in marks

    def is_failure(self, error: BaseException) -> bool:
        """Whether an exception comes from a step or a block that has failed in this attempt, and from no cancellation."""
        return bool(self._of(error)) and not any(issubclass(type(leaf), trio.Cancelled) for leaf in leaves_of(error))

    def has_raised(self, error: BaseException) -> bool:
        """Whether a step of this attempt has raised this: a `Discard` goes through it as it is. (What a block raises may have
        plain code of its body in it.)"""
        steps = (one for one in (*self._open, *self._taken) if one.of_step)
        return any(error is leaf for one in steps for leaf in leaves_of(one.error))

    def each_attempt_ends_so(self, error: BaseException) -> bool:
        """Whether an exception of the handler is what it has gone on after, and comes again, or comes from that by its cause:
        no attempt can end otherwise. What the handler raises as its word on the job needs no cause. So it is with a failure
        that an attempt before has gone on after: a block's, whose body was cut short and has undone its part."""
        return _comes_from(error, _ids([*self._come_again(), *self.answered]))

    def comes_again(self, error: BaseException) -> bool:
        """Whether each attempt gets this very exception."""
        return id(error) in _ids(self._come_again())

    def _come_again(self) -> list[BaseException]:
        return [one.error for one in (*self._taken, *self._open) if one.binds or one in self._taken]

    def has_undone(self, error: BaseException) -> bool:
        """Whether an exception of the handler is a failure of plain code, or comes from one by its cause, for which each
        `job.cleanup()` has ended well."""
        return self.clean_ups.failed is None and _comes_from(error, _ids(self.undone))

    def leaves_scope(self, gone_on: Callable[[], None]) -> None:
        """An exception, a failure or another, has left a remembered scope in time. `gone_on` is called when the task that
        has it makes a durable call. If the attempt fails before, the next one may do again what was in the scope."""
        self._left.append((trio.lowlevel.current_task(), gone_on))

    def call_begins(self) -> bool:
        """This task makes a durable call: it has gone on after what it had, or a task that ended did not raise it. Returns
        whether a mark is to be written first."""
        if self._ended and self.clean_ups.around:
            return self._are_needed()
        # In a scope that is cancelled the call comes to nothing.
        if not (self._open or self._left) or trio.current_effective_deadline() <= -math.inf:
            return False
        task, job = trio.lowlevel.current_task(), self._history.running.scope_nursery
        left = [one for one in self._left if goes_on(one[0], job) is task or _is_caught(one[0], job)]
        self._left = [one for one in self._left if one not in left]
        for _, gone_on in left:
            gone_on()
        taken = [
            failure
            for failure in self._open
            if goes_on(failure.task, job) is task or (not failure.ends and _is_caught(failure.task, job))
        ]
        self._open = [failure for failure in self._open if failure not in taken]
        self._taken += taken
        self._undoing += [failure for failure in taken if failure.undoes]
        lines = [failure.line for failure in taken if failure.line is not None and not failure.binds]
        for line in lines:
            self._mark(line, "taken")
            self._history.replay.left_out.goes_on_after(line)
        return bool(lines)

    def _are_needed(self) -> bool:
        """A task in the job's nursery undoes what it did because the handler has ended with these: no attempt comes to what it
        calls in another way. Returns whether there is a line to write."""
        ended, self._ended = self._ended, []
        for failure in ended:
            failure.fate = "needed"
            for line in failure.lines:
                self._mark(line, "needed")
        return bool(ended)

    def recall(self) -> bool:
        """The replay does not come to the next line: a failure that was left out because an attempt had failed of it is handed
        out again, if that line may rest on it. Returns whether there is one."""
        replay = self._history.replay
        missing = replay.missing()
        if missing is not None:
            for line in replay.recall(missing):
                self._mark(line.line, "needed")
        return missing is not None

    def task_failed(self, error: BaseException) -> None:
        """A task that was started in the job's own nursery ends with `error`: so does the attempt, if it is in there. What
        `nursery.start` waits for is in another one until it has started."""
        if trio.lowlevel.current_task().parent_nursery is not self._history.running.scope_nursery:
            return
        for failure in self._of(error):
            failure.ends = True

    async def forget_those_of(self, error: BaseException | None = None, *, steps_alone: bool = False) -> None:
        """The attempt fails of `error`, or of what a task of the job's own nursery has ended with: the next one does again what
        has raised it. `steps_alone`: the job is being cancelled, and its blocks stay as they ended. What has failed in its
        clean-up is done again then though an outer clean-up has gone on after it."""
        failed = [failure for failure in self._open if failure.ends]
        if error is not None:
            failed += self._of(error)
        failed = [failure for failure in failed if not failure.binds or (steps_alone and failure.undoes)]
        if steps_alone:
            failed = [failure for failure in failed if failure.of_step]
            for reason in [*self.clean_ups.unanswered, *([] if error is None else [error])]:
                failed += self._of(reason, self._undoing)
        # The next attempt's body is not cut short for a failure that it has not had.
        lines = [line for failure in failed for line in failure.lines]
        if error is not None and not steps_alone:
            self._ended = failed
            for failure in failed:
                failure.fate = "forgotten"
        if lines:
            # The history may be lost, or have no room for lines: then the error is what there is to say.
            with suppress(RuntimeError, BeyondLimit):
                for line in lines:
                    self._mark(line, "forgotten")
                await self._history.written()

    def _of(self, error: BaseException, among: list[_Failure] | None = None) -> list[_Failure]:
        """Those that are in an exception: of those after which no task has gone on, or `among` these."""
        among = self._open if among is None else among
        if not among:
            return []
        reasons = set(map(id, reasons_of(error)))
        # `except*` raises groups of its own, with the same exceptions in them.
        return [one for one in among if any(id(leaf) in reasons for leaf in leaves_of(one.error))]

    def _mark(self, line: int, said: Mark) -> None:
        self._history.moment(mark(line, said), float(line))

    def forget(self) -> None:
        """The attempt has ended, to which the exceptions refer by their tracebacks."""
        for errors in (self._open, self._taken, self._undoing, self._left, self.undone, self.answered, self.instead):
            errors.clear()
        self.clean_ups.forget()
        self.handler_failed = None


def mark(line: int, said: Mark | OfJob) -> str:
    """The key of what is remembered of a failure's line. No key of a handler's looks like it."""
    return f"{line}:{said}"


def _ids(errors: Iterable[BaseException]) -> set[int]:
    """Those of the exceptions in them."""
    return {id(leaf) for error in errors for leaf in leaves_of(error)}


def _comes_from(error: BaseException, among: Container[int]) -> bool:
    """Whether each exception in it has one of these ids, or one of its causes has. What the handler raises as its word on the
    job needs no cause. Tasks beside one that has failed end with `Cancelled` where the job was cancelled, too."""
    if not among or is_a_cancellation(error):
        return False
    return all(
        any(id(reason) in among for reason in reasons_of(leaf, contexts=issubclass(type(leaf), WISHES)))
        for leaf in leaves_of(error)
        if not issubclass(type(leaf), trio.Cancelled)
    )


def reasons_of(error: BaseException, *, contexts: bool = True) -> Iterator[BaseException]:
    """The exceptions in a group, and those that they came from; without `contexts` only those that they name as causes."""
    left, seen = [error], set[int]()
    while left:
        for leaf in leaves_of(left.pop()):
            if id(leaf) not in seen:
                seen.add(id(leaf))
                yield leaf
                came_from = (leaf.__cause__, leaf.__context__ if contexts else None)
                left += [one for one in came_from if one is not None]


def is_a_cancellation(error: BaseException) -> bool:
    """Whether nothing but `Cancelled` is in it."""
    return all(issubclass(type(leaf), trio.Cancelled) for leaf in leaves_of(error))


def is_its_word(error: BaseException) -> bool:
    """Whether a cancelled handler has raised this as its word on the job: by `Discard`, or from the `Cancelled` itself."""
    return issubclass(type(error), Discard) or any(
        issubclass(type(one), trio.Cancelled) for one in reasons_of(error, contexts=False)
    )


def comes_from_a_cancellation(error: BaseException | None) -> bool:
    """Whether a `Cancelled` is in it, or among what it came from."""
    return error is not None and any(issubclass(type(leaf), trio.Cancelled) for leaf in reasons_of(error))


def goes_on(task: trio.lowlevel.Task | None, job: trio.Nursery | None = None) -> trio.lowlevel.Task | None:
    """The task that goes on with what this one had, an exception or children: itself, or after its end the one around it. None
    if none does: what a task of the `job`'s own nursery raises reaches no handler."""
    while task is not None and getcoroutinestate(_coroutine(task)) == CORO_CLOSED:
        opened = task.parent_nursery
        task = None if opened is None or opened is job else opened.parent_task
    return task


def _is_caught(task: trio.lowlevel.Task | None, job: trio.Nursery | None) -> bool:
    """Whether the task that had an exception, or one around it, has ended and did not raise it: Trio cancels the nursery of a
    task that raises."""
    while task is not None and getcoroutinestate(_coroutine(task)) == CORO_CLOSED:
        opened = task.parent_nursery
        if opened is not None and not opened.cancel_scope.cancel_called:
            return True
        task = None if opened is None or opened is job else opened.parent_task
    return False


def _coroutine(task: trio.lowlevel.Task) -> Any:
    return coroutine_of(task)
