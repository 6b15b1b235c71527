"""Every action by its form: what it does, what it says, and the line that it leaves in the audit trail."""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING, Any

import pytest

from pulse_trio.client import request_by_name
from pulse_trio.lines import Kind
from pulse_trio.states import State
from pulse_trio.store import history, queues, rehearsing, schedules, stacks
from pulse_trio.timing import Timing
from pulse_trio.web import User
from pulse_trio.web.actions import ROUTES, bulk
from pulse_trio.web.addresses import segment
from pulse_trio.worker.durable.cancelling import COMPENSATED
from support.sites import open_site

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import httpx
    from starlette.requests import Request

    from support.stores import Window


async def authenticate(request: Request) -> User | None:
    name = request.headers.get("x-user", "ada")
    return User(name, may_act=name == "ada", may_read_payloads=True)


@pytest.fixture
async def site(dsn: str) -> AsyncGenerator[httpx.AsyncClient]:
    async with open_site(dsn, authenticate=authenticate) as client:
        yield client


async def post(site: httpx.AsyncClient, path: str, **fields: Any) -> httpx.Response:
    """Sends a form with a token that is new."""
    shown = await site.get("/enqueue")
    token = re.search(r'name="csrf_token" value="([^"]+)"', shown.text)
    assert token is not None, shown.text
    return await site.post(path, data={"csrf_token": token[1]} | fields)


async def told(site: httpx.AsyncClient, answer: httpx.Response) -> str:
    """The line on the page that an answer leads to."""
    assert answer.status_code == 303, answer.text
    shown = await site.get("/enqueue")
    found = re.search(r'<p class="flash[^>]*>(.*?)</p>', shown.text, re.DOTALL)
    assert found is not None, shown.text
    return found[1]


def trail(window: Window) -> list[tuple[str, str, str | None, int]]:
    rows = window.run("SELECT actor, act, target, jobs FROM audit ORDER BY id")
    return [(row["actor"], row["act"], row["target"], row["jobs"]) for row in rows]


# One job


async def test_a_waiting_job_is_cancelled_with_a_reason_under_the_users_name(
    site: httpx.AsyncClient, window: Window
) -> None:
    job_id = window.enqueue()
    done = await post(site, f"/actions/jobs/{job_id}/cancel", reason="not <today>")
    assert done.headers["location"] == f"/jobs/{job_id}"
    assert await told(site, done) == f"Job {job_id} is cancelled."
    assert window.job(job_id)["cancel_reason"] == "not <today>"
    (ledger,) = window.run("SELECT requested_by FROM cancellations")
    assert "ada (web)" in ledger["requested_by"]
    assert trail(window) == [("ada", "cancel", None, 1)]
    again = await post(site, f"/actions/jobs/{job_id}/cancel")
    assert await told(site, again) == f"Job {job_id} is cancelled already; nothing was changed."


async def test_a_finished_job_is_retried_deleted_after_a_question_and_then_is_unknown(
    site: httpx.AsyncClient, window: Window
) -> None:
    job_id = window.enqueue()
    await post(site, f"/actions/jobs/{job_id}/cancel")
    done = await post(site, f"/actions/jobs/{job_id}/retry", back="/jobs?state=cancelled")
    assert done.headers["location"] == "/jobs?state=cancelled"
    assert window.state(job_id) == "available"
    refused = await post(site, f"/actions/jobs/{job_id}/retry")
    assert f"Job {job_id} is available" in await told(site, refused)
    question = await post(site, f"/actions/jobs/{job_id}/delete", back=f"/jobs/{job_id}")
    assert question.status_code == 200
    assert f"Delete job {job_id}?" in question.text
    assert window.state(job_id) == "available"
    done = await post(site, f"/actions/jobs/{job_id}/delete", confirmed="yes", back=f"/jobs/{job_id}")
    assert done.headers["location"] == "/jobs"
    assert window.run("SELECT id FROM jobs") == []
    gone = await post(site, f"/actions/jobs/{job_id}/delete", confirmed="yes")
    assert f"There is no job {job_id}" in await told(site, gone)
    assert [act for _, act, _, _ in trail(window)] == ["cancel", "retry", "delete"]


