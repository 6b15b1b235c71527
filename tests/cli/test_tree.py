"""`pulse-trio jobs tree`, and what the commands say of trees."""

from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import psycopg

from pulse_trio.store import operations
from pulse_trio.store.branches import branches
from pulse_trio.store.family import TreeJob
from pulse_trio.worker.durable.cancelling import COMPENSATED

if TYPE_CHECKING:
    from pulse_trio.store.operations import Query

    from .conftest import Command


def plant(dsn: str, members: int = 3) -> tuple[int, list[int]]:
    """A suspended root with a history, whose first child runs; the others completed."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SET search_path = pulse")
        ((root,),) = connection.execute("SELECT enqueue('order', '{}', 'orders')")
        connection.execute("UPDATE job SET attempt = 1, run_at = far() WHERE id = %s", [root])
        connection.execute("SELECT FROM make_durable(%s)", [root])
        connection.execute(
            "UPDATE durable_job SET suspended = 1, blocks = '{0}', children = %s WHERE job_id = %s", [members, root]
        )
        connection.execute(
            "INSERT INTO history (job_id, line, kind, key, name, attempt) VALUES (%s, 1, 1, '1:step', 'charge', 1)",
            [root],
        )
        children: list[int] = []
        for number in range(members):
            ((child,),) = connection.execute("SELECT enqueue('pack', '{}', 'packers')")
            connection.execute("INSERT INTO member VALUES (%s, %s, %s, 0, %s)", [child, root, root, f"parcel-{number}"])
            connection.execute("""UPDATE job SET options = '{"tree": 1}' WHERE id = %s""", [child])
            children.append(child)
        connection.execute(
            "UPDATE job SET state = 2, attempt = 1, locked_by = 7, lease_until = now() + interval '1 h' WHERE id = ANY (%s)",
            [children],
        )
        connection.execute("SELECT complete_jobs(%s)", [children[1:]])
    return root, children


async def test_a_tree_is_drawn_from_its_root_whichever_job_is_named(command: Command, dsn: str) -> None:
    root, children = plant(dsn)
    lines = (await command("jobs", "tree", str(children[1]))).stdout.splitlines()
    assert lines[0] == f"{root}  suspended  order  on orders  waits for 3 children"
    assert lines[1] == f"├─ {children[0]}  running  pack  parcel-0  on packers"
    assert [line.partition("on packers")[0] for line in lines[2:]] == [
        f"├─ {children[1]}  completed  pack  parcel-1  ",
        f"└─ {children[2]}  completed  pack  parcel-2  ",
    ]
    listed = json.loads((await command("jobs", "tree", str(root), "--json")).stdout)
    assert [(job["id"], job["parent_id"], job["state"]) for job in listed] == [
        (root, None, "suspended"), (children[0], root, "running"), (children[1], root, "completed"),
        (children[2], root, "completed"),
    ]  # fmt: skip


async def test_of_many_completed_siblings_the_number_is_shown(command: Command, dsn: str) -> None:
    root, _ = plant(dsn, members=30)
    lines = (await command("jobs", "tree", str(root))).stdout.splitlines()
    assert len(lines) == 22
    assert lines[-1] == "└─ ... and 10 completed pack"


async def test_a_jobs_timeline_has_its_history_and_its_place_in_the_tree(command: Command, dsn: str) -> None:
    root, children = plant(dsn)
    shown = (await command("jobs", "show", str(root))).stdout
    assert "step" in shown
    assert "charge" in shown
    assert "due" not in shown
    shown = (await command("jobs", "show", str(children[0]))).stdout
    assert f"parent       {root}" in shown
    assert "child key    parcel-0" in shown
    listed = (await command("queues", "list")).stdout
    assert "suspended" in listed


async def test_the_day_that_a_suspended_job_never_sees_is_shown_nowhere(command: Command, dsn: str) -> None:
    root, _ = plant(dsn)
    for arguments in (("jobs", "show", str(root)), ("jobs", "list"), ("top", "--once", "--state", "all")):
        shown = (await command(*arguments)).stdout
        assert str(root) in shown
        assert "9999" not in shown
        assert not re.search(r"in \d+ d", shown)
    assert re.search(
        r"^waits  +It waits for jobs that it started", (await command("jobs", "show", str(root))).stdout, re.MULTILINE
    )
    assert json.loads((await command("jobs", "show", str(root), "--json")).stdout)["run_at"] is None
    (listed,) = json.loads((await command("jobs", "list", "--state", "suspended", "--json")).stdout)
    assert listed["run_at"] is None
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("UPDATE pulse.job SET run_at = now() + interval '3 days' WHERE id = %s", [root])
    assert re.search(r"suspended .* in 3 d ", (await command("jobs", "list")).stdout)
    assert "run          " in (await command("jobs", "show", str(root))).stdout


async def test_refusals_name_the_root(command: Command, dsn: str) -> None:
    root, children = plant(dsn)
    refused = await command("jobs", "retry", str(root), code=2)
    assert f"Job {root} is suspended: it goes on by itself" in refused.stderr
    refused = await command("jobs", "delete", "--yes", str(children[1]), code=2)
    assert f"Job {children[1]} is part of the live tree of job {root}: cancel job {root} first" in refused.stderr


async def test_a_settled_root_is_deleted_with_its_tree_only_on_request(command: Command, dsn: str) -> None:
    root, children = plant(dsn)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SELECT pulse.complete_jobs(%s)", [children])
        connection.execute("SELECT pulse.cancel_jobs_now(%s)", [[root]])
    refused = await command("jobs", "retry", str(children[0]), code=2)
    assert f"Job {children[0]} belongs to the tree of job {root}, which is settled; retry job {root}." in refused.stderr
    asked = await command("jobs", "delete", str(root), code=2)
    assert "1 job started 3 others, which will be deleted too" in asked.stderr
    assert "give --yes" in asked.stderr
    assert (await command("jobs", "delete", str(root), "--yes")).stdout == "1 job deleted\n"


async def test_a_deletion_of_trees_is_rehearsed_as_it_would_be(command: Command, dsn: str) -> None:
    root, children = plant(dsn)
    live = await command("jobs", "delete", str(root), str(children[1]), "--dry-run", code=2)
    assert live.stdout == "0 jobs would be deleted\n"
    assert f"Job {root} is the root of a live tree: cancel job {root} first" in live.stderr
    assert f"Job {children[1]} is part of the live tree of job {root}" in live.stderr
    settle(dsn, root, children)
    alone = await command("jobs", "delete", str(root), "--dry-run")
    assert alone.stdout == "1 job would be deleted, and 3 others that it started: 4 jobs in all\n"
    both = await command("jobs", "delete", str(root), str(children[0]), "--dry-run")
    assert both.stdout == "2 jobs would be deleted, and 2 others that they started: 4 jobs in all\n"
    member = await command("jobs", "delete", str(children[0]), "--dry-run", code=2)
    assert f"delete job {root}, which takes all of its tree along" in member.stderr
    found = json.loads((await command("jobs", "delete", "--state", "cancelled", "--dry-run", "--json")).stdout)
    assert found == {"would_be_deleted": [root], "members": 3, "refused": {}}
    found = json.loads((await command("jobs", "delete", "--state", "completed", "--dry-run", "--json", code=2)).stdout)
    assert (found["would_be_deleted"], set(found["refused"])) == ([], set(map(str, children)))
    # Nothing was done; what is done is what was said.
    done = json.loads((await command("jobs", "delete", str(root), str(children[0]), "--yes", "--json")).stdout)
    assert done == {"deleted": [root, children[0]], "refused": {}}


async def test_a_deletion_of_plain_jobs_is_rehearsed_as_it_would_be(command: Command, dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SET search_path = pulse")
        ((waits,),) = connection.execute("SELECT enqueue('mail', '{}', 'q')")
        ((runs,),) = connection.execute("SELECT enqueue('mail', '{}', 'q')")
        connection.execute(
            "UPDATE job SET state = 2, attempt = 1, locked_by = 7, lease_until = now() + interval '1 h' WHERE id = %s",
            [runs],
        )
    dry = await command("jobs", "delete", str(waits), str(runs), "4711", "--dry-run", code=2)
    assert dry.stdout == "1 job would be deleted\n"
    assert f"Job {runs} is running: cancel it first" in dry.stderr
    assert "There is no job 4711 (it was deleted, or ended longer ago than its retention" in dry.stderr
    running = await command("jobs", "delete", "--state", "running", "--dry-run", code=2)
    assert running.stdout == "0 jobs would be deleted\n"
    assert (await command("jobs", "delete", str(waits))).stdout == "1 job deleted\n"
    assert "it was deleted, or ended" in (await command("jobs", "show", str(waits), code=2)).stderr
    assert "it was deleted, or ended" in (await command("jobs", "cancel", str(waits), code=2)).stderr


def settle(dsn: str, root: int, children: list[int]) -> None:
    """Ends the tree: its root is cancelled."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SELECT pulse.complete_jobs(%s)", [children])
        connection.execute("SELECT pulse.cancel_jobs_now(%s)", [[root]])


