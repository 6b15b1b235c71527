"""The instrument of docs/how-to/sentry.md, with a transport in place of Sentry's server: exceptions as objects, with
the job, of all four kinds of handlers."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import sentry_sdk
import trio
from sentry_sdk.transport import Transport

from pulse_trio import Discard, Handlers, Job, SyncClient, Worker
from support import traces_app

if TYPE_CHECKING:
    from collections.abc import Generator

    from sentry_sdk.envelope import Envelope

PAGE = Path(__file__).parents[2] / "docs/how-to/sentry.md"


class Kept(Transport):
    """Keeps what would be sent."""

    events: list[Any]

    def capture_envelope(self, envelope: Envelope) -> None:
        if (event := envelope.get_event()) is not None:
            self.events.append(event)


@pytest.fixture
def sent() -> Generator[list[Any]]:
    Kept.events = []
    sentry_sdk.init(dsn="https://key@localhost/1", transport=Kept, default_integrations=False)
    yield Kept.events
    sentry_sdk.get_client().close()
    # Without integrations: those of the default stay in this process, and read the bodies of the requests of later tests.
    sentry_sdk.init(default_integrations=False)


def the_pages_instrument(folder: Path) -> Any:
    found = re.search(r"<!-- file: monitoring.py -->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    (path := folder / "monitoring.py").write_text(found[1], encoding="utf-8")
    spec = importlib.util.spec_from_file_location("monitoring_of_the_page", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Sentry()


async def test_an_exception_arrives_as_an_object_with_its_stack_and_the_context_of_its_job(
    dsn: str, tmp_path: Path, sent: list[Any]
) -> None:
    handlers = Handlers(instruments=[the_pages_instrument(tmp_path)])
    handlers.include(traces_app.handlers)
    twice = {"max_attempts": 2, "backoff_base": 0.001, "backoff_cap": 0.001}

    @handlers.job(**twice)
    async def in_trio(job: Job) -> None:
        raise ConnectionError("of Trio") from KeyError("the cause")

    @handlers.job(runs="thread")
    def in_thread() -> None:
        raise Discard("of a thread")

    @handlers.job(runs="asyncio", max_attempts=1)
    async def in_asyncio() -> None:
        raise ValueError("of asyncio")

    @handlers.job(timeout=0.01, max_attempts=1)
    async def too_long() -> None:
        await trio.sleep_forever()

    @handlers.job
    async def well() -> None:
        pass

    client = SyncClient(dsn)
    ids = {handler.kind: client.enqueue(handler).id for handler in handlers if handler.kind != "in_process"}
    await Worker(handlers, dsn, burst=True).run()
    # A retry that is due a moment later than the burst looked.
    await Worker(handlers, dsn, burst=True).run()

    def of(kind: str) -> list[Any]:
        return [event for event in sent if event["tags"]["kind"] == kind]

    assert len(sent) == 6
    assert {(event["contexts"]["job"]["id"], event["transaction"]) for event in sent} == {
        (id_, kind) for kind, id_ in ids.items() if kind != "well"
    }
    assert [event["contexts"]["job"]["attempt"] for event in of("in_trio")] == [1, 2]
    for kind, error, text in [
        ("in_trio", "ConnectionError", "of Trio"),
        ("in_thread", "Discard", "of a thread"),
        ("in_asyncio", "ValueError", "of asyncio"),
    ]:
        said = of(kind)[0]["exception"]["values"][-1]
        assert (said["type"], said["value"]) == (error, text)
        assert said["stacktrace"]["frames"][-1]["function"].endswith(kind)
        assert of(kind)[0]["tags"]["queue"] == "default"
    assert of("in_trio")[0]["exception"]["values"][0]["type"] == "KeyError"
    (elsewhere,) = of("fails_in_process")
    assert elsewhere["exception"]["values"][-1]["value"] == "of a process"
    assert "in fails_in_process" in elsewhere["contexts"]["job"]["error"]
    (late,) = of("too_long")
    assert late["contexts"]["job"]["outcome"] == "timeout"
    assert "ran longer than 0.01 s" in late["message"]