async def test_a_job_is_enqueued_again_as_it_was_once_for_a_form_that_is_sent_twice(
    site: httpx.AsyncClient, window: Window
) -> None:
    old = window.enqueue(
        "mail", kind="send", args={"to": "ada", "n": 1e-7}, priority=5, max_attempts=3, timeout=30.0, key="tenant",
        unique_key="once", delay=3600.0, deadline=60.0, tags=["eu", "vip"], meta={"order": "ä7"},
    )  # fmt: skip
    token = re.search(r'name="csrf_token" value="([^"]+)"', (await site.get("/enqueue")).text)
    assert token is not None
    path = f"/actions/jobs/{old}/enqueue-again"
    done = await site.post(path, data={"csrf_token": token[1]})
    second = await site.post(path, data={"csrf_token": token[1]})
    assert second.headers["location"] == f"/jobs/{old}"
    new = int(done.headers["location"].rpartition("/")[2])
    assert [row["id"] for row in window.run("SELECT id FROM jobs ORDER BY id")] == [old, new]
    was, job = window.row(old), window.row(new)
    assert was is not None
    assert job is not None
    for name in ("kind", "args", "queue", "priority", "max_attempts", "key"):
        assert job[name] == was[name], name
    assert job["options"]["timeout"] == 30.0
    assert "deadline" not in job["options"]
    told_of = window.job(new)
    assert (told_of["tags"], told_of["meta"]) == (["eu", "vip"], {"order": "ä7"})
    assert job["unique_key"] is None
    assert window.state(new) == "available"
    assert trail(window) == [("ada", "enqueue", "mail send", 1)]


async def test_arguments_that_are_encrypted_for_one_job_are_not_enqueued_again(
    site: httpx.AsyncClient, window: Window
) -> None:
    bound = window.enqueue(args={"$codec": "k", "data": "x"})
    free = window.enqueue(args={"$codec": "k", "data": "x", "bound": False})
    assert "encrypted for that job alone" in await told(site, await post(site, f"/actions/jobs/{bound}/enqueue-again"))
    assert "is enqueued" in await told(site, await post(site, f"/actions/jobs/{free}/enqueue-again"))


async def test_a_worker_that_does_not_answer_is_no_mistake_of_ours(
    site: httpx.AsyncClient, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "POLL", 0.01)
    job_id = window.enqueue()
    window.run(
        "UPDATE job SET state = 2, attempt = 1, locked_by = 7, started_at = now(), lease_until = now() + interval '1 min'"
        " WHERE id = %s",
        job_id,
    )
    answer = await post(site, f"/actions/jobs/{job_id}/stack")
    assert answer.status_code == 504
    assert f"runs job {job_id} and did not answer" in answer.text


async def test_only_a_running_job_has_a_stack(site: httpx.AsyncClient, window: Window) -> None:
    job_id = window.enqueue()
    answer = await post(site, f"/actions/jobs/{job_id}/stack")
    assert f"Job {job_id} is available: only a running job has a stack." in await told(site, answer)


@pytest.mark.parametrize("path", ["/actions/jobs/0/cancel", "/actions/jobs/99999999999999999999/retry"])
async def test_an_id_that_no_job_has_is_refused(site: httpx.AsyncClient, path: str) -> None:
    assert "A job&#39;s id is a whole number" in await told(site, await post(site, path))


# Queues, kinds, schedules


@pytest.mark.parametrize("queue", ["mail", "a/b", "x/pause", ".", "..", "...", "A:b.c-d_"])
async def test_a_queue_is_paused_limited_and_resumed_whatever_its_name(
    site: httpx.AsyncClient, window: Window, queue: str
) -> None:
    path = f"/actions/queues/{segment(queue)}"
    # What the URL standard calls dot segments, and browsers leave out.
    assert not {"..", "."} & set(path.lower().replace("%2e", ".").split("/"))
    window.enqueue(queue)
    assert (await site.get(path.removeprefix("/actions"))).status_code == 200
    await post(site, f"{path}/pause")
    await post(site, f"{path}/limits", limit="3", rate="10/s", key_limit="", key_rate="")
    (found,) = window.do(queues.queues())
    assert (found.name, found.paused, found.limit, found.rate, found.key_limit) == (queue, True, 3, "10/s", None)
    await post(site, f"{path}/resume")
    await post(site, f"{path}/limits")
    (found,) = window.do(queues.queues())
    assert (found.paused, found.limit, found.rate) == (False, None, None)
    assert {line[:3] for line in trail(window)} >= {
        ("ada", "pause", f"queue {queue}"),
        ("ada", "resume", f"queue {queue}"),
    }


