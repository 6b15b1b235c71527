"""The trace context in a job's options: read from whatever stands there, written so that the database takes it."""

from __future__ import annotations

import json

import msgspec
import pytest

from pulse_trio.client import request_by_name
from pulse_trio.jobs import JobOptions
from pulse_trio.tracing import TraceContext, carrying, checked, context_of

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    "options",
    [
        None,
        "",
        "trace",
        '"trace"',
        '["trace"]',
        '{"trace"',
        '{"trace":5}',
        '{"trace":null}',
        '{"trace":{"trace":"' + PARENT + '"}}',
        '{"trace":"' + PARENT.upper() + '"}',
        '{"trace":"' + PARENT + '\\n"}',
        '{"trace":"' + "0" * 10_000 + '"}',
        '{"trace":' + "[" * 5000,
        '{"trace":"\\ud800"}',
        '{"tracestate":"a=1"}',
    ],
)
def test_what_is_no_traceparent_is_no_trace(options: str | None) -> None:
    assert context_of(options) is None


@pytest.mark.parametrize(
    "state", ["", "a" * 513, 'a="', "a=[", "a=\\", "a={", "a=\x7f", "a=é", "a=\n", 7, None, ["a=1"]]
)
def test_a_tracestate_that_cannot_be_kept_is_left_out_and_the_trace_goes_on(state: object) -> None:
    assert checked(PARENT, state) == TraceContext(PARENT)
    assert context_of(json.dumps({"trace": PARENT, "tracestate": state})) == TraceContext(PARENT)


@pytest.mark.parametrize("given", [{}, {"timeout": 5}, {"timeout": 5, "crash_limit": 7}])
@pytest.mark.parametrize("state", [None, "vendor=1,other=a b", "a" * 512])
def test_a_request_carries_a_trace_beside_its_options(given: dict[str, float], state: str | None) -> None:
    request = request_by_name("greet", {}, **given)
    traced = carrying(request, TraceContext(PARENT, state))
    assert traced.options is not None
    said = json.loads(traced.options)
    assert context_of(traced.options) == TraceContext(PARENT, state)
    assert {name: said[name] for name in given} == given
    assert len(traced.options) < 1000
    assert set(said) - {"trace", "tracestate"} == set(json.loads(request.options or "{}"))
    assert carrying(request, None) is request
    assert "trace" not in (request.options or "")


def test_a_worker_that_knows_no_traces_reads_the_options_beside_one() -> None:
    traced = carrying(request_by_name("greet", {}, timeout=5), TraceContext(PARENT, "a=1"))
    assert msgspec.json.decode(traced.options or "", type=JobOptions) == JobOptions(timeout=5)
