"""`job.step`: called once, and remembered."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio

from pulse_trio import Discard, Handlers, Job, ReplayMismatch, StepFailed, SyncClient, UsageError
from pulse_trio.observe import EndedAfterCommit, UnfitArgumentsReleased
from pulse_trio.store import history
from pulse_trio.store import trees as store_trees
from pulse_trio.worker.durable import room

if TYPE_CHECKING:
    from support.trees import Trees


class Charge(msgspec.Struct):
    amount: int


async def test_a_later_attempt_gets_the_results_of_steps_without_calling_them(trees: Trees) -> None:
    calls: list[str] = []

    async def fetch(number: int) -> dict[str, int]:
        calls.append(f"fetch {number}")
        return {"number": number}

    def plain(text: str) -> str:
        calls.append(text)
        return text * 2

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> list[object]:
        one = await job.step(fetch, 7)
        two = await job.step(plain, "ab")
        if job.attempt < 3:
            raise ValueError("not yet")
        return [one, two]

    job_id = trees.enqueue("order")
    for _ in range(3):
        trees.again()
        await trees.burst()
    found = trees.job(job_id)
    assert (found["state"], found["result"]) == ("completed", [{"number": 7}, "abab"])
    assert calls == ["fetch 7", "ab"]
    assert trees.lines(job_id) == [(1, "1:step", "fetch"), (1, "2:step", "plain")]


async def test_the_first_attempt_too_gets_the_value_that_the_annotation_decodes(trees: Trees) -> None:
    seen: list[object] = []

    async def charge() -> Charge:
        return Charge(7)

    async def pair() -> tuple[int, str]:
        return (1, "b")

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        seen.append((await job.step(charge), await job.step(pair)))
        if job.attempt == 1:
            raise ValueError("not yet")

    trees.enqueue("order")
    await trees.burst()
    trees.again()
    await trees.burst()
    assert seen == [(Charge(7), (1, "b"))] * 2


class Exits(BaseException):
    """What a library of the user's may raise past every `except Exception`."""


class Secretive(Exception):
    """A thread that ended with it told nobody: it is asked for its traceback then."""

    def __getattribute__(self, name: str) -> object:
        raise RuntimeError(name)


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(2),
        KeyboardInterrupt(),
        Exits("no"),
        GeneratorExit(),
        BaseExceptionGroup("both", [SystemExit(1), ValueError("x")]),
        Secretive,
    ],
    ids=[
        "sys.exit",
        "a KeyboardInterrupt of its own",
        "a BaseException",
        "a GeneratorExit",
        "a group",
        "a secretive one",
    ],
)
@pytest.mark.parametrize("how", ["async", "thread", "transaction"])
async def test_a_step_that_exits_has_failed_and_that_is_remembered_too(
    trees: Trees, error: BaseException | type[BaseException], how: str
) -> None:
    """The step had no line: the next attempt was dead of a mismatch that blamed a plain scope."""
    calls, causes = list[str](), list[type]()

    def parse() -> int:
        calls.append("parse")
        raise error

    async def parse_here() -> int:
        return parse()

    async def parse_with(tx: object) -> int:
        return parse()

    async def charge() -> str:
        calls.append("charge")
        return "charged"

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        try:
            if how == "transaction":
                await job.transaction_step(parse_with)
            else:
                await job.step(parse if how == "thread" else parse_here)
        except StepFailed as failed:
            causes.append(type(failed.__cause__))
            said = failed.step
        else:
            raise AssertionError("it did not fail")
        charged = await job.step(charge)
        if job.attempt == 1:
            raise ValueError("not yet")
        return f"{said} {charged}"

    job_id = trees.enqueue("order")
    await trees.burst()
    trees.again()
    await trees.burst()
    found = trees.job(job_id)
    assert found["state"] == "completed", found["error"]
    assert found["result"].startswith("parse")
    assert found["result"].endswith(" charged")
    assert calls == ["parse", "charge"]
    raised = error if isinstance(error, type) else type(error)
    if (raised, how) == (Secretive, "transaction"):
        raised = RuntimeError  # it is what contextlib gets when it asks for the traceback
    assert causes == [raised, type(None)]


