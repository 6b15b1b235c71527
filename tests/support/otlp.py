"""A receiver of OpenTelemetry's own protocol (OTLP over HTTP, protobuf) on loopback, and what tests ask of its spans."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

if TYPE_CHECKING:
    from collections.abc import Generator

INTERNAL, SERVER, CLIENT, PRODUCER, CONSUMER = 1, 2, 3, 4, 5


@dataclass(frozen=True)
class Received:
    """One span, as the receiver decoded it."""

    name: str
    trace: str
    id: str
    parent: str
    kind: int
    attributes: dict[str, Any]
    links: list[tuple[str, dict[str, Any]]]
    failed: bool
    message: str
    events: list[tuple[str, dict[str, Any]]]
    begun: int
    ended: int


class Receiver:
    """What has arrived so far."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.spans: list[Received] = []
        self.schemas: set[str] = set()

    def named(self, name: str) -> list[Received]:
        """The spans of that name, in the order in which they began."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.begun)

    def one(self, name: str) -> Received:
        """The one span of that name."""
        found = self.named(name)
        assert len(found) == 1, (name, found, [span.name for span in self.spans])
        return found[0]


@contextmanager
def open_receiver() -> Generator[Receiver]:
    """An HTTP server on a free port of loopback, as an OpenTelemetry collector is one."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received = ExportTraceServiceRequest.FromString(body)
            for resource in received.resource_spans:
                for scope in resource.scope_spans:
                    receiver.schemas.add(scope.schema_url)
                    receiver.spans += map(_read, scope.spans)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver = Receiver(f"http://127.0.0.1:{server.server_port}/v1/traces")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def open_provider(receiver: Receiver) -> Generator[TracerProvider]:
    """An SDK that sends what it records to the receiver, through its batch processor."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=receiver.endpoint)))
    try:
        yield provider
    finally:
        provider.shutdown()


def _read(span: Any) -> Received:
    return Received(
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        kind=span.kind,
        attributes=_values(span.attributes),
        links=[(link.span_id.hex(), _values(link.attributes)) for link in span.links],
        failed=span.status.code == 2,
        message=span.status.message,
        events=[(event.name, _values(event.attributes)) for event in span.events],
        begun=span.start_time_unix_nano,
        ended=span.end_time_unix_nano,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
