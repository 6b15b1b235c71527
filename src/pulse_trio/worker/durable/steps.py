"""`job.step`: a function that is called once, and whose result later attempts get."""

from __future__ import annotations

import functools
import inspect
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import trio

from ...callables import is_async, is_function
from ...describing import headline_of, leaves_of, raised_by_ctrl_c, storable
from ...errors import DatabaseUnavailable, ReplayMismatch, StepFailed, UsageError
from ...handlers import Handler, UnfitValue, encode_result
from ...handlers.models import from_builtins
from ...handlers.payloads import readable_result
from ...handlers.signature import hints_of
from ...jobs import Discard, Job, RetryAfter, Snooze
from ...lines import BeyondLimit, Kind, Line, Lines
from ...states import WISHES
from ...store import CommitUnknown, ended_by_limit
from ..jobs.given_transaction import Transaction
from ..jobs.job_states import EndsHandler
from .afresh import is_asked_by
from .beginning import begin
from .failures import mark, reasons_of
from .reordering import begin_anew_if_lines_are_left
from .unreadable import decoding

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .calls import Call
    from .durable import Durable
    from .failures import OfJob

_TEXT = 4000
"""Characters of a step's exception that are remembered."""
_LOCKED_PAUSE = 0.02
"""Seconds until a row that another transaction has locked (a beat, most often) is tried again."""
_DURABLE_CALLS = frozenset(
    (
        "step",
        "transaction_step",
        "durable_nursery",
        "move_on_after",
        "fail_after",
        "sleep",
        "sleep_until",
        "wait_for_event",
    )
)
"""The methods of a `Job` that are no steps."""
_REMEMBERED = (
    "This failure is remembered: the handler had made durable calls after it, so the step is not called again. A handler "
    "that has undone what it did ends with Discard, or begins again with RetryAfter(60, afresh=True)."
)


async def step(durable: Durable, function: Callable[..., Any], args: Sequence[Any], key: str | None) -> Any:
    """See `Job.step`."""
    # An annotation that JSON cannot carry is refused in every attempt, and before the function has an effect.
    known = _known(function)
    call = await begin(durable, "step", known.name, key, "job.step", (function, args))
    line = await durable.replayed(call)
    if line is not None:
        return remembered(durable, function, line)
    _keep_room(durable)
    undoes = durable.running.cancel_reason is not None
    try:
        with durable.awaiting(call):
            if known.is_async:
                value = await function(*args)
            else:
                value = await trio.to_thread.run_sync(_plain, function, args, limiter=durable.parts.limiter)
                if type(value) is _Raised:
                    try:
                        raise value.error
                    finally:
                        del value  # its error refers to this frame
    except BaseException as error:  # SystemExit too; the rest goes on: _is_its_failure
        if not _is_its_failure(error):
            raise
        failed = await _failed_of(durable, call, error, undoes=undoes)  # noqa: ASYNC102, ASYNC120 -- no cancellation comes here
        if failed is error:
            raise
        raise failed from error  # noqa: ASYNC104 -- it is no cancellation
    finally:
        durable.history.room.give_back()
    text = _encoded(durable, known.name, value)
    del value
    line = await durable.record(
        call, Kind.STEP, lambda number: durable.parts.coded(durable.running.claim, number, text)
    )
    return _first(durable, function, line, text)


