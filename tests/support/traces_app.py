"""Handlers for a child process: one with a span of its own there, one that fails."""

from __future__ import annotations

import os

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from pulse_trio import Handlers

handlers = Handlers()


@handlers.job(runs="process")
def in_process() -> int:
    # As a program's own module does it: the spans are sent in the background, and what is left when the process ends.
    provider = TracerProvider()
    # Where to: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT.
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    with provider.get_tracer("test").start_as_current_span("in the process"):
        return os.getpid()


@handlers.job(runs="process", max_attempts=1)
def fails_in_process() -> None:
    raise ValueError("of a process")
