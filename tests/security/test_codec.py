"""Payload codecs: what the database sees, what it cannot change, and how keys are exchanged."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from typing import TYPE_CHECKING, Any, Literal

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse_trio import AeadCodec, CodecError, ConfigurationError, Handlers, Job, JobRef, SyncClient, Worker, open_client
from pulse_trio.observe import EndedAfterCommit
from pulse_trio.store import operations
from support.stage import Recorder
from support.stores import Window

if TYPE_CHECKING:
    from pulse_trio.testing.faults.processes import Processes

OLD, NEW = bytes(range(32)), bytes(range(32, 64))


def codec(current: str = "new", **options: Any) -> AeadCodec:
    return AeadCodec({"old": OLD, "new": NEW}, current, **options)


@given(st.binary(max_size=2000), st.text(), st.one_of(st.none(), st.integers(1, 2**62)))
def test_what_is_encoded_is_decoded_and_nothing_of_it_is_readable(plain: bytes, kind: str, job_id: int | None) -> None:
    coded = codec().encode(plain, kind=kind, job_id=job_id)
    assert set(json.loads(coded)) <= {"$codec", "data", "bound", "form"}
    assert codec("old").decode(coded, kind=kind, job_id=job_id or 7) == plain
    assert codec().encode(plain, kind=kind, job_id=job_id) != coded  # a nonce of its own


def test_an_envelope_is_bound_to_its_kind_its_job_its_key_and_its_text() -> None:
    one = codec()
    coded = one.encode(b"{}", kind="pay", job_id=1)
    with pytest.raises(CodecError, match="belongs to another job"):
        one.decode(coded, kind="pay", job_id=2)
    with pytest.raises(CodecError, match="belongs to another job"):
        one.decode(coded, kind="refund", job_id=1)
    envelope = json.loads(coded)
    for change in (
        {"$codec": "old"},
        {"bound": False},
        {"data": "AAAA" + envelope["data"][4:]},
        {"data": "é"},
        {"data": ""},
    ):
        with pytest.raises(CodecError, match="was changed"):
            one.decode(json.dumps(envelope | change), kind="pay", job_id=1)


def test_an_unknown_key_is_named() -> None:
    coded = codec().encode(b"{}", kind="pay", job_id=1)
    with pytest.raises(CodecError, match=r"encoded with the key 'new', and this program has old.*tried again"):
        AeadCodec({"old": OLD}, "old").decode(coded, kind="pay", job_id=1)


def test_plain_arguments_pass_unless_they_are_refused() -> None:
    assert codec().decode('{"a": 1}', kind="pay", job_id=1) == b'{"a": 1}'
    assert codec().decode('{"$codec": 1}', kind="pay", job_id=1) == b'{"$codec": 1}'
    with pytest.raises(CodecError, match="accepts no plain ones"):
        codec(accept_plain=False).decode('{"a": 1}', kind="pay", job_id=1)


@pytest.mark.parametrize(
    ("keys", "current", "said"),
    [
        ({"a": OLD}, "b", "is not one of a"),
        ({"a": b"short"}, "a", "it must have 32"),
        ({"a b": OLD}, "a b", "letters, digits"),
    ],
)
def test_keys_that_cannot_work_are_refused(keys: dict[str, bytes], current: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        AeadCodec(keys, current)


def test_no_key_is_in_the_repr() -> None:
    assert repr(codec()) == "<AeadCodec current='new' keys=new, old>"


def app(made: AeadCodec | None) -> Handlers:
    handlers = Handlers(codec=made)

    @handlers.job(max_attempts=1)
    async def greet(job: Job, name: str) -> str:
        return f"hello {name}"

    @handlers.job
    def threaded(name: str) -> dict[str, str]:
        return {"hello": name}

    @handlers.job
    async def nothing(name: str) -> None: ...

    @handlers.job
    async def booked(job: Job, name: str) -> Any:
        async with job.transaction() as tx:
            tx.result = f"booked {name}"

    return handlers


async def test_a_jobs_arguments_and_result_are_readable_at_both_ends_only(dsn: str) -> None:
    handlers = app(codec())
    async with open_client(dsn, handlers=handlers) as client, open_client(dsn) as stranger:
        one = await client.enqueue(handlers["greet"], "secret-1")
        keyed = await client.enqueue(handlers["greet"].options(unique_key="k"), "secret-2")
        lasting = await client.enqueue(handlers["greet"].options(unique_key="l", unique_for=60), "secret-3")
        replaced = await client.enqueue(handlers["greet"].options(unique_key="k", on_conflict="replace"), "secret-4")
        few = await client.enqueue_many(
            [handlers["threaded"].request("secret-5"), handlers["nothing"].request("secret-6")]
        )
        copied = await client.enqueue_many(handlers["nothing"].request(f"secret-{n}") for n in range(10, 25))
        booked = await client.enqueue(handlers["booked"], "secret-7")
        async with client.batch() as batch:
            member = await batch.enqueue(handlers["greet"], "secret-8")
        by_sql = await stranger.enqueue("greet", {"name": "plain"})
        assert (await client.job(one.id)).args == {"name": "secret-1"}
        assert set((await stranger.job(one.id)).args) == {"$codec", "data", "form"}
        await Worker(handlers, dsn, burst=True).run()
        assert await one.result() == "hello secret-1"
        assert (keyed.id, await keyed.result()) == (replaced.id, "hello secret-4")
        assert await lasting.result() == "hello secret-3"
        assert await few[0].result() == {"hello": "secret-5"}
        assert await few[1].result() is None
        assert await copied[-1].result() is None
        assert await booked.result() == "booked secret-7"
        assert await member.result() == "hello secret-8"
        assert (await client.job(by_sql.id)).result == "hello plain"
        assert SyncClient(dsn, codec=codec("old")).result(one.id) == "hello secret-1"
    with psycopg.connect(dsn) as connection:
        rows = connection.execute("SELECT to_jsonb(j)::text FROM pulse.jobs j").fetchall()
    assert len(rows) == 23
    assert "secret-" not in str(rows)


class OfOnesOwn:
    """Its envelopes have no `$codec`."""

    def encode(self, plain: bytes, *, kind: str, job_id: int | None) -> str:
        return json.dumps({"c": b64encode(plain).decode()})

    def decode(self, coded: str, *, kind: str, job_id: int) -> bytes:
        return b64decode(json.loads(coded)["c"])


async def test_the_envelopes_of_a_codec_of_ones_own_have_any_form(dsn: str) -> None:
    """Its results came back as they are stored."""
    handlers = Handlers(codec=OfOnesOwn())

    @handlers.job
    async def echo(value: dict[str, int] | list[str] | str) -> Any:
        return value

    assert echo.kind == "echo"
    async with open_client(dsn, handlers=handlers) as client, open_client(dsn) as stranger:
        for value in ({"secret": 1}, ["secret"], "secret"):
            ref: JobRef[Any] = await client.enqueue("echo", {"value": value})
            await Worker(handlers, dsn, burst=True).run()
            assert await ref.result() == value
            found = await client.job(ref.id)
            assert (found.args, found.result) == ({"value": value}, value)
            assert SyncClient(dsn, codec=OfOnesOwn()).result(ref.id) == value
            assert set((await stranger.job(ref.id)).result) == {"c"}
        # What no codec has made is shown as it is.
        plain = await stranger.enqueue("echo", {"value": 1})
        assert (await client.job(plain.id)).args == {"value": 1}


async def test_a_value_returned_after_a_transaction_is_compared_decoded(dsn: str) -> None:
    """Each encoding is another text, so that the envelopes say nothing of whether the returned value is the stored one."""
    handlers = Handlers(codec=codec())

    @handlers.job
    async def booked(job: Job, returned: str) -> str:
        async with job.transaction(result="secret-booked"):
            pass
        return returned

    events = Recorder()
    async with open_client(dsn, handlers=handlers) as client:
        same = await client.enqueue(booked, "secret-booked")
        other = await client.enqueue(booked, "secret-other")
        await Worker(handlers, dsn, burst=True, instruments=[events]).run()
        assert await same.result() == await other.result() == "secret-booked"
    assert [(event.job_id, event.error) for event in events.of(EndedAfterCommit)] == [
        (other.id, "the handler returned a value, which is lost: set tx.result")
    ]


async def test_without_the_key_a_job_fails_and_a_deploy_that_brings_it_saves_the_job(dsn: str) -> None:
    with Window(dsn) as window:
        job_id = SyncClient(dsn, codec=codec()).enqueue(app(None)["greet"], "x").id
        await Worker(app(AeadCodec({"old": OLD}, "old")), dsn, burst=True, queues=["default"]).run()
        found = window.job(job_id)
        assert (found["state"], found["attempt"]) == ("dead", 1)
        assert found["error"].startswith("CodecError: The payload of 'greet' job")
        window.do(operations.retry(job_id))
        await Worker(app(codec()), dsn, burst=True).run()
        assert window.job(job_id)["state"] == "completed"


async def test_arguments_that_were_put_under_another_job_fail_it(dsn: str) -> None:
    with Window(dsn) as window:
        client = SyncClient(dsn, codec=codec())
        mine, theirs = (client.enqueue(app(None)["greet"], name).id for name in ("mine", "theirs"))
        window.run("UPDATE job SET args = (SELECT args FROM job WHERE id = %s) WHERE id = %s", theirs, mine)
        await Worker(app(codec()), dsn, burst=True).run()
        assert window.job(mine)["error"].startswith("CodecError")
        assert window.job(theirs)["state"] == "completed"


FAR = "secret-far"


async def test_every_kind_of_handler_is_given_plain_arguments_and_its_value_is_encoded(
    dsn: str, processes: Processes
) -> None:
    (processes.folder / "app.py").write_text(APP)
    keys = {"OLD": OLD.hex()}
    async with open_client(dsn, codec=codec("old")) as client:
        refs = [
            await client.enqueue(kind, {"name": FAR}) for kind in ("on_trio", "in_asyncio", "in_thread", "in_process")
        ]
        worker = await processes.command("run", "app:handlers", "--burst", f"--dsn={dsn}", "--verbose", env=keys)
        assert await worker.ended(within=60) == 0, worker.report()
        assert [await ref.result() for ref in refs] == [f"secret-value {FAR}"] * 4
    listed = await processes.run("jobs", "list", "--json", f"--dsn={dsn}")
    for ref in refs:
        listed += await processes.run("jobs", "show", str(ref.id), "--json", f"--dsn={dsn}")
        listed += await processes.run("jobs", "show", str(ref.id), f"--dsn={dsn}")
    assert "$codec" in listed
    assert "secret-" not in listed + worker.stdout + worker.stderr


APP = """
import asyncio
import os