async def transaction_step(durable: Durable, function: Callable[..., Any], args: Sequence[Any], key: str | None) -> Any:
    """See `Job.transaction_step`."""
    name, running = name_of(function, "job.transaction_step"), durable.running
    if not is_async(function):
        raise UsageError(
            f"job.transaction_step takes an async function, whose first argument is the transaction, got {name}."
        )
    _known(function)  # as in `step`
    call = await begin(durable, "step", name, key, "job.transaction_step", (function, args))
    line = await durable.replayed(call)
    if line is not None:
        return remembered(durable, function, line)
    limit = min(running.timeout_deadline, running.job_deadline) - trio.current_time()
    undoes, begun = running.cancel_reason is not None, None
    try:
        # Once its line is under way the handler gets the result, as in `step`: a cancellation waits for COMMIT.
        with trio.CancelScope() as decided:
            if durable.quiet.has_others():
                durable.quiet.note(call)
            # No other line of this job is written until it is known whether this one is.
            async with AsyncExitStack() as held:
                async with (
                    durable.history.alone() as number,
                    durable.parts.transactions.begin(seconds=limit) as begun,
                ):
                    with durable.awaiting(call):
                        value = await function(Transaction(begun.connection, None), *args)
                    text = _encoded(durable, name, value, "its writes are rolled back, and")
                    coded = durable.parts.coded(running.claim, number, text)
                    line = Line(number, Kind.STEP, call.key, name, coded)
                    lines = Lines(running.claim, [line], durable.history.version)
                    while (written := await begun.remember(lines)) is None:  # noqa: ASYNC110 -- no event tells of a lock
                        await trio.sleep(_LOCKED_PAUSE)
                    if not written:
                        raise _FenceLost
                    decided.shield = True
                    await held.enter_async_context(durable.quiet.delivering.writing(numbered=True))
                durable.history.are_written(number)
                await durable.history.follows(number)
            await durable.quiet.delivered(call, number)
            return _first(durable, function, Line(number, Kind.STEP, call.key, name), text)
    except _FenceLost:
        if not running.ended:
            durable.parts.jobs.lose(running)
        running.cancel("fence-lost")
        await trio.lowlevel.checkpoint()  # noqa: ASYNC120 -- the cancellation says more
        raise RuntimeError(f"job {running.claim.id} lost its lease; its transaction was rolled back") from None
    except CommitUnknown:
        # The next attempt begins when the transaction has ended, which holds the job's row until then, and looks for the line.
        running.cancel("lease-unproven")
        await trio.lowlevel.checkpoint()  # noqa: ASYNC120 -- the cancellation says more
        raise
    except BeyondLimit as error:
        raise durable.fail(error) from None
    except BaseException as error:  # SystemExit too; the rest goes on: _is_its_failure
        if not _is_its_failure(error):
            raise
        if issubclass(type(error), DatabaseUnavailable):
            durable.fail(cast("DatabaseUnavailable", error))
            raise
        if begun is not None and begun.lost and not _is_ended_for_its_slowness(error):
            said = f"step {name}: its writes are rolled back, for the connection was lost: {headline_of(error)}"
            lost = durable.fail(DatabaseUnavailable(storable(said)[:_TEXT]))
            raise lost from error  # noqa: ASYNC104 -- it is no cancellation
        failed = await _failed_of(durable, call, error, undoes=undoes)  # noqa: ASYNC102, ASYNC120 -- no cancellation comes here
        if failed is error:
            raise
        raise failed from error  # noqa: ASYNC104 -- it is no cancellation
    raise AssertionError("this scope is not cancelled")


def _is_ended_for_its_slowness(error: BaseException) -> bool:
    """Whether PostgreSQL has closed the connection because the step let its transaction stand too long, as it would again: the
    handler hears of that, and can undo what it did before."""
    return any(ended_by_limit(one) is not None for one in reasons_of(error))


def _keep_room(durable: Durable) -> None:
    """For the line of a step that is about to be called. Raises `BeyondLimit`."""
    try:
        durable.history.room.keep()
    except BeyondLimit as error:
        raise durable.fail(error) from None


class _Raised(NamedTuple):
    """What a plain function has raised. A thread that ends with it asks for its traceback: where a class of the user's refuses
    that, nobody was told that the thread had ended, and the step never did."""

    error: BaseException