async def test_a_queue_that_is_paused_by_mistake_is_said_to_be_unknown(site: httpx.AsyncClient, window: Window) -> None:
    window.enqueue("mail")
    told_of = await told(site, await post(site, "/actions/queues/maill/pause"))
    assert "The queue maill is paused, but no job, worker or limit names a queue maill" in told_of
    assert "Did you mean mail?" in told_of
    known = await told(site, await post(site, "/actions/queues/mail/pause"))
    assert "The queue mail is paused; its running jobs go on." in known


@pytest.mark.parametrize(("name", "given"), [("limit", "many"), ("limit", "0"), ("rate", "fast"), ("key_limit", "1.5")])
async def test_a_limit_that_is_none_is_refused_and_nothing_is_set(
    site: httpx.AsyncClient, window: Window, name: str, given: str
) -> None:
    window.enqueue("mail")
    answer = await post(site, "/actions/queues/mail/limits", **{"limit": "5", name: given})
    assert answer.headers["location"] == "/queues"
    assert given in await told(site, answer)
    assert trail(window) == []


async def test_a_kind_is_paused_and_resumed(site: httpx.AsyncClient, window: Window) -> None:
    await post(site, "/actions/kinds/mail.send/pause")
    assert [p.kind for p in window.do(queues.paused_kinds())] == ["mail.send"]
    await post(site, "/actions/kinds/mail.send/resume")
    assert window.do(queues.paused_kinds()) == []
    assert [line[:3] for line in trail(window)] == [
        ("ada", "pause", "kind mail.send"),
        ("ada", "resume", "kind mail.send"),
    ]


async def test_a_schedule_is_paused_resumed_and_run_now(site: httpx.AsyncClient, window: Window) -> None:
    window.do(schedules.put(schedules.Schedule("nightly/x", request_by_name("report"), Timing(cron="0 3 * * *"))))
    path = "/actions/schedules/nightly%2Fx"
    await post(site, f"{path}/pause")
    assert window.value("SELECT paused_at IS NOT NULL FROM schedule") is True
    ran = await post(site, f"{path}/run-now")
    assert re.fullmatch(r"Job \d+ of the schedule nightly/x is enqueued\.", await told(site, ran))
    await post(site, f"{path}/resume")
    assert window.value("SELECT paused_at IS NULL FROM schedule") is True
    assert {line[0] for line in trail(window)[1:]} == {"ada"}
    unknown = await post(site, "/actions/schedules/none/pause")
    assert "There is no schedule &#39;none&#39;" in await told(site, unknown)


# Enqueuing by hand


async def test_a_form_that_is_sent_again_does_nothing_and_with_another_text_it_is_another_form(
    site: httpx.AsyncClient, window: Window
) -> None:
    token = re.search(r'name="csrf_token" value="([^"]+)"', (await site.get("/enqueue")).text)
    assert token is not None
    for args in ('{"n": 1}', '{"n": 1}', '{"n": 2}'):
        await site.post("/actions/jobs/enqueue", data={"csrf_token": token[1], "kind": "send", "args": args})
    assert [row["args"] for row in window.run("SELECT args FROM jobs ORDER BY id")] == [{"n": 1}, {"n": 2}]