def history(dsn: str, job_id: int, *lines: tuple[int, str, object]) -> None:
    """Lines of a history: kind, name and value."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for number, (kind, name, value) in enumerate(lines, 10):
            connection.execute(
                "INSERT INTO pulse.history (job_id, line, kind, key, name, value, attempt) VALUES (%s, %s, %s, %s, %s, %s, 1)",
                [job_id, number, kind, f"{number}:key", name, json.dumps(value)],
            )


async def test_a_job_shows_what_its_steps_returned_and_the_events_that_it_has_and_has_not_received(
    command: Command, dsn: str
) -> None:
    root, children = plant(dsn)
    history(
        dsn, root, (1, "charge", {"id": "ch_1", "lines": "a\nb"}), (1, "fetch", "x" * 6000), (1, "note", None),
        (2, "label", "Step label failed: OSError: no paper"), (3, "paid", {"by": "Ada"}),
        (7, "", {"failed": children[:2], "body": False}),
        (9, "", {"at": ["3:event"], "reason": "user"}),
    )  # fmt: skip
    await command("jobs", "send-event", str(root), "approved", '{"by": "Bob"}', "--event-key", "k")
    shown = (await command("jobs", "show", str(root))).stdout
    for said in (
        'charge: {"id": "ch_1", "lines": "a\\nb"}',
        f'fetch: "{"x" * 99}…',
        "Step label failed: OSError: no paper",
        'paid: {"by": "Ada"}',
        f"jobs {children[0]}, {children[1]}",
        'approved: {"by":"Bob"} (sent by ',
        ", not received)",
    ):
        assert said in shown
    assert "note: " not in shown
    document = json.loads((await command("jobs", "show", str(root), "--json")).stdout)
    values = {line["name"]: line["value"] for line in document["history"]}
    assert (values["fetch"], values["charge"]) == ("x" * 6000, {"id": "ch_1", "lines": "a\nb"})
    assert {line["kind"] for line in document["history"]} == {
        "step", "step_failed", "event", "block_failed", "cancelled"
    }  # fmt: skip
    assert [(e["name"], e["event_key"], e["payload"]) for e in document["unreceived_events"]] == [
        ("approved", "k", {"by": "Bob"})
    ]


async def test_who_retries_a_root_that_has_compensated_is_told_that_it_begins_anew(command: Command, dsn: str) -> None:
    root, children = plant(dsn)
    settle(dsn, root, children)
    goes_on = await command("jobs", "retry", str(root), code=2)
    assert "1 job started 3 others: a retried root goes on after the last line of its history" in goes_on.stderr
    history(dsn, root, (9, "", {"at": [], "reason": "user"}))
    rest = await command("jobs", "retry", str(root), code=2)
    assert (
        f"job {root} was cut short and its clean-up did not end: a retry does the rest of it, and no more"
        in rest.stderr
    )
    assert "1 job started 3 others: a root that does the rest of its clean-up starts none of them" in rest.stderr
    assert f"job {root} was cut short and its clean-up did not end" in (await command("jobs", "show", str(root))).stderr
    assert json.loads((await command("jobs", "show", str(root), "--json")).stdout)["owes_clean_up"] is True
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO pulse.history (job_id, line, kind, key, value, attempt) VALUES (%s, 99, 10, %s, '1.0', 1)",
            (root, COMPENSATED),
        )
    assert "clean-up" not in (await command("jobs", "show", str(root))).stderr
    assert json.loads((await command("jobs", "show", str(root), "--json")).stdout)["owes_clean_up"] is False
    anew = await command("jobs", "retry", str(root), code=2)
    assert (
        f"job {root} has undone what it had done: a retry begins it anew, and every step is done again" in anew.stderr
    )
    assert "1 job started 3 others: a root that begins anew starts new children" in anew.stderr
    assert "goes on" not in anew.stderr
    afresh = await command("jobs", "retry", str(root), "--afresh", code=2)
    assert "with --afresh a root forgets its history, does every step again and starts new children" in afresh.stderr
    assert "received events are received again" in afresh.stderr


async def test_who_retries_many_jobs_by_a_filter_is_told_how_many_do_the_rest_of_their_clean_up(
    command: Command, dsn: str
) -> None:
    roots: list[int] = []
    for _ in range(2):
        root, children = plant(dsn)
        settle(dsn, root, children)
        history(dsn, root, (9, "", {"at": [], "reason": "user"}))
        roots.append(root)
    said = (
        f"2 jobs ({roots[0]}, {roots[1]}) were cut short and their clean-ups did not end: a retry does the rest of each, "
        "and no more"
    )
    cancelled = "jobs", "retry", "--state", "cancelled"
    assert said in (await command(*cancelled, code=2)).stderr
    dry = await command(*cancelled, "--dry-run")
    assert dry.stdout == "2 jobs would be retried\n"
    assert said in dry.stderr
    assert "2 jobs started 6 others: a root that does the rest of its clean-up starts none of them" in dry.stderr
    assert "clean-up" not in (await command(*cancelled, "--dry-run", "--afresh")).stderr
    done = await command(*cancelled, "--yes")
    assert (done.stdout, said in done.stderr) == ("2 jobs retried\n", True)


async def test_a_member_of_a_deleted_root_cannot_be_retried_and_nobody_is_sent_to_that_root(
    command: Command, dsn: str
) -> None:
    root, children = plant(dsn)
    settle(dsn, root, children)
    await command("jobs", "delete", str(root), "--yes")
    refused = await command("jobs", "retry", str(children[0]), code=2)
    assert f"Job {children[0]} belongs to the tree of job {root}, which was deleted" in refused.stderr
    assert "retry job" not in refused.stderr


def test_of_many_siblings_that_have_ended_the_dead_and_the_cancelled_are_shown_and_the_others_counted() -> None:
    def job(number: int, state: str) -> TreeJob:
        parent = 1 if number > 1 else None
        blank: Any = None
        return TreeJob(
            number, parent, 1, 0, None, "q", "pack", state, 1, blank, blank, blank, blank, blank, blank, blank, blank, 0
        )

    states = ["completed"] * 30 + ["cancelled"] * 200 + ["running"] * 3 + ["dead"] * 2
    found = [job(1, "suspended"), *(job(number, state) for number, state in enumerate(states, 2))]
    drawn = list(branches(found, 1))
    shown = Counter(branch.job.state for branch in drawn[1:] if branch.job is not None)
    assert shown == {"running": 3, "dead": 2, "cancelled": 15}
    assert drawn[-1].left == "185 cancelled pack, 30 completed pack"


def test_members_of_a_root_that_is_gone_stand_beside_each_other() -> None:
    found = [member(2, 1), member(3, 1), member(4, 3)]
    drawn = [(branch.indent, branch.job.id) for branch in branches(found, 4) if branch.job is not None]
    assert drawn == [("", 2), ("", 3), ("└─ ", 4)]


def test_parents_in_a_circle_are_drawn_once_and_cut_where_it_closes() -> None:
    """They were drawn for ever: the command never ended, and the web page took all memory."""
    found = [member(1, None), member(1, 2), member(2, 1), member(3, 4), member(4, 3), member(5, 5), member(6, 1)]
    drawn = [(b.indent, b.left if b.job is None else b.job.id) for b in islice(branches(found, 1), 100)]
    again = "job {} again, which has a line above"
    assert drawn == [
        ("", 1), ("├─ ", 2), ("│  └─ ", again.format(1)), ("└─ ", 6),
        ("", 3), ("└─ ", 4), ("   └─ ", again.format(3)),
        ("", 5), ("└─ ", again.format(5)),
    ]  # fmt: skip


async def test_a_tree_whose_root_is_said_to_be_a_child_of_its_child_is_shown(command: Command, dsn: str) -> None:
    root, (child, _, _) = plant(dsn)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("INSERT INTO pulse.member VALUES (%s, %s, %s, 0, 'round')", [root, root, child])
    lines = (await command("jobs", "tree", str(root))).stdout.splitlines()
    assert lines[2] == f"│  └─ ... and job {root} again, which has a line above"


def test_of_each_parent_in_a_circle_is_asked_once_whether_a_retried_job_stands_above() -> None:
    """`jobs retry` of several jobs asked for ever."""
    parents = {2: 3, 3: 2}
    asking = operations.below([2], [99])
    asked: Query | None = next(asking)
    for _ in range(100):
        if asked is None:
            break
        ids = [int(one) for one in str(asked.parameters["ids"]).strip("{}").split(",")]
        with suppress(StopIteration):
            asked = None
            asked = asking.send([(one, 1, parents[one], True, True, None, 0, 0) for one in ids])
    assert asked is None


async def test_a_name_of_an_event_that_is_missing_keeps_no_tree_and_no_job_from_being_shown(
    command: Command, dsn: str
) -> None:
    """It ended as "a bug in pulse-trio"."""
    root, _ = plant(dsn)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("UPDATE pulse.durable_job SET events = ARRAY[NULL, 'go'] WHERE job_id = %s", [root])
    assert "  waits for go" in (await command("jobs", "tree", str(root))).stdout
    assert "It waits for the event go." in (await command("jobs", "show", str(root))).stdout


async def test_a_member_that_owes_its_clean_up_is_named_with_its_root_and_retried_alone(
    command: Command, dsn: str
) -> None:
    root, children = plant(dsn)
    settle(dsn, root, children)
    owing = children[0]
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SET search_path = pulse")
        connection.execute("INSERT INTO durable_job (job_id, root_id, depth) VALUES (%s, %s, 1)", [owing, root])
        connection.execute(
            "INSERT INTO history (job_id, line, kind, key, value, attempt) VALUES (%s, 1, 9, '', %s, 1)",
            [owing, '{"at": [], "reason": "parent"}'],
        )
        connection.execute("UPDATE job_archive SET state = 6 WHERE id = %s", [owing])
    said = f"job {owing} owes its clean-up, which a retry of the root does only if that starts it again: retry it too"
    assert said in (await command("jobs", "retry", str(root), "--dry-run")).stderr
    assert said in (await command("jobs", "retry", str(root), "--dry-run", "--afresh")).stderr
    both = await command("jobs", "retry", str(root), str(owing), "--dry-run")
    assert said not in both.stderr
    assert f"job {owing} was cut short and its clean-up did not end: a retry does the rest of it" in both.stderr
    deletion = await command("jobs", "delete", str(root), "--dry-run")
    assert said not in deletion.stderr
    lost = f"job {owing} owes its clean-up, which nobody can do any more when it is deleted: see pulse-trio jobs retry"
    assert lost in deletion.stderr
    told = await command("jobs", "delete", str(root), "--dry-run", "--json")
    assert json.loads(told.stdout)["owe_clean_up"] == [owing]

    assert (await command("jobs", "retry", str(owing))).stdout == f"{owing} available\n"
    lines = (await command("jobs", "tree", str(root))).stdout.splitlines()
    assert lines[0].startswith(f"{root}  cancelled  order")
    assert lines[1].startswith(f"├─ {owing}  available  pack  parcel-0  on packers")
    for rehearsed in ((), ("--dry-run",)):
        refused = await command("jobs", "delete", str(root), "--yes", *rehearsed, code=2)
        assert f"1 job in the tree of job {root} still does the rest of a clean-up" in refused.stderr
    assert (await command("jobs", "cancel", str(owing), "--now")).stdout == f"{owing} cancelled\n"
    assert (await command("jobs", "delete", str(root), "--yes")).stdout == "1 job deleted\n"


def member(number: int, parent: int | None) -> TreeJob:
    blank: Any = None
    return TreeJob(
        number, parent, 1, 0, None, "q", "pack", "dead", 1, blank, blank, blank, blank, blank, blank, blank, blank, 0
    )