async def test_a_step_that_raises_gives_step_failed_and_that_is_remembered_once_the_handler_goes_on(
    trees: Trees,
) -> None:
    calls, seen, names, causes = list[int](), list[str](), list[str](), list[type]()

    async def charge() -> None:
        calls.append(1)
        raise ValueError("no funds")

    async def refund() -> str:
        return "refunded"

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        try:
            await job.step(charge)
        except StepFailed as error:
            seen.append(str(error))
            names.append(error.step)
            causes.append(type(error.__cause__))
        done = await job.step(refund)
        if job.attempt == 1:
            raise RuntimeError("not yet")
        return done

    job_id = trees.enqueue("order")
    await trees.burst()
    trees.again()
    await trees.burst()
    assert (trees.job(job_id)["result"], len(calls)) == ("refunded", 1)
    assert seen == ["Step charge failed: ValueError: no funds"] * 2
    assert (names, causes) == (["charge"] * 2, [ValueError, type(None)])
    assert trees.lines(job_id) == [(2, "1:step", "charge"), (1, "2:step", "refund")]


async def test_a_step_is_called_again_if_the_attempt_failed_of_it(trees: Trees) -> None:
    calls: list[int] = []

    async def flaky() -> int:
        calls.append(1)
        if len(calls) < 2:
            raise ValueError("down")
        return 5

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> int:
        return await job.step(flaky)

    job_id = trees.enqueue("order")
    await trees.burst()
    trees.again()
    await trees.burst()
    assert (trees.job(job_id)["result"], len(calls)) == (5, 2)


async def test_what_a_step_says_of_its_job_goes_through(trees: Trees) -> None:
    async def check() -> None:
        raise Discard("never")

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        await job.step(check)

    job_id = trees.enqueue("order")
    await trees.burst()
    assert trees.job(job_id)["state"] == "dead"


async def test_changed_code_is_a_mismatch_that_names_both_and_ends_the_job(trees: Trees) -> None:
    async def charge() -> int:
        return 1

    async def bill() -> int:
        return 2

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> None:
        await job.step(charge if job.attempt == 1 else bill)
        raise ValueError("not yet")

    job_id = trees.enqueue("order")
    await trees.burst()
    trees.again()
    await trees.burst()
    found = trees.job(job_id)
    assert found["state"] == "dead"
    assert (
        f"job {job_id}, line 1 is step charge (key 1:step), but the handler now calls step bill (key 1:step)"
        in found["error"]
    )


async def test_a_handler_that_does_less_than_before_is_a_mismatch_even_if_it_catches_everything(trees: Trees) -> None:
    async def charge() -> int:
        return 1

    @trees.handlers.job(durable=True)
    async def shorter(job: Job) -> None:
        if job.attempt == 1:
            await job.step(charge)
            raise ValueError("not yet")

    @trees.handlers.job(durable=True)
    async def deaf(job: Job) -> None:
        await job.step(charge, key=f"a{job.attempt}" if job.attempt < 3 else None) if job.attempt == 1 else None
        if job.attempt == 1:
            raise ValueError("not yet")
        try:
            await job.step(charge, key="b")
        except ReplayMismatch:
            pass

    ids = [trees.enqueue("shorter"), trees.enqueue("deaf")]
    await trees.burst()
    trees.again()
    with trio.fail_after(10):
        await trees.burst()
    assert [trees.job(job_id)["state"] for job_id in ids] == ["dead", "dead"]
    assert "but the handler has returned" in trees.job(ids[0])["error"]
    assert "but the handler now stands in step charge (key b)" in trees.job(ids[1])["error"]


async def test_durable_calls_are_for_durable_handlers(trees: Trees) -> None:
    @trees.handlers.job
    async def plain(job: Job) -> None:
        await job.step(print)

    @trees.handlers.job
    def thread(job: Job) -> int:
        return job.version

    ids = [trees.enqueue("plain", max_attempts=1), trees.enqueue("thread", max_attempts=1)]
    await trees.burst()
    assert "need @handlers.job(durable=True)" in trees.job(ids[0])["error"]
    assert "NotDurable" in trees.job(ids[1])["error"]