async def test_a_job_is_enqueued_by_hand_and_a_mistake_shows_the_form_again(
    site: httpx.AsyncClient, window: Window
) -> None:
    fields = {
        "kind": "send",
        "queue": "mail",
        "priority": "-3",
        "max_attempts": "2",
        "unique_key": "k",
        "key": "t",
        "delay": "60",
        "tags": "eu vip",
        "meta": '{"order": 7}',
    }
    for args, problem in [
        ('{"to": ', "not valid JSON"), ("[1]", "a JSON object"), ('{"a": NaN}', "NaN"), ("[" * 5000, ""),
        ('{"a": "\\u0000"}', ""),
    ]:  # fmt: skip
        wrong = await post(site, "/actions/jobs/enqueue", **fields, args=args)
        assert wrong.status_code == 400
        assert problem in wrong.text
        assert 'value="mail"' in wrong.text
    assert (await post(site, "/actions/jobs/enqueue", **fields | {"priority": "high"})).status_code == 400
    assert (await post(site, "/actions/jobs/enqueue", **fields | {"delay": "inf"})).status_code == 400
    assert (await post(site, "/actions/jobs/enqueue", **fields | {"kind": ""})).status_code == 400
    for name, wrong_one in [("tags", "a,b"), ("meta", "[1]"), ("meta", '{"a": {}}'), ("meta", "{")]:
        refused = await post(site, "/actions/jobs/enqueue", **fields | {name: wrong_one})
        assert refused.status_code == 400
        assert {"tags": "A tag must", "meta": "meta"}[name] in refused.text
    assert window.run("SELECT id FROM jobs") == []
    done = await post(site, "/actions/jobs/enqueue", **fields, args='{"to": "ada", "n": [1, 2.5, null]}')
    job = window.job(int(done.headers["location"].rpartition("/")[2]))
    assert job["args"] == {"to": "ada", "n": [1, 2.5, None]}
    assert (job["tags"], job["meta"]) == (["eu", "vip"], {"order": 7})
    assert (job["queue"], job["priority"], job["max_attempts"], job["unique_key"], job["key"], job["state"]) == (
        "mail", -3, 2, "k", "t", "scheduled",
    )  # fmt: skip
    taken = await post(site, "/actions/jobs/enqueue", **fields, args="{}")
    assert taken.headers["location"] == f"/jobs/{job['id']}"
    assert "Nothing was enqueued" in await told(site, taken)
    assert trail(window) == [("ada", "enqueue", "mail send", 1)]


async def test_arguments_may_be_as_large_by_hand_as_from_a_program(site: httpx.AsyncClient, window: Window) -> None:
    """A form has three bytes for one of "é". It was answered as a mistake of the page from 1 MiB on."""
    text = "é" * 520_000
    done = await post(site, "/actions/jobs/enqueue", kind="send", args=f'{{"a": "{text}"}}')
    assert window.job(int(done.headers["location"].rpartition("/")[2]))["args"] == {"a": text}
    refused = await post(site, "/actions/jobs/enqueue", kind="send", args=f'{{"a": "{"x" * 1_100_000}"}}')
    assert refused.status_code == 400
    assert "1,048,576" in refused.text


# Many jobs


def plan_in(text: str) -> str:
    found = re.search(r'name="plan" value="([^"]+)"', text)
    assert found is not None, text
    return found[1]


async def test_many_jobs_are_counted_confirmed_and_retried_and_no_other_one_is(
    site: httpx.AsyncClient, window: Window
) -> None:
    ids = window.enqueue_many(1200, "mail", delay=3600.0)
    shown = await post(
        site, "/actions/jobs/preview", verb="retry", state="scheduled", queue="mail", back="/jobs?state=scheduled"
    )
    assert "Retry 1,200 jobs?" in shown.text
    late = window.enqueue("mail", delay=3600.0)
    done = await post(site, "/actions/jobs/bulk", plan=plan_in(shown.text))
    assert done.headers["location"] == "/jobs?state=scheduled"
    assert await told(site, done) == "1,200 jobs retried."
    assert window.value("SELECT count(*) FROM jobs WHERE state = 'available'") == len(ids)
    assert window.state(late) == "scheduled"
    assert trail(window) == [("ada", "retry", None, n) for n in (500, 500, 200)]
    assert window.value("SELECT details->>'filter' FROM audit LIMIT 1") == "state scheduled, queue mail"
    twice = await post(site, "/actions/jobs/bulk", plan=plan_in(shown.text))
    assert "was sent already" in await told(site, twice)


def cancelled_with_a_history(window: Window, *, ended_well: bool) -> int:
    """A durable job that was cancelled where it stood."""
    job_id = window.enqueue("mail")
    window.run("SELECT FROM make_durable(%s)", job_id)
    lines = "INSERT INTO history (job_id, line, kind, key, value, attempt) VALUES (%s, %s, %s, %s, %s, 1)"
    window.run(lines, job_id, 1, Kind.CANCELLED, "job", '{"reason": "user"}')
    if ended_well:
        window.run(lines, job_id, 2, Kind.MOMENT, COMPENSATED, "1.0")
    window.run("SELECT FROM cancel_jobs_now(ARRAY[%s::bigint])", job_id)
    return job_id


def make_members(window: Window, root: int, *members: int, failed: bool = False) -> None:
    """Makes these jobs children of that one."""
    for member in members:
        window.run(
            "INSERT INTO member (job_id, root_id, parent_id, block, child_key, watched, failed)"
            " VALUES (%s, %s, %s, 0, %s, false, %s)",
            member, root, root, str(member), failed,
        )  # fmt: skip
        window.run("UPDATE durable_job SET root_id = %s WHERE job_id = %s", root, member)


