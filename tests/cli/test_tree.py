"""`pulse-trio jobs tree`, and what the commands say of trees."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import psycopg

if TYPE_CHECKING:
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
