"""OpenTelemetry: a span for each enqueue, each attempt and each `job.transaction()`, in one trace.

    handlers = Handlers(instruments=[OpenTelemetry()])

The spans follow OpenTelemetry's semantic conventions for messaging, version 1.44 (in development there; they may change). The
names are `enqueue KIND` and `run KIND`, with the kind where the conventions have the destination: most systems have few queues
and many kinds, and the queue is an attribute.

A `run` span's parent is the span that enqueued the job, so that an HTTP request and all that it causes are one trace. The
conventions would have a link beside it, which says the same and took 10 us of each job. A retry links to the attempt before,
whichever worker ran it.

Cost, with the SDK's batch processor: 31 to 38 us for a span, of which the SDK takes 28 (CPU, on a busy machine, Python 3.11).
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from .describing import error_text, message_of, place_of, storable
from .tracing import TraceContext, checked

try:
    from opentelemetry import context as otel_context
    from opentelemetry import trace as otel_trace
    from opentelemetry.trace import (
        Link,
        NonRecordingSpan,
        SpanContext,
        SpanKind,
        Status,
        StatusCode,
        TraceFlags,
        TraceState,
    )
except ImportError as error:
    raise ImportError("pulse_trio.otel needs the package opentelemetry-api: pip install 'pulse-trio[otel]'") from error

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence
    from contextvars import Token
    from typing import Any

    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer, TracerProvider

    from .jobs import Claim, JobRequest
    from .tracing import Ending

CONVENTIONS = "1.44.0"
"""The version of OpenTelemetry's semantic conventions that the spans follow."""
_SCHEMA = f"https://opentelemetry.io/schemas/{CONVENTIONS}"
_FAILURES = ("failed", "timeout", "discarded")
_SHOWN_ERROR = 1000
_NO_SPAN = otel_context.Context()
_NO_STATE = TraceState()


class OpenTelemetry:
    """An instrument that makes OpenTelemetry's spans, for `Handlers(instruments=[...])`, `Worker(...)`, `run --instrument`
    and clients.

    The spans go to `tracer_provider`; by default to the provider that the program has set, now or later. Without an SDK
    nothing is recorded, but the trace context of the program's own spans still travels with the jobs.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        self._tracer = otel_trace.get_tracer("pulse_trio", tracer_provider=tracer_provider, schema_url=_SCHEMA)

    def listeners(self) -> Mapping[type[Any], Callable[[Any], None]]:
        """No events: `spans` has all."""
        return {}

    def spans(self) -> Spans:
        """What clients and workers ask for spans."""
        return Spans(self._tracer)


class Spans:
    """Begins the spans of one instrument."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def enqueue(self, request: JobRequest | None) -> _OpenSpan:
        """`enqueue KIND`, a child of the current span."""
        name = "enqueue" if request is None else f"enqueue {request.kind}"
        attributes = _messaging("enqueue", "send")
        if request is not None:
            attributes |= _of_job(request.kind, request.queue)
        span = self._tracer.start_span(name, kind=SpanKind.PRODUCER, attributes=attributes)
        return _OpenSpan(span, otel_trace.set_span_in_context(span))

    def run(self, claim: Claim, context: TraceContext | None, before: TraceContext | None) -> _OpenSpan:
        """`run KIND`, a child of the span that enqueued the job; without one, the root of a trace."""
        # Not the current context: that is the worker's, and a span around the worker did not cause the job.
        parent, links = _NO_SPAN, None
        if context is not None and (remote := _remote(context)).is_valid:
            parent = otel_trace.set_span_in_context(NonRecordingSpan(remote), _NO_SPAN)
        if before is not None and (attempt := _remote(before)).is_valid:
            links = [Link(attempt, {"messaging.pulse_trio.link": "previous attempt"})]
        attributes: dict[str, str | int] = {
            "messaging.system": "pulse_trio",
            "messaging.operation.name": "run",
            "messaging.operation.type": "process",
            "messaging.destination.name": claim.queue,
            "messaging.message.id": str(claim.id),
            "messaging.pulse_trio.kind": claim.kind,
            "messaging.pulse_trio.attempt": claim.attempt,
        }
        span = self._tracer.start_span(f"run {claim.kind}", parent, SpanKind.CONSUMER, attributes, links)
        return _OpenSpan(span, otel_trace.set_span_in_context(span, _NO_SPAN))

    def transaction(self, claim: Claim) -> _OpenSpan:
        """`transaction KIND`, in the handler."""
        attributes = _of_job(claim.kind, claim.queue)
        attributes["messaging.message.id"] = str(claim.id)
        attributes["messaging.pulse_trio.attempt"] = claim.attempt
        span = self._tracer.start_span(f"transaction {claim.kind}", attributes=attributes)
        return _OpenSpan(span, otel_trace.set_span_in_context(span))

    def current(self) -> TraceContext | None:
        """The context of the current span."""
        return _carried(otel_trace.get_current_span().get_span_context())