def text_in(answer: httpx.Response) -> str:
    """What a person reads on a page."""
    main = re.sub(r"<[^>]+>", " ", answer.text[answer.text.index("<main") :])
    return " ".join(html.unescape(main).split())


@pytest.mark.parametrize("by_filter", [True, False])
async def test_who_retries_many_jobs_is_told_how_many_do_the_rest_of_their_clean_up(
    by_filter: bool, site: httpx.AsyncClient, window: Window
) -> None:
    ids = [cancelled_with_a_history(window, ended_well=n == 2) for n in range(3)]
    ids.append(window.enqueue("mail"))
    window.run("SELECT FROM cancel_jobs(ARRAY[%s::bigint])", ids[-1])
    chosen: dict[str, Any] = {"state": "cancelled"} if by_filter else {"ids": [str(each) for each in ids]}

    shown = (await post(site, "/actions/jobs/preview", verb="retry", **chosen)).text
    assert "Retry 4 jobs?" in shown
    assert (
        "2 jobs of them were cut short and their clean-ups did not end: a retry does the rest of each, and no more."
        in shown
    )
    assert "1 job of them has undone what it had done: a retry begins it anew, and every step is done again;" in shown
    for other in ({"verb": "delete"}, {"verb": "retry", "afresh": "on"}):
        assert "did not end" not in (await post(site, "/actions/jobs/preview", **chosen, **other)).text

    one = (await post(site, "/actions/jobs/preview", verb="retry", ids=[str(ids[0]), str(ids[3])])).text
    assert "1 job of them was cut short and its clean-up did not end: a retry does the rest of it, and no more." in one
    assert "undone" not in one


async def test_what_becomes_of_trees_is_foretold_of_what_their_roots_do(
    site: httpx.AsyncClient, window: Window
) -> None:
    owing, anew, goes_on = (
        cancelled_with_a_history(window, ended_well=ended_well) for ended_well in (False, True, True)
    )
    window.run("DELETE FROM history WHERE job_id = %s", goes_on)
    for n, root in enumerate((owing, anew, goes_on), 1):
        window.run(
            "INSERT INTO member (job_id, root_id, parent_id, block, child_key, watched, failed) "
            "SELECT %s * 1000 + n, %s, %s, 0, n::text, false, false FROM generate_series(1, %s) n",
            root, root, root, n,
        )  # fmt: skip

    async def foretold(*ids: int, **more: str) -> str:
        fields: dict[str, Any] = {"verb": "retry", "ids": [str(each) for each in ids]} | more
        return (await post(site, "/actions/jobs/preview", **fields)).text

    assert "1 job of them started 1 other. A root that does the rest of its clean-up starts none" in await foretold(
        owing
    )
    assert "1 job of them started 2 others. A root that begins anew starts new children." in await foretold(anew)
    assert "1 job of them started 3 others. A retried root goes on after the last line" in await foretold(goes_on)
    assert "2 jobs of them started 5 others. A root that does not begin anew goes on" in await foretold(anew, goes_on)
    every = owing, anew, goes_on
    assert "3 jobs of them started 6 others. A root that does neither goes on after" in await foretold(*every)
    assert "started 6 others. A root forgets its history" in await foretold(*every, afresh="on")
    assert "3 jobs would be deleted, and 6 others that they started: 9 jobs in all." in await foretold(
        *every, verb="delete"
    )
    assert "started" not in await foretold(*every, verb="cancel")


async def test_who_retries_a_root_is_told_which_members_owe_a_clean_up(site: httpx.AsyncClient, window: Window) -> None:
    root, *members = (cancelled_with_a_history(window, ended_well=n in (0, 3)) for n in range(4))
    make_members(window, root, *members)

    async def foretold(*ids: int, verb: str = "retry") -> str:
        return (await post(site, "/actions/jobs/preview", verb=verb, ids=[str(each) for each in ids])).text

    one, two, _ = members
    too = "which a retry of the root does only if that starts"
    assert f"Jobs {one}, {two} owe their clean-up, {too} them again: retry them too." in await foretold(root)
    assert f"Job {two} owes its clean-up, {too} it again: retry it too." in await foretold(root, one)
    assert too not in await foretold(root, one, two)
    assert too not in await foretold(root, verb="delete")
    await post(site, f"/actions/jobs/{one}/retry")
    assert window.value("SELECT state FROM jobs WHERE id = %s", one) == "available"


