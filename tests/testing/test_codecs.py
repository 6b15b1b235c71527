"""The testing kit with a registry that has a codec: a test sees what the program does."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from typing import TYPE_CHECKING, Any

import pytest

from pulse_trio import AeadCodec, Handlers, Job, SyncClient, open_client
from pulse_trio.testing import assert_enqueued, enqueued, refute_enqueued, run_job

if TYPE_CHECKING:
    from pulse_trio.handlers import Codec

KEYS = {"a": bytes(range(32))}


class Plain:
    """A codec of one's own."""

    def encode(self, plain: bytes, *, kind: str, job_id: int | None) -> str:
        return json.dumps({"c": b64encode(plain).decode()})

    def decode(self, coded: str, *, kind: str, job_id: int) -> bytes:
        return b64decode(json.loads(coded)["c"])


CODECS: dict[str, Codec] = {
    "AES": AeadCodec(KEYS, "a"),
    "strict": AeadCodec(KEYS, "a", accept_plain=False),
    "own": Plain(),
}


def app(codec: Codec) -> Handlers:
    handlers = Handlers(codec=codec)

    @handlers.job
    async def hello(name: str) -> str:
        return f"hello {name}"

    @handlers.job(durable=True)
    async def order(job: Job, name: str) -> list[Any]:
        async def charge() -> str:
            return f"charged {name}"

        found: list[Any] = [await job.step(charge), await job.wait_for_event("approved")]
        async with job.durable_nursery() as nursery:
            nursery.start_soon(handlers["hello"], name)
        return found

    return handlers


@pytest.mark.parametrize("name", CODECS)
async def test_run_job_gives_what_a_client_gets(name: str) -> None:
    """The result was an envelope, or there was none, because nothing had encoded the arguments."""
    handlers = app(CODECS[name])
    run = await run_job("hello", {"name": "Ada"}, handlers=handlers)
    assert (run.outcome, run.result, run.error) == ("completed", "hello Ada", None)
    run = await run_job("order", {"name": "Ada"}, handlers=handlers, events=[("approved", {"by": "Bob"})])
    assert (run.outcome, run.error, run.result) == ("completed", None, ["charged Ada", {"by": "Bob"}])
    assert [step.result for step in run.steps] == ["charged Ada"]
    assert [(child.args, child.result) for child in run.children] == [({"name": "Ada"}, "hello Ada")]
    assert handlers.codec is CODECS[name]


@pytest.mark.parametrize("name", CODECS)
async def test_what_was_enqueued_is_found_by_its_arguments(name: str, pulse_dsn: str) -> None:
    """`refute_enqueued` passed, whatever was enqueued."""
    handlers = app(CODECS[name])
    # Nobody here can read that one.
    SyncClient(pulse_dsn, codec=AeadCodec({"b": bytes(32)}, "b")).enqueue("hello", {"name": "Eve"})
    async with open_client(pulse_dsn, handlers=handlers) as client:
        await client.enqueue(handlers["hello"], "Ada")
        assert (await assert_enqueued(client, handlers["hello"], args={"name": "Ada"})).args == {"name": "Ada"}
        with pytest.raises(AssertionError, match="'name': 'Ada'"):
            await refute_enqueued(client, handlers["hello"], args={"name": "Ada"})
        await refute_enqueued(client, handlers["hello"], args={"name": "Bob"})
    sync = SyncClient(pulse_dsn, handlers=handlers)
    assert len(enqueued(sync, "hello", args={"name": "Ada"})) == 1
    assert len(enqueued(sync, "hello")) == 2
