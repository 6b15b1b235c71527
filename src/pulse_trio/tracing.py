"""Traces: what an instrument may make beside listening to events, spans around what clients and workers do.

Events tell what has happened. A span has to be there before: what a handler does, its own library's spans included, belongs
to the span only if that is current in the handler's context. So an instrument that makes spans (`pulse_trio.otel` has one) has
a method `spans()` that returns a `SpanMaker`.

The trace context of a job, as W3C's traceparent and tracestate, stands in the row's `options` under `trace` and `tracestate`;
that of the attempt before under `before`. Workers that know nothing of traces ignore these names. What stands there may be
anything: `context_of` and `before_of` read it or ignore it.
"""

from __future__ import annotations

import logging
import re
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import msgspec
import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from .jobs import Claim, JobRequest

T = TypeVar("T")

LONGEST_STATE = 512
"""Bytes of a tracestate. A longer one is left out; the trace goes on without it, as W3C has it."""
_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)
_STATE = re.compile(r"[ !#-Z^-z|}~]{1,512}", re.ASCII)
"""Printable ASCII without what JSON escapes, and without the brackets that the database counts in options."""
_LONGEST_OPTIONS = 3800
"""Bytes of options with a trace in them: the database takes 4,000, and workers 4,096."""
LONGEST_OF_CHILDREN = 2900
"""The same of a durable job's children, where a mark and a deadline are added (migrations/0035_trees.sql)."""


class TraceContext(NamedTuple):
    """W3C's trace context of one span: `parent` is the traceparent, `state` the tracestate."""

    parent: str
    state: str | None = None


class _Traced(msgspec.Struct):
    trace: Any = None
    tracestate: Any = None
    before: Any = None


_decoder = msgspec.json.Decoder(_Traced)


def context_of(options: str | None) -> TraceContext | None:
    """The trace context in a row's options; None if there is none, or none that can be read."""
    if options is None or '"trace"' not in options:
        return None
    try:
        traced = _decoder.decode(options)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return checked(traced.trace, traced.tracestate)


def before_of(claim: Claim) -> TraceContext | None:
    """The span of the attempt before this one, as its worker has left it with the job (migrations/0043_spans.sql); None if that
    made none, or died."""
    if claim.options is None or '"before"' not in claim.options:
        return None
    try:
        before = _decoder.decode(claim.options).before
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    match before:
        case [int(attempt), parent] if attempt == claim.attempt - 1:
            return checked(parent)
        case _:
            return None


def checked(parent: object, state: object = None) -> TraceContext | None:
    """The trace context of these two, whatever they are; None without a valid traceparent. A tracestate that cannot be kept is
    left out."""
    if not isinstance(parent, str) or _PARENT.fullmatch(parent) is None:
        return None
    if not isinstance(state, str) or _STATE.fullmatch(state) is None:
        state = None
    return TraceContext(parent, state)


def carrying(request: JobRequest, context: TraceContext | None, longest: int = _LONGEST_OPTIONS) -> JobRequest:
    """The request, with the trace context in its options. A job whose options leave no room for it, with `longest` bytes at
    most, has none."""
    if context is None or len(request.options or "") > longest - LONGEST_STATE:
        return request
    state = "" if context.state is None else f',"tracestate":"{context.state}"'
    rest = "}" if request.options in (None, "{}") else f",{request.options[1:]}"
    return msgspec.structs.replace(request, options=f'{{"trace":"{context.parent}"{state}{rest}')


class OpenSpan(Protocol):
    """A span that has begun, and is current in the context that began it until `leave`."""

    @property
    def context(self) -> TraceContext | None:
        """What travels with the jobs that it causes."""
        ...

    def leave(self) -> None:
        """Makes the span before it current again. In the same context as its beginning."""
        ...

    def end(self, ended: Ending) -> None:
        """The span is over."""
        ...


class Ending(NamedTuple):
    """How what a span describes has ended. `outcome` is a job's; `failure` is the exception, as the object or, of another
    process, as something like it; `error` is its text with the traceback. `jobs` are the ids of jobs that were enqueued."""

    outcome: str | None = None
    failure: BaseException | None = None
    error: str | None = None
    jobs: Sequence[int] = ()
    requests: Sequence[JobRequest] = ()


class SpanMaker(Protocol):
    """Begins spans. Each method begins one and makes it current in the caller's context. None may block."""

    def enqueue(self, request: JobRequest | None) -> OpenSpan:
        """Of one job that is enqueued, or of many (None)."""
        ...

    def run(self, claim: Claim, context: TraceContext | None, before: TraceContext | None) -> OpenSpan:
        """Of one attempt. `context` is the job's own, `before` that of the attempt before, if that is known."""
        ...

    def transaction(self, claim: Claim) -> OpenSpan:
        """Of one `job.transaction()`."""
        ...

    def current(self) -> TraceContext | None:
        """The context of the span that is current in the caller's context."""
        ...