async def test_a_second_task_needs_a_key_and_a_race_of_tasks_has_the_same_winner_again(trees: Trees) -> None:
    orders: list[list[str]] = []

    async def work(name: str) -> str:
        return name

    @trees.handlers.job(durable=True)
    async def race(job: Job) -> None:
        order: list[str] = []

        async def run(name: str) -> None:
            nonlocal order
            for n in range(3):
                order += [await job.step(work, f"{name}{n}", key=f"{name}{n}")]

        async with trio.open_nursery() as nursery:
            for name in "abc":
                nursery.start_soon(run, name)
        orders.append(order)
        if job.attempt < 4:
            raise ValueError("not yet")

    @trees.handlers.job(durable=True, max_attempts=1)
    async def keyless(job: Job) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(job.step, work, "a")

    trees.enqueue("race")
    bad = trees.enqueue("keyless")
    for _ in range(4):
        trees.again()
        await trees.burst()
    assert len(orders) == 4
    assert orders[1:] == orders[:1] * 3
    assert "job.step in a second task of the handler needs key=" in trees.job(bad)["error"]


async def test_tasks_of_the_jobs_own_nursery_replay_too(trees: Trees) -> None:
    calls: list[str] = []

    async def work(name: str) -> str:
        calls.append(name)
        return name

    @trees.handlers.job(durable=True)
    async def spread(job: Job) -> None:
        async def run(name: str) -> None:
            await job.step(work, name, key=name)
            if job.attempt == 1:
                await job.step(work, name + "2", key=name + "2")
                raise ValueError("not yet")
            await job.step(work, name + "2", key=name + "2")

        job.nursery.start_soon(run, "x")

    job_id = trees.enqueue("spread")
    await trees.burst()
    trees.again()
    await trees.burst()
    assert trees.job(job_id)["state"] == "completed"
    assert calls == ["x", "x2"]


@pytest.mark.parametrize("key", ["", "3:step", "a\0b", "x" * 300, 5])
async def test_keys_that_cannot_be_are_refused(key: Any, trees: Trees) -> None:
    @trees.handlers.job(durable=True, max_attempts=1)
    async def order(job: Job) -> str:
        try:
            await job.step(print, key=key)
        except UsageError as error:
            return str(error)
        return ""

    job_id = trees.enqueue("order")
    await trees.burst()
    assert "key" in trees.job(job_id)["result"]


async def test_the_version_of_the_first_attempt_stays(trees: Trees) -> None:
    versions: list[int] = []

    async def work() -> None: ...

    for version in (3, 4):
        trees.handlers = type(trees.handlers)()

        @trees.handlers.job(durable=True, version=version)
        async def order(job: Job) -> None:
            versions.append(job.version)
            await job.step(work)
            if job.attempt == 1:
                raise ValueError("not yet")

        if version == 3:
            trees.enqueue("order")
        trees.again()
        await trees.burst()
    assert versions == [3, 3]


@pytest.mark.parametrize("ends", ["at once", "cancelled"])
async def test_a_worker_that_is_older_than_the_jobs_version_leaves_it_to_a_newer_one(ends: str, trees: Trees) -> None:
    calls: list[str] = []

    async def work(name: str) -> str:
        calls.append(name)
        return name

    old, new = Handlers(), Handlers()

    @old.job(name="order", durable=True, suspend_after=0, max_attempts=1)
    async def first(job: Job) -> str:
        done = await job.step(work, "charge")
        await job.wait_for_event("go", type=str)
        return done

    @new.job(name="order", durable=True, version=2, suspend_after=0, max_attempts=1)
    async def second(job: Job) -> str:
        if job.version >= 2:
            await job.step(work, "check the stock")
        done = await job.step(work, "charge")
        try:
            await job.wait_for_event("go", type=str)
        except trio.Cancelled:
            with job.cleanup():
                await job.step(work, "refund")  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise
        return done

    trees.handlers = new
    job_id = trees.enqueue("order")
    await trees.burst()
    assert trees.job(job_id)["state"] == "suspended"
    client = SyncClient(trees.dsn)
    if ends == "cancelled":
        client.cancel(job_id)
    else:
        client.send_event(job_id, "go", "now")
    trees.handlers = old
    await trees.burst()
    released, *_ = trees.events.of(UnfitArgumentsReleased)
    assert released.error.startswith(
        f"UnfitArguments: version 2 of 'order' has begun job {job_id}, and this worker has version 1"
    )
    trees.again()
    trees.handlers = new
    await trees.burst()
    assert calls == ["check the stock", "charge", *(["refund"] if ends == "cancelled" else [])]
    found = trees.job(job_id)
    assert found["state"] == ("cancelled" if ends == "cancelled" else "completed")