@pytest.mark.parametrize("by_filter", [True, False])
async def test_who_deletes_jobs_that_owe_their_clean_up_is_told_that_nobody_can_do_it_then(
    by_filter: bool, site: httpx.AsyncClient, window: Window
) -> None:
    alone, root, member, well = (cancelled_with_a_history(window, ended_well=n in (1, 3)) for n in range(4))
    make_members(window, root, member)

    def chosen(*ids: int) -> dict[str, Any]:
        return {"state": "cancelled"} if by_filter else {"ids": [str(each) for each in ids]}

    lost = f"Jobs {alone}, {member} owe their clean-up, which nobody can do any more when they are deleted."
    shown = await post(site, "/actions/jobs/preview", verb="delete", **chosen(alone, root, well))
    assert lost in text_in(shown)
    for verb in ("retry", "cancel"):
        other = await post(site, "/actions/jobs/preview", verb=verb, **chosen(alone, root, well))
        assert "nobody can do" not in text_in(other)
    done = await post(site, "/actions/jobs/bulk", plan=plan_in(shown.text))
    assert await told(site, done) == f"{4 if by_filter else 3} jobs deleted."


async def test_who_deletes_a_job_that_owes_its_clean_up_is_told_that_nobody_can_do_it_then(
    site: httpx.AsyncClient, window: Window
) -> None:
    alone, root, member, well = (cancelled_with_a_history(window, ended_well=n in (1, 3)) for n in range(4))
    make_members(window, root, member)
    for job_id, owes in ((alone, alone), (root, member)):
        shown = await post(site, f"/actions/jobs/{job_id}/delete")
        assert f"Job {owes} owes its clean-up, which nobody can do any more when it is deleted." in text_in(shown)
        assert f"Delete job {job_id}?" in text_in(shown)
    assert "It started 1 other, which go with it" in text_in(await post(site, f"/actions/jobs/{root}/delete"))
    assert "clean-up" not in text_in(await post(site, f"/actions/jobs/{well}/delete"))
    refused = await post(site, f"/actions/jobs/{member}/delete")
    assert f"delete job {root}, which takes all of its tree along" in await told(site, refused)
    assert len(window.run("SELECT id FROM jobs")) == 4


async def test_a_preview_counts_members_that_are_among_the_jobs_once_and_those_that_are_left_to_their_parents_not(
    site: httpx.AsyncClient, window: Window
) -> None:
    """It counted the first twice, and the second among those that are retried."""
    root, one, two, alone = (cancelled_with_a_history(window, ended_well=True) for _ in range(4))
    window.run("DELETE FROM history")
    # The third has completed, and its row is gone: no filter finds it.
    make_members(window, root, one, two, two + 1000, failed=True)

    shown = text_in(await post(site, "/actions/jobs/preview", verb="delete", state="cancelled"))
    assert "Delete 4 jobs?" in shown
    assert "4 jobs would be deleted, and 1 other that they started: 5 jobs in all." in shown
    assert f"{window.do(rehearsing.rehearse_deletion([root, one, two, alone], State.CANCELLED))}." in shown

    shown = text_in(await post(site, "/actions/jobs/preview", verb="retry", state="cancelled"))
    assert "Retry 2 jobs?" in shown
    assert "2 jobs are left to the retried jobs above them in the same trees" in shown
    assert "would be refused" not in shown


@pytest.mark.parametrize("by_filter", [True, False])
@pytest.mark.parametrize("verb", ["delete", "retry"])
async def test_a_preview_of_what_is_refused_says_why_and_has_nothing_to_confirm(
    verb: str, by_filter: bool, site: httpx.AsyncClient, window: Window
) -> None:
    """It asked whether to delete them, and said that they are removed for good; and then none was."""
    ids = [window.enqueue("mail") for _ in range(12)]
    for job_id in ids:
        window.run("SELECT FROM make_durable(%s)", job_id)
        window.run("UPDATE job SET attempt = 1, run_at = far() WHERE id = %s", job_id)
        window.run("UPDATE durable_job SET suspended = 1, children = 1 WHERE job_id = %s", job_id)
        window.run("INSERT INTO member VALUES (%s, %s, %s, 0, 'child')", job_id + 1000, job_id, job_id)
    chosen: dict[str, Any] = {"state": "suspended"} if by_filter else {"ids": [str(each) for each in ids]}

    answer = await post(site, "/actions/jobs/preview", verb=verb, **chosen)

    shown = text_in(answer)
    past, why = {
        "delete": ("deleted", "is the root of a live tree: cancel job"),
        "retry": ("retried", "is suspended: it goes on by itself"),
    }[verb]
    assert f"No job would be {past}" in shown
    assert f"12 jobs would be refused: Job {ids[0]} {why}" in shown
    assert "and 2 more" in shown
    assert "removed for good" not in shown
    assert "/actions/jobs/bulk" not in answer.text