def _plain(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Calls a plain function, in its thread. Raises `UsageError` if that has only made a coroutine."""
    try:
        value = function(*args)
    except BaseException as error:  # noqa: ASYNC103 -- it runs in a thread, and the step raises it
        return _Raised(error)  # noqa: ASYNC104 -- `step` raises it, in the handler's task
    if inspect.iscoroutine(value):
        value.close()
        raise UsageError(
            f"job.step takes an async function and its arguments, got {name_of(function)}, which is no async function and "
            "returns a coroutine: write `job.step(fetch, page)` for `job.step(lambda: fetch(page))`."
        )
    return value


class _FenceLost(Exception):
    pass


def _undoes(durable: Durable) -> bool:
    """Whether a step that has failed is part of the clean-up of a cancelled job: also of one that had begun before the
    cancellation, which is told when it has ended."""
    return durable.cancelling.noted or (durable.running.cancel_reason is not None and durable.failures.clean_ups.around)


def _is_its_failure(error: BaseException) -> bool:
    """Whether a step's function has failed of it: also of a `sys.exit()` in what it calls, which must have its line too. Not of
    a cancellation, nor of what ends the handler."""
    if issubclass(type(error), Exception):
        return True
    # Python closes the coroutine of a handler that will never go on by `GeneratorExit`, and not in a task of Trio's.
    ends = (
        (trio.Cancelled, EndsHandler) if trio.lowlevel.in_trio_task() else (trio.Cancelled, EndsHandler, GeneratorExit)
    )
    return not any(issubclass(type(leaf), ends) or raised_by_ctrl_c(leaf) for leaf in leaves_of(error))


async def _failed_of(durable: Durable, call: Call, error: BaseException, *, undoes: bool) -> BaseException:
    """`failure_of`, once the replay has no line left, where the step is done again, and other tasks have what came before."""
    await begin_anew_if_lines_are_left(durable)
    await durable.quiet.delivering.fails()  # shields itself, until the lease is over
    return failure_of(durable, call, error, undoes=undoes)


def failure_of(durable: Durable, call: Call, error: BaseException, *, undoes: bool) -> BaseException:
    """What a step raises whose function has raised `error`; it is remembered when the next durable call begins. What says
    something about the job, and what does not say that the step has failed, is raised as it is. `undoes`: the step began after
    the job was cancelled."""
    leaves = leaves_of(error)
    if any(issubclass(type(leaf), trio.Cancelled) or raised_by_ctrl_c(leaf) for leaf in leaves):
        return error
    if error is durable.fatal:
        return error
    of_job = _of_job(leaves)
    said = storable(f"{_said_of(call.name)}{headline_of(error)}")[:_TEXT]
    failed = error if of_job is not None else StepFailed(said, step=call.name)
    if undoes:
        durable.cancelling.step_ends(failed=True)
    if durable.cancelling.noted and durable.keys.in_main:
        durable.failures.detour.step_failed(durable.keys.count)
    durable.quiet.note_held(call)
    durable.failures.raised(
        failed, call.key, call.name, msgspec.json.encode(said).decode(), of_job, undoes=_undoes(durable)
    )
    return failed


def _said_of(step: str) -> str:
    return f"Step {step} failed: "


def _of_job(leaves: Sequence[BaseException]) -> tuple[OfJob, float] | None:
    """What exceptions say about the job, if all of them do, and the seconds that it waits."""
    if not all(issubclass(type(leaf), WISHES) for leaf in leaves):
        return None
    first = leaves[0]
    if issubclass(type(first), Discard):
        return "discard", 0.0
    waits = cast("Snooze | RetryAfter", first)
    if issubclass(type(waits), Snooze):
        return "snooze", waits.seconds
    return "retry-afresh" if is_asked_by(first) else "retry-after", waits.seconds


def _failed_again(durable: Durable, line: Line) -> Exception:
    """What a step has raised in an earlier attempt."""
    said, moments = msgspec.json.decode(line.value or '""', type=str), durable.history.replay.moments
    if mark(line.line, "discard") in moments:
        return Discard(said.removeprefix(_said_of(line.name)).removeprefix("Discard: "))
    if (seconds := moments.get(mark(line.line, "snooze"))) is not None:
        return Snooze(seconds)
    if (seconds := moments.get(mark(line.line, "retry-after"))) is not None:
        return RetryAfter(seconds)
    if (seconds := moments.get(mark(line.line, "retry-afresh"))) is not None:
        return RetryAfter(seconds, afresh=True)
    return StepFailed(said, step=line.name)


def remembered(durable: Durable, function: Callable[..., Any], line: Line) -> Any:
    """What an attempt before got from a step. Raises `StepFailed` or what else the step has raised, `ReplayMismatch`."""
    if line.kind is Kind.STEP_FAILED:
        failed = _failed_again(durable, line)
        if durable.cancelling.noted and durable.keys.in_main:
            durable.failures.detour.step_failed(durable.keys.count)
        durable.failures.raised_with_line(failed, line, undoes=durable.cancelling.noted)
        if durable.failures.binds(line):
            failed.add_note(_REMEMBERED)
        raise failed
    with decoding(durable):
        text = durable.parts.plain(durable.running.claim, line.line, line.value or "null")
    try:
        return decoded(function, text)
    except (msgspec.DecodeError, RecursionError) as error:
        job_id = durable.running.claim.id
        raise durable.fail(
            ReplayMismatch(
                f"job {job_id}, line {line.line}: the remembered result of step {line.name} does not fit its return "
                f"annotation: {error}. Deploy code whose annotation fits it, or branch on job.version; or run the job again "
                f"from the beginning: pulse-trio jobs retry {job_id} --afresh"
            )
        ) from None


def decoded(function: Callable[..., Any], text: str) -> Any:
    """A step's result by its return annotation. Raises `msgspec.ValidationError`."""
    return msgspec.json.decode(text, type=_known(function).result, dec_hook=from_builtins)


def _encoded(durable: Durable, name: str, value: object, then: str = "its effects stay, and") -> str:
    """A step's result as JSON. Raises `UnfitValue`, which says what has become of the step's work."""
    try:
        return encode_result(f"step {name}", value)
    except UnfitValue as error:
        job_id = durable.running.claim.id
        raise durable.fail(
            UnfitValue(
                f"{error} The step has run: {then} no line was written. Mend what it returns; pulse-trio jobs retry {job_id} "
                "calls it again."
            )
        ) from None


def _first(durable: Durable, function: Callable[..., Any], line: Line, text: str) -> Any:
    """The result of a step that has just been called. Raises `UnfitValue` if it is not what its own annotation says."""
    durable.cancelling.step_ends(failed=False)
    try:
        return decoded(function, text)
    except msgspec.ValidationError as error:
        job_id = durable.running.claim.id
        raise durable.fail(
            UnfitValue(
                f"job {job_id}, line {line.line}: step {line.name} returned what does not fit its own return annotation: "
                f"{error}. Its result is remembered. Mend the annotation, then pulse-trio jobs retry {job_id}; if the result "
                f"is wrong, mend the function and do every step again: pulse-trio jobs retry {job_id} --afresh"
            )
        ) from None


def name_of(function: Callable[..., Any], what: str = "job.step") -> str:
    """A step's name in the history. `what` is the call as its caller knows it. Raises `UsageError` for what is no step."""
    plain: Any = function
    while isinstance(plain, functools.partial):
        plain = plain.func
    if isinstance(plain, Handler):
        raise UsageError(
            f"{what} takes a function, got the handler {plain.kind!r}, which is a job of its own: start it in a block "
            f"`async with job.durable_nursery() as nursery:` with nursery.start_soon(...). To run its function here as a "
            "step, pass a function that does its work."
        )
    if isinstance(getattr(plain, "__self__", None), Job) and plain.__name__ in _DURABLE_CALLS:
        raise UsageError(
            f"{what} takes a function of yours, got job.{plain.__name__}, which is a durable call itself: make it in the "
            "handler, without a step."
        )
    if not callable(plain):
        hint = f": write `{what}({plain.__name__}, ...)`" if inspect.iscoroutine(plain) else ""
        raise UsageError(f"{what} takes a function and its arguments, got {function!r:.200}{hint}.")
    return storable(str(getattr(plain, "__name__", type(plain).__name__)))[:200]


class _Known(NamedTuple):
    """What all calls of a function have in common: its name in the history, and the type that its result is read as."""

    name: str
    is_async: bool
    result: Any


def _known(function: Callable[..., Any]) -> _Known:
    """Raises `UsageError` for what is no step, and for an annotation that JSON cannot carry."""
    try:
        return _known_of(function)
    except TypeError:  # not hashable
        return _Known(name_of(function), is_async(function), Any)


@functools.lru_cache(maxsize=1000)
def _known_of(function: Callable[..., Any]) -> _Known:
    name, plain = name_of(function), inspect.unwrap(function)
    result = readable_result(f"Step {name!r}", hints_of(name, plain).get("return", Any)) if is_function(plain) else Any
    return _Known(name, is_async(function), result)
