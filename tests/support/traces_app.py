"""A handler for a child process, with a span of its own there."""

from __future__ import annotations

import os

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from pulse_trio import Handlers

handlers = Handlers()


@handlers.job(runs="process")
def in_process() -> int:
    provider = TracerProvider(shutdown_on_exit=False)
    # Where to: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT.
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
    with provider.get_tracer("test").start_as_current_span("in the process"):
        pid = os.getpid()
    provider.shutdown()
    return pid
