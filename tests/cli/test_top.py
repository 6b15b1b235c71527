"""`pulse-trio top` on a pseudo terminal: what it shows, what keys do, and how it leaves the terminal."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio.testing

from pulse_trio import TookTooLong
from pulse_trio.cli.top import reading
from pulse_trio.cli.top.drawing import draw
from pulse_trio.cli.top.live import console
from pulse_trio.cli.top.model import Act, Model
from pulse_trio.cli.top.reading import Frame, Lately, look, rates, troubles
from pulse_trio.cli.top.screen import ENTER, LEAVE
from pulse_trio.doctor import diagnose
from pulse_trio.postgres import connect_or_unavailable
from pulse_trio.records import JobRecord, State
from pulse_trio.store.glance import MOST, Counters, Glance, QueueGlance, glance, most_of
from pulse_trio.store.health import Health, Server, Storage
from pulse_trio.store.operations import Query, WorkerRecord
from pulse_trio.store.queues import QueueRecord
from pulse_trio.store.watching import Failing, Recent
from pulse_trio.text import utc_now
from support.stores import Window, claim, open_store
from support.terminals import PROGRAM, Terminal, on_terminal

if TYPE_CHECKING:
    from pulse_trio.store.operations import Operation
    from pulse_trio.testing.faults.processes import Processes
    from pulse_trio.testing.faults.proxy import Proxy
    from support.forking import Forker

    from .conftest import Command


Top = Callable[..., AbstractAsyncContextManager[Terminal]]


def installed_top(dsn: str, *arguments: str, forker: Forker | None = None) -> AbstractAsyncContextManager[Terminal]:
    command = (PROGRAM, "top", "--interval", "0.3", *arguments)
    return on_terminal(*command, env={"PULSE_TRIO_DSN": dsn}, forker=forker)


@pytest.fixture
def top(forker: Forker) -> Top:
    """`pulse-trio top` in a fork. How it leaves the terminal is asked of the installed program."""
    return partial(installed_top, forker=forker)


def state_of(window: Window, job_id: int) -> str:
    return window.value("SELECT state FROM jobs WHERE id = %s", job_id)


async def test_it_shows_queues_workers_and_jobs_and_follows_them(top: Top, dsn: str) -> None:
    with Window(dsn) as window:
        window.enqueue("mail", kind="greet")
        async with open_store(dsn) as store, top(dsn) as terminal:
            await terminal.shows(r"^mail +1 ")
            await terminal.shows("workers 1 ")
            await terminal.shows("no job like that")
            await claim(store, "mail")
            await terminal.shows(r"^mail +0 +1 +0$")
            await terminal.shows(r"running +mail +greet")


async def test_keys_filter_by_state_queue_and_kind(top: Top, dsn: str) -> None:
    with Window(dsn) as window:
        first = window.enqueue("mail", kind="greet")
        second = window.enqueue("mail", kind="pay")
        third = window.enqueue("slow", kind="greet")
    async with top(dsn, "--state", "all") as terminal:
        for job_id in (first, second, third):
            await terminal.shows(rf"^ *{job_id} +available")
        terminal.press("umail\r")
        await terminal.shows("queue mail")
        await terminal.shows(rf"{second} +available.*\n.*{first} +available")
        assert not re.search("slow +greet", terminal.text)
        terminal.press("npay\r")
        await terminal.shows("queue mail, kind pay")
        assert not re.search("mail +greet", terminal.text)
        terminal.press("s")
        await terminal.shows("state scheduled")
        await terminal.shows("no job like that")
        terminal.press("x")
        await terminal.shows(rf"^ *{third} +available")
        terminal.press("\t\x1b[B\r")
        await terminal.shows("queue slow")
        terminal.press("?")
        await terminal.shows("Any key goes back")
        terminal.press("q")
        assert await terminal.ended() == 0


async def test_an_act_is_done_after_y_on_the_job_under_the_cursor_and_stands_in_the_audit_trail(
    top: Top, dsn: str
) -> None:
    with Window(dsn) as window:
        below = window.enqueue("mail", kind="greet")
        above = window.enqueue("mail", kind="greet")
        async with top(dsn, "--state", "available", "--as", "Grace") as terminal:
            await terminal.shows(rf"^ *{below} +available")
            terminal.press("jc")
            await terminal.shows(rf"Cancel job {below} \(greet, available\)\? y/n")
            terminal.press("n")
            await terminal.shows("nothing was done")
            assert state_of(window, below) == "available"
            terminal.press("c")
            await terminal.shows("y/n")
            # What arrives meanwhile moves the rows, and not the question.
            newest = window.enqueue("mail", kind="greet")
            await terminal.shows(rf"^ *{newest} +available")
            terminal.press("y")
            await terminal.shows(rf"job {below} is cancelled")
            assert [state_of(window, job) for job in (below, above, newest)] == ["cancelled", "available", "available"]
            terminal.press("ssssss")
            await terminal.shows(rf"^ *{below} +cancelled")
            terminal.press("r")
            await terminal.shows(rf"Retry job {below}")
            terminal.press("y")
            await terminal.shows(rf"job {below} is available")
        found = window.run("SELECT act, actor FROM audit ORDER BY at")
        assert [(row["act"], row["actor"]) for row in found] == [("cancel", "Grace"), ("retry", "Grace")]


async def test_a_queue_and_a_kind_are_paused_and_resumed(top: Top, dsn: str) -> None:
    with Window(dsn) as window:
        window.enqueue("mail", kind="greet")
        async with top(dsn, "--state", "all") as terminal:
            await terminal.shows("available +mail +greet")
            for verb, shown in (("Pause", r"^mail +paused"), ("Resume", r"^mail +1 ")):
                terminal.press("p")
                await terminal.shows(rf"{verb} the queue mail\? y/n")
                terminal.press("y")
                await terminal.shows(shown)
            terminal.press("P")
            await terminal.shows(r"Pause the kind greet in all queues\? y/n")
            terminal.press("y")
            await terminal.shows("kind greet is paused")
            assert window.value("SELECT count(*) FROM paused_kind") == 1


CRASH = """
import sys
from pulse_trio.cli import main
from pulse_trio.cli.top import live
draw, drawn = live.draw, []
def crash(*given):
    drawn.append(1)
    if len(drawn) > 2:
        raise RuntimeError("a bug")
    return draw(*given)