class _OpenSpan:
    """A span that is current until `leave`, and ends at `end`."""

    __slots__ = ("_span", "_token")

    def __init__(self, span: Span, context: Context) -> None:
        self._span = span
        self._token: Token[Context] | None = otel_context.attach(context)

    @property
    def span_context(self) -> SpanContext:
        return self._span.get_span_context()

    @property
    def context(self) -> TraceContext | None:
        return _carried(self.span_context)

    def leave(self) -> None:
        token, self._token = self._token, None
        if token is not None:
            otel_context.detach(token)

    def end(self, ended: Ending) -> None:
        try:
            if self._span.is_recording():
                self._describe(ended)
        finally:
            self._span.end()

    def _describe(self, ended: Ending) -> None:
        span = self._span
        if ended.outcome is not None:
            span.set_attribute("messaging.pulse_trio.outcome", ended.outcome)
        if ended.requests:
            _describe_many(span, ended)
        elif len(ended.jobs) == 1:
            span.set_attribute("messaging.message.id", str(ended.jobs[0]))
        if ended.outcome in _FAILURES or (ended.outcome is None and issubclass(type(ended.failure), Exception)):
            _describe_failure(span, ended)


def _describe_many(span: Span, ended: Ending) -> None:
    kinds, queues = {r.kind for r in ended.requests}, {r.queue for r in ended.requests}
    if len(kinds) == 1:
        (kind,) = kinds
        span.update_name(f"enqueue {kind}")
        span.set_attribute("messaging.pulse_trio.kind", kind)
    if len(queues) == 1:
        span.set_attribute("messaging.destination.name", queues.pop())
    if ended.jobs:
        span.set_attribute("messaging.batch.message_count", len(ended.jobs))


def _describe_failure(span: Span, ended: Ending) -> None:
    # Not `span.record_exception`: the exception is a user's object, whose methods may do anything.
    kind, message, text = ended.outcome or "failed", (ended.error or "").partition("\n")[0], ended.error
    if ended.failure is not None:
        module, name = place_of(type(ended.failure))
        kind = name if module == "builtins" else f"{module}.{name}"
        message = storable(message_of(ended.failure))
        text = text or error_text(ended.failure)
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, message[:_SHOWN_ERROR]))
    event = {"exception.type": kind, "exception.message": message[:_SHOWN_ERROR]}
    if text is not None:
        event["exception.stacktrace"] = text
    span.add_event("exception", event)


def _messaging(name: str, of_type: str) -> dict[str, str | int]:
    return {
        "messaging.system": "pulse_trio",
        "messaging.operation.name": name,
        "messaging.operation.type": of_type,
    }


def _of_job(kind: str, queue: str) -> dict[str, str | int]:
    return {"messaging.destination.name": queue, "messaging.pulse_trio.kind": kind}


def _remote(context: TraceContext) -> SpanContext:
    """The span in another process, or in another task of this one, that a traceparent names. Invalid (W3C: to be ignored) with
    an id of zeros or the version ff."""
    version, trace_id, span_id, flags = context.parent.split("-")
    state = _NO_STATE if context.state is None else TraceState.from_header([context.state])
    number = 0 if version == "ff" else int(trace_id, 16)
    return SpanContext(
        number, int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)), trace_state=state
    )


def _carried(span: SpanContext) -> TraceContext | None:
    if not span.is_valid:
        return None
    # Only the flag that version 00 has.
    parent = f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags & 1:02x}"
    return checked(parent, span.trace_state.to_header() or None)


@contextmanager
def attached(carried: Sequence[str | None]) -> Generator[None]:
    """Makes the span of another process current in the block: `carried` is its trace context."""
    context = checked(*carried)
    token = None
    if context is not None and (remote := _remote(context)).is_valid:
        token = otel_context.attach(otel_trace.set_span_in_context(NonRecordingSpan(remote)))
    try:
        yield
    finally:
        if token is not None:
            otel_context.detach(token)