async def test_a_preview_of_which_some_are_refused_asks_for_the_others(site: httpx.AsyncClient, window: Window) -> None:
    one, two, runs = window.enqueue_many(3)
    window.run(
        "UPDATE job SET state = 2, attempt = 1, locked_by = 7, started_at = now(), lease_until = now() + interval '1 min'"
        " WHERE id = %s",
        runs,
    )
    shown = await post(site, "/actions/jobs/preview", verb="delete", ids=[str(one), str(two), str(runs)])
    assert "Delete 2 jobs?" in text_in(shown)
    assert f"1 job would be refused: Job {runs} is running: cancel it first" in text_in(shown)
    done = await post(site, "/actions/jobs/bulk", plan=plan_in(shown.text))
    assert f"2 jobs deleted. 1 not: Job {runs} is running" in await told(site, done)


@pytest.mark.parametrize("afresh", [False, True])
async def test_members_of_retried_roots_are_left_to_them_in_whichever_step_they_come(
    site: httpx.AsyncClient, window: Window, monkeypatch: pytest.MonkeyPatch, *, afresh: bool
) -> None:
    """They were refused, with the advice to enqueue them anew."""
    monkeypatch.setattr(bulk, "_STEPS", 0.0)
    monkeypatch.setattr(history, "BATCH", 2 if afresh else 500)
    root, one, two = (cancelled_with_a_history(window, ended_well=True) for _ in range(3))
    window.run("DELETE FROM history")
    make_members(window, root, one, two, failed=True)
    more = {"afresh": "on"} if afresh else {}
    answer = await post(site, "/actions/jobs/preview", verb="retry", state="cancelled", **more)
    while answer.status_code == 200:
        answer = await post(site, "/actions/jobs/bulk", plan=plan_in(answer.text))
    what = "begin anew and start new children." if afresh else "start failed children again themselves, unless they"
    said = await told(site, answer)
    assert f"1 job retried. 2 jobs are left to the retried jobs above them in the same trees, which {what}" in said
    assert " not: " not in said
    assert [window.state(each) for each in (root, one, two)] == ["available", "cancelled", "cancelled"]


async def test_selected_jobs_are_cancelled_and_those_that_have_ended_are_counted_apart(
    site: httpx.AsyncClient, window: Window
) -> None:
    one, two, three = window.enqueue_many(3)
    await post(site, f"/actions/jobs/{one}/cancel")
    shown = await post(site, "/actions/jobs/preview", verb="cancel", ids=[str(one), str(two)])
    assert "Cancel 2 jobs?" in shown.text
    done = await post(site, "/actions/jobs/bulk", plan=plan_in(shown.text))
    assert (
        f"1 job cancelled; handlers that run are being cancelled. 1 not: Job {one} is cancelled already."
        in await told(site, done)
    )
    assert [window.state(each) for each in (one, two, three)] == ["cancelled", "cancelled", "available"]