from pulse_trio import AeadCodec, Handlers

handlers = Handlers(codec=AeadCodec({"old": bytes.fromhex(os.environ["OLD"])}, "old"))


@handlers.job
async def on_trio(name: str) -> str:
    return f"secret-value {name}"


@handlers.job(runs="asyncio")
async def in_asyncio(name: str) -> str:
    await asyncio.sleep(0)
    return f"secret-value {name}"


@handlers.job(runs="thread")
def in_thread(name: str) -> str:
    return f"secret-value {name}"


@handlers.job(runs="process")
def in_process(name: str) -> str:
    return f"secret-value {name}"
"""


async def test_arguments_that_do_not_fit_are_refused_without_their_values(dsn: str) -> None:
    handlers = Handlers(codec=codec())

    @handlers.job
    async def counted(count: int, colour: Literal["red"] = "red") -> None: ...

    with Window(dsn) as window:
        client = SyncClient(dsn, codec=codec())
        jobs = [
            client.enqueue("counted", {"count": "secret-text"}).id,
            client.enqueue("counted", {"count": 1, "colour": "secret-blue - at `$.x` secret-green"}).id,
        ]
        await Worker(handlers, dsn, burst=True).run()
        for job in jobs:
            found = window.job(job)
            # Another version may take them; the error stands with the job meanwhile.
            assert found["state"] == "scheduled"
            assert "Arguments do not fit counted" in found["error"]
            assert "secret-" not in found["error"]


async def test_a_job_of_the_old_key_is_retried_after_a_rotation_and_its_new_result_has_the_new_key(dsn: str) -> None:
    with Window(dsn) as window:
        client = SyncClient(dsn, codec=codec("old"))
        job_id = client.enqueue(app(None)["greet"], "Ada").id
        await Worker(app(codec("old")), dsn, burst=True).run()
        window.do(operations.retry(job_id))
        await Worker(app(codec("new")), dsn, burst=True).run()
        assert window.value("SELECT args->>'$codec' FROM jobs WHERE id = %s", job_id) == "old"
        assert window.value("SELECT result->>'$codec' FROM jobs WHERE id = %s", job_id) == "new"
        assert SyncClient(dsn, codec=codec()).result(job_id) == "hello Ada"


async def test_a_schedules_jobs_are_plain_and_their_results_are_encoded(dsn: str) -> None:
    with Window(dsn) as window:
        client = SyncClient(dsn, codec=codec())
        client.schedule("daily", "greet", {"name": "Ada"}, cron="@yearly")
        job_id = client.run_schedule("daily").id
        await Worker(app(codec()), dsn, burst=True).run()
        assert window.job(job_id)["args"] == {"name": "Ada"}
        assert client.result(job_id) == "hello Ada"
        strict = client.run_schedule("daily").id
        await Worker(app(codec(accept_plain=False)), dsn, burst=True).run()
        assert "accepts no plain ones" in window.job(strict)["error"]


def first_version(plain: bytes, *, kind: str, job_id: int | None) -> str:
    """An envelope as the first version wrote it."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    context = json.dumps(["pulse-trio", 1, "new", kind, job_id], separators=(",", ":")).encode()
    nonce = b"n" * 12
    data = b64encode(nonce + AESGCM(NEW).encrypt(nonce, plain, context)).decode()
    return json.dumps({"$codec": "new", "data": data} | ({} if job_id is not None else {"bound": False}))