live.draw = crash
main(["top", "--interval", "0.2"])
"""


@pytest.mark.parametrize(
    ("how", "code"), [("q", 0), ("\x03", 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), ("crash", 1)], ids=str
)
async def test_the_terminal_is_as_before_however_it_is_left(dsn: str, how: Any, code: int) -> None:
    crashing = on_terminal(sys.executable, "-c", CRASH, env={"PULSE_TRIO_DSN": dsn})
    opened = crashing if how == "crash" else installed_top(dsn)
    async with opened as terminal:
        await terminal.shows("no worker runs")
        assert ENTER in terminal.raw
        if isinstance(how, signal.Signals):
            terminal.process.send_signal(how)
        elif how != "crash":
            assert terminal.modes != terminal.before
            terminal.press(how)
        assert await terminal.ended() == code
        assert terminal.modes == terminal.before
        after = terminal.raw[terminal.raw.rindex(LEAVE) + len(LEAVE) :]
        assert ("a bug" in after) == (how == "crash")


async def test_a_lost_database_is_shown_and_it_goes_on_by_itself(top: Top, dsn: str, proxy: Proxy) -> None:
    with Window(dsn) as window:
        async with top(proxy.dsn, "--state", "all") as terminal:
            await terminal.shows("no job like that")
            proxy.refuse()
            proxy.cut()
            await terminal.shows("NO DATABASE")
            terminal.press("c")
            await terminal.shows("nothing can be done now")
            window.enqueue("mail", kind="greet")
            proxy.forward()
            await terminal.shows("available +mail +greet")
            await terminal.shows("^pulse-trio top")


async def test_it_fits_the_terminal_at_every_size(top: Top, dsn: str) -> None:
    with Window(dsn) as window:
        for number in range(40):
            window.enqueue(f"queue-with-a-long-name-{number}", kind="kind_with_a_long_name")
    async with top(dsn, "--state", "all") as terminal:
        for columns, lines in ((80, 24), (120, 40), (45, 12), (200, 60), (80, 24)):
            terminal.resize(columns, lines)
            foot = r"^all jobs +s state" if columns >= 80 else "^all jobs"
            while len(terminal.lines) != lines or max(map(len, terminal.lines)) > columns:
                await terminal.shows(foot)
                await terminal._read()
            await terminal.shows(r"^ *\d+ +avail")
        terminal.resize(20, 5)
        await terminal.shows("^too small")


async def test_a_long_error_or_argument_gives_way_to_the_other_columns(top: Top, dsn: str) -> None:
    """One such job hid the ids, the queues and the kinds of all."""
    with Window(dsn) as window:
        for n in range(3):
            window.enqueue("mail", kind="send_welcome", args={"text": f"{n} " + "very long arguments " * 40})
    async with top(dsn, "--state", "all") as terminal:
        for columns in (80, 120, 200):
            terminal.resize(columns, 24)
            while max(map(len, terminal.lines)) < columns - 1:
                await terminal.shows("^all jobs")
                await terminal._read()
            await terminal.shows(r"^ *\d+  available  mail +send_welcome +0/20 .* ago .*very long ar.*…$")
            assert max(map(len, terminal.lines)) <= columns


async def test_without_colour_where_no_color_says_so(dsn: str, forker: Forker) -> None:
    for env, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        async with on_terminal(PROGRAM, "top", env={"PULSE_TRIO_DSN": dsn, **env}, forker=forker) as terminal:
            await terminal.shows("no worker runs")
            assert bool(re.search("\x1b\\[(\\d+;)*3\\d", terminal.raw)) == coloured


async def test_text_from_the_database_is_displayed_and_never_obeyed(top: Top, dsn: str) -> None:
    with Window(dsn) as window:
        job_id = window.enqueue("q")
        window.run("UPDATE job SET attempt = 1, state = 3, run_at = now() + interval '1 h'")
        window.run(
            "INSERT INTO attempt VALUES (%s, 1, 7, now(), now(), 'failed', %s)", job_id, "a\x1b]0;taken\x07b\x1b[2J"
        )
        async with top(dsn, "--state", "all") as terminal:
            await terminal.shows(r"a\\x1b\]0;taken\\x07b\\x1b")
            assert "\x1b]" not in terminal.raw


async def test_once_and_json_print_one_frame_and_need_no_terminal(
    processes: Processes, command: Command, dsn: str
) -> None:
    with Window(dsn) as window:
        job_id = window.enqueue("mail", kind="greet")
    assert re.search(rf"{job_id} +available +mail +greet", (await command("top", "--once", "--state", "all")).stdout)
    found = json.loads((await command("top", "--json", "--state", "available")).stdout)
    assert [job["id"] for job in found["jobs"]] == [job_id]
    assert found["queues"][0] | {"oldest": 0} == {
        "name": "mail", "paused": False, "available": 1, "running": 0, "scheduled": 0, "oldest": 0, "at_least": False,
    }  # fmt: skip
    assert found["troubles"] == ["no worker runs"]
    refused = await command("top", code=2)
    assert "needs a terminal" in refused.stderr


async def test_a_database_that_is_away_at_the_start_is_an_error_of_the_command(top: Top) -> None:
    async with top("postgresql://127.0.0.1:1/x") as terminal:
        assert await terminal.ended() == 1
        assert ENTER not in terminal.raw
        assert "Is PostgreSQL running there" in terminal.raw


# Its parts, without a terminal


def test_counts_end_at_their_bound_and_say_so(dsn: str) -> None:
    with Window(dsn) as window:
        window.run(f"INSERT INTO job (kind, queue) SELECT 'noop', 'big' FROM generate_series(1, {MOST + 500})")
        window.enqueue("small")
        found = window.do(glance())
    assert [(queue.name, queue.available, queue.at_least) for queue in found.queues] == [
        ("big", MOST, True),
        ("small", 1, False),
    ]


def test_the_bound_falls_with_the_number_of_queues() -> None:
    assert [most_of(queues) for queues in (0, 1, 4, 20, 10_000)] == [1000, 1000, 1000, 200, 50]


def test_rates_are_unknown_at_first_and_after_the_counters_fell() -> None:
    assert rates(None, Counters(10.0, 1, 1, 1)) is None
    assert rates(Counters(10.0, 5, 5, 5), Counters(12.0, 9, 1, 5)) is None
    found = rates(Counters(10.0, 5, 5, 5), Counters(12.0, 9, 6, 5))
    assert found is not None
    assert (found.enqueued, found.finished, found.missed) == (2.0, 0.5, 0.0)


WELL = Recent([], 0)
QUIET = Counters(0.0, 0, 0, 0)
WORKER = WorkerRecord(7, "web-1", 4711, "running", utc_now(), utc_now(), ["*"], 100, 3, "0.1")
QUEUE = QueueGlance("mail", False, 5, 0, 0, 1.0, False)
STOPPING = replace(WORKER, state="draining")


@pytest.mark.parametrize(
    ("workers", "queue", "lately", "told", "alert"),
    [
        ([WORKER], QUEUE, WELL, None, None),
        (
            [replace(WORKER, running=96)],
            replace(QUEUE, oldest=61.0),
            WELL,
            "96 of 100 slots are taken",
            "PulseSlotsFull",
        ),
        ([replace(WORKER, running=95)], replace(QUEUE, oldest=61.0), WELL, None, None),
        ([replace(WORKER, running=96)], replace(QUEUE, oldest=60.0), WELL, None, None),
        ([STOPPING], QUEUE, WELL, "every worker is stopping", None),
        ([STOPPING, WORKER], QUEUE, WELL, None, None),
        ([STOPPING], replace(QUEUE, available=0, oldest=0.0), WELL, None, None),
        ([replace(WORKER, queues=["x"])], replace(QUEUE, oldest=11.0), WELL, "no running worker serves mail", None),
        (
            [replace(WORKER, queues=["x"]), replace(WORKER, id=8, concurrency=0, running=1)],  # a quarantine process
            replace(QUEUE, oldest=11.0),
            WELL,
            "no running worker serves mail",
            None,
        ),
        ([replace(WORKER, queues=["x"])], replace(QUEUE, oldest=10.0), WELL, None, None),
        (
            [WORKER],
            QUEUE,
            Recent([Failing("q", "bad", 11, 11, 60.0)], 0),
            "11 of the last 11 attempts",
            "PulseJobsFail",
        ),
        ([WORKER], QUEUE, Recent([Failing("q", "bad", 10, 10, 60.0)], 5), None, None),
        ([WORKER], QUEUE, Recent([], 6), "6 attempts were left behind", "PulseJobsRescued"),
    ],
)
def test_what_the_doctor_warns_of_is_told_in_its_words_at_its_threshold(
    workers: list[WorkerRecord], queue: QueueGlance, lately: Recent, told: str | None, alert: str | None
) -> None:
    """It said that nothing was wrong."""
    found = list(troubles(Glance(QUIET, workers, [queue], False, [], 0, {}), lately))
    server = Server(180004, "18.4", 0.0, False, True, "on", True, True, "app", True, [], True)
    record = QueueRecord("mail", False, queue.available, 0, 0, queue.oldest, None, None, None, None)
    storage = Storage(10_000, 9_990, [], True, 0, False, 60.0)
    read = Health(server, storage, workers=workers, queues=[record], failing=lately.failing, rescued=lately.rescued)
    warned = [finding for finding in diagnose(read) if finding.level != "ok"]
    assert found == [finding.what for finding in warned]
    assert [finding.alert for finding in warned] == ([] if told is None else [alert])
    assert told is None or found[0].startswith(told)


@pytest.mark.parametrize(
    ("lately", "said"),
    [
        (
            WELL,
            "nothing is wrong with workers, queues, schedules and the last attempts; pulse-trio doctor looks at more",
        ),
        (None, "nothing is wrong with workers, queues, schedules; pulse-trio doctor looks at more"),
    ],
    ids=["all read", "attempts not read"],
)
def test_where_nothing_is_wrong_it_says_what_it_looked_at(lately: Recent | None, said: str) -> None:
    model = model_of(5)
    assert model.frame is not None
    model.frame = replace(model.frame, lately=Lately(0.0, lately))
    assert said in "\n".join(draw(model, console(), (120, 40)))


async def test_the_last_attempts_are_read_again_after_a_while_and_later_where_that_took_too_long(
    dsn: str, mock_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def recent(_: float) -> Operation[Recent]:
        asked.append(trio.current_time())
        if len(asked) == 2:
            raise TookTooLong("too long")
        yield Query("paused_kinds", {})
        return WELL

    monkeypatch.setattr(reading.watching, "recent", recent)
    with Window(dsn):
        pass
    async with await connect_or_unavailable(dsn, own=True, autocommit=True) as connection:
        before: Frame | None = None
        seen: list[tuple[float, Recent | None]] = []
        for _ in range(16):
            before = await look(connection, "pulse", Model().chosen, 5, now=utc_now(), before=before)
            seen.append((trio.current_time(), before.lately.found))
            mock_clock.jump(5.0)
    began = asked[0]
    assert [round(at - began) for at in asked] == [0, 10, 70]
    assert [found for at, found in seen if 10 <= round(at - began) < 70] == [None] * 12


async def test_kinds_that_fail_are_told_by_one_look(command: Command, dsn: str) -> None:
    with Window(dsn) as window:
        window.run("SELECT upkeep('7 days')")
        job_id = window.enqueue("q", kind="bad")
        window.run(
            "INSERT INTO attempt SELECT %s::bigint, n, 7, now(), now(), 'failed', 'e' FROM generate_series(1, 11) n",
            job_id,
        )
    found = json.loads((await command("top", "--json")).stdout)
    assert (found["recent"]["failing"][0]["kind"], found["recent"]["failing"][0]["failed"]) == ("bad", 11)
    assert any(text.startswith("11 of the last 11 attempts of bad in q failed") for text in found["troubles"])


def model_of(*ids: int, state: State = State.DEAD) -> Model:
    jobs = [
        JobRecord(id=n, queue="mail", kind="greet", state=state, priority=0, attempt=1, max_attempts=1, run_at=utc_now(),
                  created_at=utc_now(), started_at=None, finished_at=None, worker=None, lease_until=None, args={},
                  result=None, error=None, cancel_reason=None, unique_key=None, progress=None, progress_message=None)
        for n in ids
    ]  # fmt: skip
    seen = Glance(Counters(0.0, 0, 0, 0), [], [QueueGlance("mail", False, 1, 0, 0, 1.0, False)], False, [], 0, {})
    model = Model()
    model.frame = Frame(utc_now(), model.chosen, seen, jobs, None, Lately(0.0, WELL), [])
    model.settle()
    return model


def test_the_cursor_stays_on_its_job_however_the_rows_move() -> None:
    model = model_of(5, 4, 3)
    model.press("j")
    assert model.at_job == 4
    model.frame = model_of(7, 6, 5, 4, 3).frame
    model.settle()
    assert model.at_job == 4
    model.press("r")
    model.frame = model_of(9).frame
    model.settle()
    act = model.press("y")
    assert isinstance(act, Act)
    assert (act.verb, act.job_id) == ("retry", 4)


@pytest.mark.parametrize("key", ["n", "q", "escape", "enter", "r", "down"])
def test_any_key_but_y_does_nothing_and_does_not_leave(key: str) -> None:
    model = model_of(5)
    model.press("r")
    assert model.act is not None
    assert model.press(key) is None
    assert (model.act, model.asks, model.said) == (None, "nothing", "nothing was done")


@pytest.mark.parametrize(
    ("state", "key", "said"),
    [
        (State.RUNNING, "r", "nothing to retry"),
        (State.AVAILABLE, "r", "nothing to retry"),
        (State.COMPLETED, "c", "is completed already"),
    ],
)
def test_what_makes_no_sense_is_not_asked(state: State, key: str, said: str) -> None:
    model = model_of(5, state=state)
    assert model.press(key) is None
    assert model.act is None
    assert said in model.said