class Traces:
    """One instrument's spans. When it raises, what was to be traced goes on without; its first failure is logged."""

    def __init__(self, maker: SpanMaker) -> None:
        self._maker = maker
        self._failed = False

    def listeners(self) -> Mapping[type[Any], Callable[[Any], None]]:
        """No events. With `spans` this is an instrument, for the clients that a worker gives to its handlers."""
        return {}

    def spans(self) -> SpanMaker:
        """What makes the spans."""
        return self._maker

    def begin_run(self, claim: Claim) -> OpenSpan | None:
        """The span of an attempt, which is current now; see `leave` and `end`."""
        return self._asked(lambda: self._maker.run(claim, context_of(claim.options), before_of(claim)))

    def leave(self, span: OpenSpan) -> None:
        """Makes the span before it current again."""
        self._asked(span.leave)

    def traceparent_of(self, span: OpenSpan) -> str | None:
        """The span's, for what is stored."""
        context = self._asked(lambda: span.context)
        return None if context is None else self._asked(lambda: getattr(checked(*context), "parent", None))

    def end(self, span: OpenSpan, ending: Ending) -> None:
        """Ends the span."""
        self._asked(lambda: span.end(ending))

    def current(self) -> TraceContext | None:
        """The context of the current span."""
        context = self._asked(self._maker.current)
        return None if context is None else self._asked(lambda: checked(*context))

    @contextmanager
    def transaction(self, claim: Claim) -> Generator[None]:
        """A span around the block, which is one `job.transaction()`."""
        with self._around(lambda: self._maker.transaction(claim)):
            yield

    @contextmanager
    def enqueuing(self, request: JobRequest | None) -> Generator[Enqueuing]:
        """A span around the block, which enqueues this job, or many."""
        enqueuing = Enqueuing()
        with self._around(lambda: self._maker.enqueue(request), enqueuing) as span:
            if span is not None and (context := self._asked(lambda: span.context)) is not None:
                enqueuing.context = self._asked(lambda: checked(*context))
            yield enqueuing

    @contextmanager
    def _around(self, begin: Callable[[], OpenSpan], enqueuing: Enqueuing | None = None) -> Generator[OpenSpan | None]:
        span = self._asked(begin)
        failure: BaseException | None = None
        try:
            yield span
        except BaseException as error:  # whatever ends the block, a cancellation too, is told to the span, and goes on
            failure = error
            raise
        finally:
            if span is not None:
                self.leave(span)
                jobs, requests = ((), ()) if enqueuing is None else (enqueuing.jobs, enqueuing.requests)
                self.end(span, Ending(None, failure, None, jobs, requests))

    def _asked(self, ask: Callable[[], T]) -> T | None:
        try:
            return ask()
        except (KeyboardInterrupt, trio.Cancelled):
            raise
        except BaseException as error:  # a SystemExit too: it must not come between a job's end and its report
            if not self._failed:
                self._failed = True
                logging.getLogger("pulse_trio").error(
                    "the instrument %s failed; its next failures are not logged",
                    type(self._maker).__qualname__,
                    exc_info=error,
                )
            return None


class Enqueuing:
    """What a client enqueues within one span."""

    __slots__ = ("context", "jobs", "requests")

    _SHOWN = 2

    def __init__(self) -> None:
        self.context: TraceContext | None = None
        self.jobs: Sequence[int] = ()
        self.requests: list[JobRequest] = []
        """One of each (kind, queue), at most two: more than one is all that matters."""

    def carried(self, request: JobRequest) -> JobRequest:
        """The request with the trace context of the span."""
        known = self.requests
        if len(known) < self._SHOWN and all((r.kind, r.queue) != (request.kind, request.queue) for r in known):
            known.append(request)
        return carrying(request, self.context)

    def done(self, jobs: Sequence[int]) -> None:
        """The jobs were enqueued, with these ids."""
        self.jobs = jobs


class _Untraced(Enqueuing):
    __slots__ = ()

    def carried(self, request: JobRequest) -> JobRequest:
        return request

    def done(self, jobs: Sequence[int]) -> None:
        pass


_UNTRACED = nullcontext[Enqueuing](_Untraced())


def enqueuing(traces: Traces | None, request: JobRequest | None = None) -> AbstractContextManager[Enqueuing]:
    """`with enqueuing(traces, request) as span:` is the span of an enqueue, if there is an instrument that makes one."""
    return _UNTRACED if traces is None else traces.enqueuing(request)


def traces_of(instruments: Iterable[object]) -> Traces | None:
    """The spans of the first of these instruments that makes some; None if none does."""
    for instrument in instruments:
        make = getattr(instrument, "spans", None)
        if make is not None and (maker := make()) is not None:
            return Traces(maker)
    return None
