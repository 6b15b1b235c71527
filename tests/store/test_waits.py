"""Events and suspensions in the database: nothing that a job waits for is lost, whichever transaction commits first."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any, cast

import psycopg
import pytest

from pulse_trio import InvalidArguments, InvalidName, InvalidTransition, SyncClient, UnknownJob, open_client
from pulse_trio.sql import statement
from support.stores import Window, claim_one, end
from support.stores import claim as next_claims

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from pulse_trio.jobs import Claim
    from pulse_trio.store import WorkerStore

FAR = "9999-12-30 00:00:00+00"
"""When a job is due that waits for no moment."""


@pytest.fixture
def second(room_dsn: str) -> Generator[Window]:
    """Another connection, for a transaction that is open meanwhile."""
    with Window(room_dsn) as window:
        yield window


def receive(window: Window, *waits: tuple[Claim, int, str], key: str = "1:event") -> list[tuple[Any, ...]]:
    """The answers to these waits: (claim, line, name of the event)."""
    rows = window.connection.execute(
        statement("receive_events", "pulse"),
        {
            "ids": [c.id for c, _, _ in waits],
            "attempts": [c.attempt for c, _, _ in waits],
            "sessions": [c.session for c, _, _ in waits],
            "lines": [line for _, line, _ in waits],
            "keys": [key] * len(waits),
            "names": [name for _, _, name in waits],
        },
    ).fetchall()
    return [tuple(row.values()) for row in rows]


def suspend(
    window: Window,
    claim: Claim,
    *,
    events: Sequence[str] = (),
    blocks: Sequence[int] = (),
    until: float | None = None,
    session: int | None = None,
) -> bool | None:
    return window.value(
        "SELECT suspend(%s, %s, %s, %s, %s, %s, %s, 'said')",
        claim.id,
        claim.attempt,
        claim.session if session is None else session,
        list(blocks),
        list(blocks),
        list(events),
        until,
    )


def send(window: Window, job_id: int, name: str = "approved", payload: Any = 1, key: str | None = None) -> bool:
    return window.value("SELECT send_event(%s, %s, %s, %s)", job_id, name, json.dumps(payload), key)


def due(window: Window, job_id: int) -> bool:
    return window.value("SELECT run_at <= clock_timestamp() FROM job WHERE id = %s", job_id)


def look(window: Window) -> int:
    return next(iter(window.run("SELECT * FROM recheck_jobs()")[0].values()))


def look_until_nothing_is_left(window: Window) -> None:
    while window.value("SELECT count(*) FROM recheck"):
        look(window)


async def begun(window: Window, store: WorkerStore, queue: str) -> Claim:
    """A job that the store runs."""
    window.enqueue(queue)
    return await claim_one(store, queue)


# Sending


async def test_an_event_is_received_once_and_of_those_that_are_visible_the_one_that_was_sent_first(
    window: Window, second: Window, store: WorkerStore, queue: str
) -> None:
    claim = await begun(window, store, queue)
    with second.connection.transaction():
        send(second, claim.id, payload="sent first, visible second")
        send(window, claim.id, payload="sent second, visible first")
        assert receive(window, (claim, 1, "approved")) == [(claim.id, 1, True, '"sent second, visible first"')]
    assert receive(window, (claim, 2, "approved")) == [(claim.id, 2, True, '"sent first, visible second"')]
    assert receive(window, (claim, 3, "approved")) == []
    lines = window.run(
        "SELECT line, key, name, value, event_id IS NOT NULL AS sent FROM history WHERE job_id = %s", claim.id
    )
    assert [(r["line"], r["key"], r["name"], r["sent"]) for r in lines] == [
        (n, "1:event", "approved", True) for n in (1, 2)
    ]
    # Nobody looks in between: the order of the commits is not known any more.
    with second.connection.transaction():
        send(second, claim.id, payload="sent first, committed second")
        send(window, claim.id, payload="sent second, committed first")
        send(window, claim.id, payload="sent third, by the same")
    received = [value for line in (3, 4, 5) for *_, value in receive(window, (claim, line, "approved"))]
    assert received == ['"sent first, committed second"', '"sent second, committed first"', '"sent third, by the same"']


async def test_a_wait_that_is_sent_again_after_a_lost_answer_gets_the_line_that_it_wrote_and_no_second_event(
    window: Window, store: WorkerStore, queue: str
) -> None:
    claim = await begun(window, store, queue)
    send(window, claim.id, payload="one")
    send(window, claim.id, payload="two")
    assert receive(window, (claim, 1, "approved")) == receive(window, (claim, 1, "approved"))
    assert window.value("SELECT count(*) FROM event WHERE job_id = %s AND line IS NULL", claim.id) == 1


async def test_an_attempt_that_lost_its_lease_receives_nothing_and_the_event_waits_for_the_next(
    window: Window, store: WorkerStore, other: WorkerStore, queue: str
) -> None:
    claim = await begun(window, store, queue)
    send(window, claim.id)
    window.expire(claim.id)
    await other.rescue()
    assert receive(window, (claim, 1, "approved")) == [(claim.id, 1, False, None)]
    window.make_due(claim.id)
    again = await claim_one(other, queue)
    assert receive(window, (again, 1, "approved")) == [(claim.id, 1, True, "1")]


async def test_a_wait_whose_row_is_locked_is_told_to_try_again(
    window: Window, second: Window, store: WorkerStore, queue: str
) -> None:
    claim = await begun(window, store, queue)
    send(window, claim.id)
    with second.connection.transaction():
        second.run("SELECT FROM job WHERE id = %s FOR UPDATE", claim.id)
        assert receive(window, (claim, 1, "approved")) == [(claim.id, 1, False, None)]
    assert receive(window, (claim, 1, "approved")) == [(claim.id, 1, True, "1")]


async def test_a_locked_event_keeps_its_job_waiting_alone_and_no_later_one_of_its_name_overtakes_it(
    window: Window, second: Window, store: WorkerStore, queue: str
) -> None:
    """The statement waited for the row, so the events of all jobs of a worker were as late as that one."""
    one, two = await begun(window, store, queue), await begun(window, store, queue)
    send(window, one.id, payload="first")
    send(window, one.id, payload="second")
    send(window, two.id)
    with second.connection.transaction():
        second.run("SELECT FROM event WHERE job_id = %s ORDER BY id LIMIT 1 FOR UPDATE", one.id)
        with window.connection.transaction():
            window.run("SET LOCAL lock_timeout = '1s'")
            answers = receive(window, (one, 1, "approved"), (one, 2, "approved"), (two, 1, "approved"))
        assert answers == [(one.id, 1, False, None), (one.id, 2, False, None), (two.id, 1, True, "1")]
    answers = receive(window, (one, 1, "approved"), (one, 2, "approved"), (two, 1, "approved"))
    assert [value for *_, value in answers] == ['"first"', '"second"', "1"]


async def test_one_statement_receives_for_many_jobs_and_for_many_waits_of_one(
    window: Window, store: WorkerStore, queue: str
) -> None:
    one, two = await begun(window, store, queue), await begun(window, store, queue)
    send(window, one.id, "a", "of one")
    send(window, two.id, "a", "of two")
    send(window, two.id, "b", "b of two")
    answers = receive(window, (two, 1, "a"), (two, 2, "b"), (one, 1, "a"), (one, 2, "b"))
    assert answers == [(one.id, 1, True, '"of one"'), (two.id, 1, True, '"of two"'), (two.id, 2, True, '"b of two"')]


async def test_of_two_sends_with_one_event_key_the_second_changes_nothing(
    window: Window, store: WorkerStore, queue: str
) -> None:
    claim = await begun(window, store, queue)
    with SyncClient(window.dsn)._connection() as connection:
        client = SyncClient(connection)
        assert client.send_event(claim.id, "paid", {"n": 1}, event_key="payment-7")
        assert not client.send_event(claim.id, "paid", {"n": 2}, event_key="payment-7")
        # The key belongs to the name and the job.
        assert client.send_event(claim.id, "paid too", {"n": 3}, event_key="payment-7")
    assert receive(window, (claim, 1, "paid"))[0][3] == '{"n":1}'
    # Received or not: it was sent.
    assert not send(window, claim.id, "paid", 4, "payment-7")


async def test_an_event_of_a_transaction_that_rolls_back_was_never_sent(
    window: Window, second: Window, store: WorkerStore, queue: str
) -> None:
    claim = await begun(window, store, queue)
    with second.connection.transaction(force_rollback=True):
        SyncClient(cast("Any", second.connection)).send_event(claim.id, "approved")
    assert receive(window, (claim, 1, "approved")) == []
    look_until_nothing_is_left(window)


async def test_to_an_unknown_or_settled_job_no_event_is_sent_and_the_error_says_which(
    window: Window, store: WorkerStore, queue: str
) -> None:
    claim = await begun(window, store, queue)
    async with open_client(window.dsn) as client:
        with pytest.raises(UnknownJob, match="There is no job 999999"):
            await client.send_event(999_999_999, "approved")
        await store.settle([end(claim)])
        with pytest.raises(InvalidTransition, match=f"Job {claim.id} is completed: it receives no more events."):
            await client.send_event(claim.id, "approved")
    with pytest.raises(psycopg.errors.NoDataFound, match="there is no job 999999999"):
        send(window, 999_999_999)
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match=f"job {claim.id} is completed"):
        send(window, claim.id)


async def test_to_a_job_whose_outcome_stands_but_waits_for_its_children_no_event_is_sent(
    window: Window, store: WorkerStore, queue: str
) -> None:
    claim = await begun(window, store, queue)
    window.run("INSERT INTO durable_job (job_id, root_id, ending) VALUES (%s, %s, 5)", claim.id, claim.id)
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match=f"job {claim.id} is dead"):
        send(window, claim.id)


async def test_a_job_that_has_not_begun_may_be_sent_events_and_many_but_not_any_number(
    window: Window, store: WorkerStore, queue: str
) -> None:
    job_id = window.enqueue(queue)
    assert send(window, job_id)
    window.run("INSERT INTO event (job_id, name) SELECT %s, 'other' FROM generate_series(2, 10000)", job_id)
    with pytest.raises(psycopg.errors.ProgramLimitExceeded, match="10,000 events that it has not received"):
        send(window, job_id)
    async with open_client(window.dsn) as client:
        with pytest.raises(InvalidTransition, match="10,000 events that it has not received"):
            await client.send_event(job_id, "approved")
    claim = await claim_one(store, queue)
    assert receive(window, (claim, 1, "approved"))
    assert send(window, job_id)


@pytest.mark.parametrize(
    ("name", "payload", "key", "said"),
    [
        ("", 1, None, "must have 1 to 256 bytes"),
        ("a" * 257, 1, None, "must have 1 to 256 bytes"),
        ("a\nb", 1, None, "control characters"),
        ("a", 1, "", "must have 1 to 256 bytes"),
        ("a", object(), None, "cannot be written as JSON"),
        ("a", "x" * 1024 * 1024, None, "the limit is 1,048,576"),
        ("a", "\0", None, "NUL character"),
    ],
)
def test_a_bad_event_is_refused_before_anything_is_written(
    name: str, payload: Any, key: str | None, said: str, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    with pytest.raises((InvalidArguments, InvalidName), match=said):
        SyncClient(window.dsn).send_event(job_id, name, payload, event_key=key)


@pytest.mark.parametrize(
    ("name", "payload", "key"), [("", "1", None), (None, "1", None), ("a\nb", "1", None), ("a", '"\\u0000"', None),
                                 ("a", '"' + "x" * 1048576 + '"', None), ("a", "1", "k" * 257), ("a" * 257, "1", None)]
)  # fmt: skip
def test_sql_refuses_the_same_bad_events(
    name: str | None, payload: str, key: str | None, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        window.run("SELECT send_event(%s, %s, %s, %s)", job_id, name, payload, key)


# Suspending


async def test_a_suspended_job_holds_no_slot_uses_no_budget_and_is_due_when_its_event_is_there(
    window: Window, store: WorkerStore, other: WorkerStore, queue: str
) -> None:
    claim = await begun(window, store, queue)
    before = window.row(claim.id)
    assert suspend(window, claim, events=["approved"]) is True
    row = window.row(claim.id)
    assert before
    assert row
    assert (row["state"], row["locked_by"], row["max_attempts"]) == (1, 0, before["max_attempts"] + 1)
    assert window.value("SELECT run_at = %s FROM job WHERE id = %s", FAR, claim.id)
    assert [(a["outcome"], a["error"]) for a in window.attempts(claim.id)] == [("suspended", "said")]
    look(window)
    assert not due(window, claim.id)
    send(window, claim.id)
    look(window)
    assert due(window, claim.id)
    again = await claim_one(other, queue)
    assert again.attempt == 2
    assert json.loads(again.options or "{}") == {"tree": 1}


@pytest.mark.parametrize("committed", ["before", "while it is suspended", "after"])
async def test_an_event_wakes_a_job_whenever_its_sender_commits(
    committed: str, window: Window, second: Window, store: WorkerStore, queue: str
) -> None:
    claim = await begun(window, store, queue)
    if committed == "before":
        send(second, claim.id)
        assert suspend(window, claim, events=["approved"])
    elif committed == "while it is suspended":
        with window.connection.transaction():
            assert suspend(window, claim, events=["approved"])
            send(second, claim.id)
            # The look must not take it for one that runs.
            assert look(second) >= 1
        look_until_nothing_is_left(window)
    else:
        with second.connection.transaction():
            send(second, claim.id)
            # A sender's open transaction keeps neither beats nor the suspension waiting.
            assert (await store.beat([claim])).renewed == {claim}
            assert suspend(window, claim, events=["approved"])
            look(window)
            assert not due(window, claim.id)
        look_until_nothing_is_left(window)
    assert due(window, claim.id)


async def test_an_event_of_another_name_or_one_that_was_received_wakes_no_job(
    window: Window, store: WorkerStore, queue: str
) -> None:
    claim = await begun(window, store, queue)
    send(window, claim.id, "approved")
    assert receive(window, (claim, 1, "approved"))
    send(window, claim.id, "another")
    assert suspend(window, claim, events=["approved"])
    look_until_nothing_is_left(window)
    assert not due(window, claim.id)


async def test_a_job_that_sleeps_is_due_at_its_moment_and_at_once_if_that_is_past(
    window: Window, store: WorkerStore, queue: str
) -> None:
    claim = await begun(window, store, queue)
    moment = window.value("SELECT extract(epoch FROM clock_timestamp())::float8") + 3600
    assert suspend(window, claim, until=moment)
    assert window.value("SELECT extract(epoch FROM run_at)::float8 FROM job WHERE id = %s", claim.id) == pytest.approx(
        moment
    )
    window.make_due(claim.id)
    again = await claim_one(store, queue)
    # It has written a line, so it is not made to wait.
    window.run(
        "INSERT INTO history (job_id, line, kind, key, attempt) VALUES (%s, 1, 1, 'k', %s)", claim.id, again.attempt
    )
    assert suspend(window, again, until=moment - 7200)
    assert due(window, claim.id)


async def test_a_resumption_that_found_nothing_new_is_due_again_a_second_after_it_began_and_no_sooner(
    window: Window, store: WorkerStore, queue: str
) -> None:
    claim = await begun(window, store, queue)
    send(window, claim.id, "old")
    # As a handler would that asks to be woken by an event that it does not receive.
    assert suspend(window, claim, events=["old"])
    assert due(window, claim.id)
    again = await claim_one(store, queue)
    assert suspend(window, again, events=["old"])
    assert window.value(
        "SELECT j.run_at = a.started_at + interval '1 s' FROM job j JOIN attempt a ON a.job_id = j.id AND a.attempt = 2"
        " WHERE j.id = %s",
        claim.id,
    )


async def test_an_attempt_that_lost_its_lease_suspends_nothing(
    window: Window, store: WorkerStore, other: WorkerStore, queue: str
) -> None:
    claim = await begun(window, store, queue)
    assert suspend(window, claim, session=claim.session + 1) is None
    window.expire(claim.id)
    await other.rescue()
    assert suspend(window, claim) is None
    window.make_due(claim.id)
    await claim_one(other, queue)
    assert suspend(window, claim) is None


async def test_a_job_whose_row_is_locked_is_suspended_by_the_next_try(
    window: Window, second: Window, store: WorkerStore, queue: str
) -> None:
    claim = await begun(window, store, queue)
    with second.connection.transaction():
        second.run("SELECT FROM job WHERE id = %s FOR NO KEY UPDATE", claim.id)
        assert suspend(window, claim, events=["e"]) is False
    assert suspend(window, claim, events=["e"]) is True


async def test_a_job_whose_cancellation_was_asked_for_while_it_unwound_runs_once_more_at_once(
    window: Window, store: WorkerStore, queue: str
) -> None:
    claim = await begun(window, store, queue)
    window.run("SELECT cancel(%s)", claim.id)
    assert suspend(window, claim, events=["e"])
    assert due(window, claim.id)
    row = window.row(claim.id)
    assert row
    assert row["cancelling"]


async def test_the_deadline_of_a_suspended_job_is_noted_for_the_watchdog(
    window: Window, store: WorkerStore, queue: str
) -> None:
    window.enqueue(queue, deadline=3600)
    claim = await claim_one(store, queue)
    assert suspend(window, claim, events=["e"])
    assert window.value(
        "SELECT extract(epoch FROM m.deadline)::float8 - (j.options ->> 'deadline')::float8"
        " FROM member_deadline m JOIN job j ON j.id = m.job_id WHERE j.id = %s",
        claim.id,
    ) == pytest.approx(0, abs=0.001)


async def test_one_statement_suspends_many_jobs_each_by_itself(window: Window, store: WorkerStore, queue: str) -> None:
    one, two, lost = [await begun(window, store, queue) for _ in range(3)]
    send(window, two.id, 'a "b" {c}, d')
    rows = window.connection.execute(
        statement("suspend_jobs", "pulse"),
        {
            "ids": [one.id, two.id, lost.id],
            "attempts": [1, 1, 9],
            "sessions": [one.session] * 3,
            "blocks": ["{}", "{}", "{}"],
            "fail_blocks": ["{}", "{}", "{}"],
            "events": ["{}", '{"a \\"b\\" {c}, d"}', "{}"],
            "moments": [None, None, None],
            "said": [None, None, None],
        },
    ).fetchall()
    assert {row["id"]: row["written"] for row in rows} == {one.id: True, two.id: True}
    assert [due(window, c.id) for c in (one, two)] == [False, True]


async def test_a_suspension_and_a_receipt_at_once_deadlock_nowhere_and_lose_no_event(
    window: Window, store: WorkerStore, queue: str
) -> None:
    """Senders, a worker and looks at once: each event that was sent is received, once."""
    rounds = 60
    claim = await begun(window, store, queue)
    failures: list[Exception] = []

    def sending(number: int) -> None:
        try:
            with Window(window.dsn) as mine:
                for n in range(rounds):
                    send(mine, claim.id, "e", number * rounds + n)
        except Exception as error:
            failures.append(error)

    def looking() -> None:
        try:
            with Window(window.dsn) as mine:
                while any(t.is_alive() for t in senders) or mine.value("SELECT count(*) FROM recheck"):
                    look(mine)
        except Exception as error:
            failures.append(error)

    senders = [threading.Thread(target=sending, args=[n]) for n in range(2)]
    looker = threading.Thread(target=looking)
    for thread in [*senders, looker]:
        thread.start()
    got: list[int] = []
    while len(got) < 2 * rounds and not failures:
        line = len(got) + 1
        answers = receive(window, (claim, line, "e"))
        if answers and answers[0][2]:
            got.append(json.loads(answers[0][3]))
        elif suspend(window, claim, events=["e"]):
            while not due(window, claim.id) and not failures:
                pass
            # A look may hold its row, and claims skip what is locked.
            while not (claimed := await next_claims(store, queue, 1)) and not failures:
                pass
            (claim,) = claimed
    for thread in [*senders, looker]:
        thread.join()
    assert failures == []
    assert sorted(got) == list(range(2 * rounds))


async def test_events_of_jobs_that_are_gone_are_removed_and_those_of_live_and_of_kept_ones_are_kept(
    window: Window, store: WorkerStore, queue: str
) -> None:
    gone, live, kept = [await begun(window, store, queue) for _ in range(3)]
    # A live job with more events than a page has stands before them.
    for claim in (*[live] * 3, gone, kept):
        send(window, claim.id)
    # Neither has made a durable call. The one whose row is kept may be retried, and then waits for its event.
    await store.settle([end(gone), end(kept, "discarded")])
    window.run("DELETE FROM job_archive WHERE id = %s", gone.id)
    window.run("DELETE FROM durable_job WHERE job_id = ANY (%s)", [gone.id, kept.id])
    window.run("UPDATE event SET sent_at = now() - interval '2 h'")
    window.run("UPDATE maintenance SET events_to = (SELECT min(id) - 1 FROM event WHERE job_id = %s)", live.id)
    # Not by upkeep(), which does nothing where another worker has just done it.
    for _ in range(4):
        window.run("SELECT prune_next_events(2)")
    assert "prune_next_events()" in window.value("SELECT pg_get_functiondef('upkeep(interval)'::regprocedure)")
    assert window.value("SELECT count(*) FROM event WHERE job_id = %s", gone.id) == 0
    assert window.value("SELECT count(*) FROM event WHERE job_id = %s", live.id) == 3
    assert window.value("SELECT count(*) FROM event WHERE job_id = %s", kept.id) == 1