def test_envelopes_of_the_first_version_are_read_and_no_newer_one_passes_for_one() -> None:
    one = codec().in_schema("pulse")
    for decode in (one.decode, one.decode_result):
        assert decode(first_version(b"7", kind="pay", job_id=1), kind="pay", job_id=1) == b"7"
        assert decode(first_version(b"7", kind="pay", job_id=None), kind="pay", job_id=9) == b"7"
    new = json.loads(one.encode(b"{}", kind="pay", job_id=1))
    assert new.pop("form") == 2
    with pytest.raises(CodecError, match="was changed"):
        one.decode(json.dumps(new), kind="pay", job_id=1)
    with pytest.raises(CodecError, match="newer version of pulse-trio"):
        one.decode(json.dumps(new | {"form": 3}), kind="pay", job_id=1)


def test_an_envelope_is_bound_to_its_use_its_schema_and_its_application() -> None:
    shop = codec(context="shop").in_schema("pulse")
    coded = shop.encode(b"{}", kind="pay", job_id=1)
    for stranger in (
        shop.in_schema("other"),
        codec(context="bank").in_schema("pulse"),
        codec().in_schema("pulse"),
        codec(),
    ):
        with pytest.raises(CodecError, match="use, schema or application"):
            stranger.decode(coded, kind="pay", job_id=1)
    with pytest.raises(CodecError, match="was changed"):
        shop.decode_result(coded, kind="pay", job_id=1)
    with pytest.raises(CodecError, match="was changed"):
        shop.decode(shop.encode_result(b"{}", kind="pay", job_id=1), kind="pay", job_id=1)
    assert shop.decode(coded, kind="pay", job_id=1) == b"{}"