async def test_a_script_is_told_of_each_step(
    site: httpx.AsyncClient, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    window.enqueue_many(1100)
    monkeypatch.setattr(bulk, "_STEP", 0.0)
    monkeypatch.setattr(bulk, "_STEPS", 0.0)
    shown = await post(site, "/actions/jobs/preview", verb="delete", state="available")
    assert "removed for good" in shown.text
    plan, seen = plan_in(shown.text), list[Any]()
    site.headers["accept"] = "application/json"
    while True:
        found = (await post(site, "/actions/jobs/bulk", plan=plan)).json()
        if "location" in found:
            break
        plan = found["plan"]
        seen.append((found["done"], found["total"], found["past"]))
    assert seen == [(500, 1100, "deleted"), (1000, 1100, "deleted")]
    assert window.run("SELECT id FROM jobs") == []
    del site.headers["accept"]
    window.enqueue_many(600)
    shown = await post(site, "/actions/jobs/preview", verb="delete", state="available")
    half = await post(site, "/actions/jobs/bulk", plan=plan_in(shown.text))
    assert "500 of 600 jobs" in half.text
    assert (await post(site, "/actions/jobs/bulk", plan=plan_in(half.text))).status_code == 303
    assert window.run("SELECT id FROM jobs") == []


async def test_more_than_one_act_takes_is_said_and_the_newest_are_taken(
    site: httpx.AsyncClient, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "MOST", 10)
    ids = window.enqueue_many(15)
    shown = await post(site, "/actions/jobs/preview", verb="cancel", state="available")
    assert "More match. These are the newest 10" in shown.text
    await post(site, "/actions/jobs/bulk", plan=plan_in(shown.text))
    assert [row["id"] for row in window.run("SELECT id FROM jobs WHERE state = 'available' ORDER BY id")] == ids[:5]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"verb": "retry"}, "Say which state"),
        ({"verb": "drop", "state": "dead"}, "Say what to do"),
        ({"verb": "retry", "state": "sad"}, "There is no state"),
        ({"verb": "retry", "state": "dead", "since": "soon"}, "A moment is"),
        ({"verb": "retry", "state": "dead", "worker": "x"}, "A worker is its id"),
        ({"verb": "retry", "ids": "x"}, "whole number"),
        ({"verb": "retry", "ids": "9" * 30}, "whole number"),
        ({"verb": "retry", "state": "dead"}, "No job matches"),
    ],
)
async def test_a_selection_that_cannot_be_is_refused(
    site: httpx.AsyncClient, fields: dict[str, str], said: str
) -> None:
    assert said in await told(site, await post(site, "/actions/jobs/preview", **fields))


async def test_a_plan_is_of_its_user_its_session_and_its_hour(
    site: httpx.AsyncClient, window: Window, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    window.enqueue_many(2)
    shown = await post(site, "/actions/jobs/preview", verb="cancel", state="available")
    plan = plan_in(shown.text)
    refused = "made too long ago, or in another session"
    for forged in ("", "x", plan[:-4] + ("AAAA" if plan[-4] != "A" else "BBBB"), plan[1:]):
        assert refused in await told(site, await post(site, "/actions/jobs/bulk", plan=forged))
    async with open_site(dsn, authenticate=authenticate) as other:
        assert refused in await told(other, await post(other, "/actions/jobs/bulk", plan=plan))
    monkeypatch.setattr(bulk, "VALID", -1)
    assert refused in await told(site, await post(site, "/actions/jobs/bulk", plan=plan))
    assert trail(window) == []


# Who may not


ACTIONS = [
    *(f"/actions/jobs/1/{verb}" for verb in ("cancel", "retry", "delete", "enqueue-again", "stack")),
    *(f"/actions/queues/mail/{verb}" for verb in ("pause", "resume", "limits")),
    *(f"/actions/kinds/send/{verb}" for verb in ("pause", "resume")),
    *(f"/actions/schedules/nightly/{verb}" for verb in ("pause", "resume", "run-now")),
    "/actions/jobs/preview",
    "/actions/jobs/bulk",
    "/actions/jobs/enqueue",
]


@pytest.mark.parametrize("path", ACTIONS)
async def test_a_viewer_and_a_read_only_page_reach_no_action(dsn: str, window: Window, path: str) -> None:
    window.enqueue("mail", kind="send")
    async with open_site(dsn, authenticate=authenticate) as site:
        site.headers["x-user"] = "eve"
        shown = await site.get("/enqueue")
        assert "You may look" in shown.text
        assert (await site.post(path, data={"csrf_token": "x"})).status_code == 403
        assert (await site.get(path)).status_code == 405
    async with open_site(dsn, authenticate=authenticate, read_only=True) as site:
        listed = (await site.get("/jobs")).text
        assert 'method="post"' not in listed
        assert "/actions/" not in listed
        assert (await site.post(path, data={"csrf_token": "x"})).status_code == 403
    assert trail(window) == []
    assert window.value("SELECT count(*) FROM jobs") == 1


def test_every_action_is_in_that_list() -> None:
    for route in ROUTES:
        if route.methods == {"POST"}:
            assert any(route.path_regex.match(path) for path in ACTIONS), route.path
        assert route.methods == {"POST"} or route.path == "/enqueue"
