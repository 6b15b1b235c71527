"""Whatever JSON a producer enqueues, or sends as an event: lists and commands show it, and `--json` is JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from pulse_trio.cli.output import print_json
from pulse_trio.plain import json_value, to_json
from support.stores import Window

if TYPE_CHECKING:
    from .conftest import Command

LONG = "9" * 4301
HUGE = "1" + "0" * 400 + ".5"
"""Above every float, as jsonb gives it back."""


def strict(text: str) -> Any:
    """Decodes JSON as a program that keeps to the standard does."""

    def refuse(name: str) -> None:
        raise AssertionError(f"JSON has no {name}")

    return json.loads(text, parse_constant=refuse)


async def test_no_value_of_one_job_keeps_others_from_being_listed_and_shown(command: Command, dsn: str) -> None:
    """`jobs list`, `jobs show` and both with `--json` failed for everybody: a Decimal is not JSON serializable. A number above
    every float was `Infinity` in JSON."""
    with Window(dsn) as window:
        ids = [
            window.value("SELECT enqueue('quiet', %s::text::jsonb)", f'{{"n": {number}}}')
            for number in (LONG, HUGE, "7")
        ]
    listed = await command("jobs", "list")
    assert all(str(job_id) in listed.stdout for job_id in ids)
    found = strict((await command("jobs", "list", "--json")).stdout)
    assert {job["id"]: job["args"]["n"] for job in found} == dict(zip(ids, (LONG, HUGE, 7), strict=True))
    assert LONG in (await command("jobs", "show", str(ids[0]))).stdout
    for job_id, number in zip(ids, (LONG, HUGE), strict=False):
        assert strict((await command("jobs", "show", str(job_id), "--json")).stdout)["args"]["n"] == number
    assert strict((await command("top", "--state", "all", "--json")).stdout)["jobs"]
    assert "Traceback" not in (await command("top", "--state", "all", "--once")).stderr


async def test_no_event_keeps_a_job_from_being_shown(command: Command, dsn: str) -> None:
    """`jobs show --json` failed for a long integer, and printed `Infinity` for 1e400."""
    with Window(dsn) as window:
        job_id = window.enqueue("mail")
        window.run("SELECT FROM make_durable(%s)", job_id)
        for payload in (LONG, "1e400", '{"deep": ' + "[" * 900 + "]" * 900 + "}"):
            window.run("SELECT send_event(%s, 'e', %s::text::json)", job_id, payload)
    shown = strict((await command("jobs", "show", str(job_id), "--json")).stdout)
    assert [event["payload"] for event in shown["unreceived_events"]][:2] == [LONG, "1E+400"]
    assert ", not received)" in (await command("jobs", "show", str(job_id))).stdout


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("1", "1"),
        ("1.5", "1.5"),
        ("1e400", '"1E+400"'),
        ("-1e400", '"-1E+400"'),
        ("1e-400", "0.0"),
        (LONG, f'"{LONG}"'),
        (f"[1.5, -{LONG}, 1e400]", f'[1.5, "-{LONG}", "1E+400"]'),
        ("1e99999999999999999999", '{"$unreadable": "1e99999999999999999999"}'),
        ("[", '{"$unreadable": "["}'),
        (r'"\ud83d"', r'"\ud83d"'),
    ],
)
def test_what_is_read_of_a_value_can_be_written(text: str, written: str, capsys: pytest.CaptureFixture[str]) -> None:
    value = json_value(text)
    assert to_json(value) == written
    print_json(value)
    assert strict(capsys.readouterr().out) == strict(written)


def test_no_float_of_a_record_makes_a_document_that_is_no_json() -> None:
    assert to_json({"rate": [float("inf"), float("-inf"), float("nan")]}) == '{"rate": ["inf", "-inf", "nan"]}'


def test_a_document_is_indented() -> None:
    document = {"id": 1, "args": {"a": [1, {"b": [], "c": {}}], "ü": None}, "tags": ["x"], "none": [], "at": 1.5}
    assert to_json(document, indented=True) == json.dumps(document, indent=2)
    assert to_json([document], indented=True, ascii_only=False) == json.dumps([document], indent=2, ensure_ascii=False)
    assert to_json("text", indented=True) == '"text"'


@pytest.mark.parametrize("depth", [30, 1000, 9000])
@pytest.mark.parametrize("of_user", [False, True])
def test_a_deep_value_is_whole_and_not_blown_up(depth: int, of_user: bool) -> None:
    """Each level was indented: an event of 1 MiB with 1,100 of them was a gigabyte."""
    value: Any = json.loads("[" * depth + "1" + ",1" * depth + "]" * depth) if depth < 2000 else _nested(depth)
    for document in (value, [{"value": value}]):
        written = to_json(document, indented=True, of_user=of_user)
        assert len(written) < 10 * depth + 3000
        if depth < 2000:
            assert json.loads(written) == document


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("name", ["args", "result", "meta", "value", "payload"])
def test_a_long_value_of_a_user_stands_on_one_line(name: str) -> None:
    value = [[[[[1] * 25_000]]]]
    document = [{"id": 1, name: value}]
    written = to_json(document, indented=True)
    assert written == f'[\n  {{\n    "id": 1,\n    "{name}": {json.dumps(value)}\n  }}\n]'
    assert to_json(value, indented=True, of_user=True) == json.dumps(value)


async def test_a_deep_event_is_shown_whole_and_in_few_bytes(command: Command, dsn: str) -> None:
    value = "[" * 800 + "1" + ",1" * 2000 + "]" * 800
    with Window(dsn) as window:
        job_id = window.enqueue("mail")
        window.run("SELECT FROM make_durable(%s)", job_id)
        window.run("SELECT send_event(%s, 'e', %s::text::json)", job_id, value)
    shown = (await command("jobs", "show", str(job_id), "--json")).stdout
    assert len(shown) < 20_000
    assert json.loads(shown)["unreceived_events"][0]["payload"] == json.loads(value)