async def test_a_result_put_in_the_place_of_arguments_fails_the_job(dsn: str) -> None:
    with Window(dsn) as window:
        client = SyncClient(dsn, codec=codec())
        job_id = client.enqueue("threaded", {"name": "Ada"}).id
        await Worker(app(codec()), dsn, burst=True).run()
        window.do(operations.retry(job_id))
        window.run(
            "UPDATE job SET args = %s, max_attempts = attempt + 1",
            codec().in_schema("pulse").encode_result(b'{"name": "Eve"}', kind="threaded", job_id=job_id),
        )
        await Worker(app(codec()), dsn, burst=True).run()
        assert window.job(job_id)["error"].startswith("CodecError")


async def test_a_strict_codec_refuses_plain_arguments_and_plain_results_at_the_client_too(dsn: str) -> None:
    with Window(dsn) as window:
        plain = SyncClient(dsn).enqueue("greet", {"name": "Ada"}).id
        strict = SyncClient(dsn, codec=codec(accept_plain=False))
        with pytest.raises(CodecError, match="accepts no plain ones"):
            strict.job(plain)
        coded = strict.enqueue("greet", {"name": "Ada"}).id
        await Worker(app(codec(accept_plain=False)), dsn, burst=True).run()
        assert strict.result(coded) == "hello Ada"
        window.run("UPDATE job_archive SET result = '7' WHERE id = %s", coded)
        with pytest.raises(CodecError, match="accepts no plain ones"):
            strict.result(coded)
        assert SyncClient(dsn, codec=codec()).result(coded) == 7