async def test_the_version_of_a_childs_first_attempt_is_that_of_its_code(trees: Trees) -> None:
    @trees.handlers.job(durable=True, version=3)
    async def child(job: Job) -> int:
        return job.version

    @trees.handlers.job(durable=True)
    async def parent(job: Job) -> int:
        async with job.durable_nursery() as nursery:
            started = nursery.start_soon(child)
        return started.result

    job_id = trees.enqueue("parent")
    await trees.burst()
    assert trees.job(job_id)["result"] == 3


async def test_a_watched_childs_version_is_that_of_its_code_until_it_has_made_a_durable_call(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions: list[int] = []
    watched = trio.Event()
    look = store_trees.Trees.look

    async def look_and_go_on(self: store_trees.Trees, *given: Any) -> Any:
        found = await look(self, *given)
        watched.set()
        return found

    monkeypatch.setattr(store_trees.Trees, "look", look_and_go_on)

    async def work() -> None: ...

    @trees.handlers.job(durable=True, version=3)
    async def child(job: Job) -> None:
        versions.append(job.version)
        await watched.wait()
        if job.attempt > 1:
            await job.step(work)
        if job.attempt < 3:
            raise ValueError("not yet")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def parent(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(child)

    job_id = trees.enqueue("parent")
    for _ in range(3):
        await trees.burst()
        trees.window.run("UPDATE job SET run_at = clock_timestamp() WHERE kind = 'child'")
    assert versions == [3, 3, 3]
    assert trees.window.value("SELECT version FROM durable_job WHERE job_id > %s", job_id) == 3


async def test_a_result_that_is_too_large_ends_the_job_and_says_which_step(trees: Trees) -> None:
    async def fetch() -> str:
        return "x" * 2**20

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        await job.step(fetch)

    job_id = trees.enqueue("order")
    await trees.burst()
    found = trees.job(job_id)
    assert found["state"] == "dead"
    assert "step fetch" in found["error"]


async def test_a_transaction_steps_writes_and_its_line_come_together(trees: Trees) -> None:
    trees.window.run("CREATE TABLE public.ledger (what text)")
    calls: list[str] = []

    async def book(tx: Any, what: str) -> str:
        calls.append(what)
        await tx.execute("INSERT INTO public.ledger VALUES (%s)", [what])
        if what == "bad":
            raise ValueError("no")
        return what * 2

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> list[str]:
        got = [await job.transaction_step(book, "a")]
        try:
            await job.transaction_step(book, "bad")
        except StepFailed as error:
            got.append(str(error))
        got.append(await job.transaction_step(book, "b"))
        if job.attempt == 1:
            raise ValueError("not yet")
        return got

    job_id = trees.enqueue("order")
    await trees.burst()
    trees.again()
    await trees.burst()
    assert trees.job(job_id)["result"] == ["aa", "Step book failed: ValueError: no", "bb"]
    assert calls == ["a", "bad", "b"]
    assert [row["what"] for row in trees.window.run("SELECT what FROM public.ledger ORDER BY what")] == ["a", "b"]


async def test_no_types_of_a_transaction_steps_own_bend_its_line(trees: Trees) -> None:
    trees.window.run("CREATE SCHEMA mine")
    for name in ("text", "int8", "bool", "json"):
        trees.window.run(f"CREATE DOMAIN mine.{name} AS pg_catalog.date")

    async def temporary(tx: Any) -> str:
        await tx.execute("CREATE TEMP TABLE text (line int)")
        return "a"

    async def path(tx: Any) -> str:
        await tx.execute("SET LOCAL search_path = mine, pg_catalog")
        return "b"

    @trees.handlers.job(durable=True, max_attempts=1)
    async def order(job: Job) -> list[str]:
        return [await job.transaction_step(temporary), await job.transaction_step(path)]

    job_id = trees.enqueue("order")
    await trees.burst()
    assert trees.job(job_id)["result"] == ["a", "b"]


async def test_a_transaction_step_that_commits_by_hand_is_told_what_it_did(trees: Trees) -> None:
    trees.window.run("CREATE TABLE public.ledger (what text)")

    async def book(tx: Any) -> None:
        await tx.execute("INSERT INTO public.ledger VALUES ('a')")
        await tx.execute("COMMIT")

    @trees.handlers.job(durable=True, max_attempts=1)
    async def order(job: Job) -> str:
        try:
            await job.transaction_step(book)
        except StepFailed as error:
            return str(error)
        return "booked"

    job_id = trees.enqueue("order")
    await trees.burst()
    assert trees.job(job_id)["result"] == (
        "Step book failed: RuntimeError: the transaction of job.transaction_step() was ended inside its function, and what a "
        "COMMIT there has written stays: leave COMMIT and ROLLBACK to job.transaction_step()"
    )
    assert trees.window.run("SELECT what FROM public.ledger") == [{"what": "a"}]


async def test_a_retry_afresh_forgets_the_history(trees: Trees) -> None:
    calls: list[int] = []

    async def work() -> int:
        calls.append(1)
        return len(calls)

    @trees.handlers.job(durable=True, max_attempts=1)
    async def order(job: Job) -> None:
        await job.step(work)
        raise ValueError("no")

    job_id = trees.enqueue("order")
    await trees.burst()
    client = SyncClient(trees.dsn)
    client.retry(job_id)
    await trees.burst()
    assert len(calls) == 1
    client.run(history.retry_batch([job_id], afresh=True))
    assert trees.lines(job_id) == []
    await trees.burst()
    assert len(calls) == 2
    assert trees.lines(job_id) == [(1, "1:step", "work")]


@pytest.mark.parametrize("call", ["step", "event"])
async def test_a_job_beyond_the_most_lines_of_a_history_is_dead_at_its_first_attempt(
    trees: Trees, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(room, "MOST_LINES", 3)

    async def once() -> None: ...

    @trees.handlers.job(durable=True)
    async def loop(job: Job) -> None:
        while True:
            if call == "step":
                await job.step(once)
            else:
                await job.wait_for_event("go")

    job_id = trees.enqueue("loop")
    for _ in range(4):
        SyncClient(trees.dsn).send_event(job_id, "go")
    await trees.burst()
    found = trees.job(job_id)
    assert (found["state"], found["attempt"]) == ("dead", 1)
    assert "A history has at most 3 lines; put loops into children." in found["error"]
    assert len(trees.lines(job_id)) == 3


async def test_a_durable_call_that_is_not_awaited_fails_the_attempt_by_its_name(trees: Trees) -> None:
    called: list[str] = []

    async def charge() -> None:
        called.append("charge")

    @trees.handlers.job(durable=True, max_attempts=1)
    async def order(job: Job) -> str:
        await job.step(charge)
        job.step(charge)  # type: ignore[unused-coroutine]
        return "charged twice"

    made = order.function.__code__.co_firstlineno + 3

    @trees.handlers.job(durable=True, max_attempts=1)
    async def sleeper(job: Job) -> None:
        job.sleep(1)  # type: ignore[unused-coroutine]

    ids = [trees.enqueue("order"), trees.enqueue("sleeper")]
    with pytest.warns(RuntimeWarning, match="never awaited") as warned:
        await trees.burst()
    assert [trees.job(job_id)["state"] for job_id in ids] == ["dead", "dead"]
    lines = {
        f"coroutine '{call}' was never awaited": line for call, line in (("job.step", made), ("job.sleep", made + 7))
    }
    assert {f"{one.message}": one.lineno for one in warned} == lines
    assert {one.filename for one in warned} == {__file__}
    assert f"write `await job.sleep(...)` ({__file__}, line {made + 7})." in trees.job(ids[1])["error"]
    assert (
        "job.step was called and not awaited, so it did nothing: write `await job.step(...)`"
        in trees.job(ids[0])["error"]
    )
    assert "write `await job.sleep(...)`" in trees.job(ids[1])["error"]
    assert called == ["charge"]


async def test_a_history_that_does_not_fit_is_told_before_a_call_that_is_not_awaited(trees: Trees) -> None:
    async def charge() -> None: ...

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        if job.attempt == 1:
            await job.step(charge)
            raise RuntimeError("once more")
        job.step(charge)  # type: ignore[unused-coroutine]

    job_id = trees.enqueue("order")
    await trees.burst()
    trees.again()
    with pytest.warns(RuntimeWarning, match="coroutine 'job.step' was never awaited"):
        await trees.burst()
    job = trees.job(job_id)
    assert job["state"] == "dead"
    assert "ReplayMismatch" in job["error"]


async def test_a_call_that_is_closed_need_not_be_awaited(trees: Trees) -> None:
    async def charge() -> None:
        raise AssertionError("called")

    @trees.handlers.job(durable=True, max_attempts=1)
    async def order(job: Job) -> str:
        call = job.step(charge)
        call.close()
        return "not charged"

    job_id = trees.enqueue("order")
    await trees.burst()
    assert trees.job(job_id)["result"] == "not charged"


async def test_a_handler_that_is_suspended_before_it_awaits_a_call_goes_on_later(trees: Trees) -> None:
    async def charge() -> str:
        return "charged"

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        later = job.step(charge)
        try:
            await job.sleep(3600)
        except trio.Cancelled:  # noqa: ASYNC103 -- what it returns while it is suspended is ignored
            later.close()
            job.step(charge)  # type: ignore[unused-coroutine]
            return "ignored"  # noqa: ASYNC104 -- as said
        return await later

    job_id = trees.enqueue("order")
    with pytest.warns(RuntimeWarning, match="never awaited"):
        await trees.burst()
    assert trees.job(job_id)["state"] == "suspended"
    trees.time_passes(job_id)
    assert (await trees.ended(job_id))["result"] == "charged"


async def test_after_a_commit_a_call_that_is_not_awaited_is_told_by_an_event(trees: Trees) -> None:
    async def charge() -> None: ...

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        async with job.transaction():
            pass
        job.step(charge)  # type: ignore[unused-coroutine]

    job_id = trees.enqueue("order")
    with pytest.warns(RuntimeWarning, match="never awaited"):
        await trees.burst()
    assert trees.job(job_id)["state"] == "completed"
    (event,) = trees.events.of(EndedAfterCommit)
    assert "job.step was called and not awaited" in event.error


async def test_a_mismatch_in_a_group_is_the_jobs_death_as_one_alone_is(trees: Trees) -> None:
    async def work() -> None: ...

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> None:
        async with trio.open_nursery() as nursery:
            key = "one" if job.attempt == 1 else "other"
            nursery.start_soon(partial(job.step, work, key=key))
        if job.attempt == 1:
            raise ValueError("not yet")

    job_id = trees.enqueue("order")
    for _ in range(2):
        trees.again()
        await trees.burst()
    found = trees.job(job_id)
    assert (found["state"], found["attempt"]) == ("dead", 2)
    assert found["error"].startswith("ReplayMismatch")


async def test_a_call_after_the_end_of_its_attempt_does_nothing(trees: Trees) -> None:
    """A thread that its handler has left, and that calls back later: the step was called without a lease, and once more by the
    attempt after that."""
    charged, said = list[int](), list[str]()
    goes_on, ended = threading.Event(), threading.Event()

    async def charge(attempt: int) -> None:
        charged.append(attempt)

    @trees.handlers.job(durable=True, max_attempts=2)
    async def order(job: Job) -> None:
        def library(*, slow: bool) -> None:
            try:
                if slow:
                    goes_on.wait(60)
                trio.from_thread.run(partial(job.step, charge, job.attempt, key="charge"))
            except UsageError as error:
                said.append(str(error))
            finally:
                if slow:
                    ended.set()

        if job.attempt == 1:
            with trio.move_on_after(0.1):
                await trio.to_thread.run_sync(partial(library, slow=True), abandon_on_cancel=True)
            raise ValueError("it took too long")
        goes_on.set()
        await trio.to_thread.run_sync(ended.wait)
        await trio.to_thread.run_sync(partial(library, slow=False))

    job_id = trees.enqueue("order")
    with trio.fail_after(60):
        await trees.burst(log=False)
        trees.again()
        await trees.burst(log=False)
    assert (trees.job(job_id)["state"], charged) == ("completed", [2])
    assert [one.partition(",")[0] for one in said] == ["job.step when its attempt has ended"]
