"""The handlers of the examples, tested with the kit, as their reader would test them."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pulse_trio.testing import crash_points, run_job

if TYPE_CHECKING:
    from pulse_trio import Handlers
    from pulse_trio.testing import PulseWorker

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> Any:
    """The module of an example, under a name that no other test imports."""
    spec = importlib.util.spec_from_file_location(f"pulse_trio_example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


app, demo = example("app"), example("demo")


@pytest.fixture(autouse=True)
def mail_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "random", SimpleNamespace(random=lambda: 0.9))


@pytest.fixture
def mail_fails(mail_works: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "random", SimpleNamespace(random=lambda: 0.1))


# One attempt


async def test_a_welcome_is_sent(autojump_clock: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = await run_job(app.send_welcome, 42, template="vip")
    assert (run.state, run.result) == ("completed", "sent vip to user 42")
    assert "welcome, user 42! (vip; job " in capsys.readouterr().out


@pytest.mark.usefixtures("mail_fails")
@pytest.mark.parametrize(("attempt", "dies"), [(1, False), (4, False), (5, True)])
async def test_a_welcome_that_fails_is_tried_five_times(attempt: int, dies: bool, autojump_clock: Any) -> None:
    run = await run_job(app.send_welcome, 42, attempt=attempt)
    assert (run.outcome, run.state == "dead") == ("failed", dies)
    assert isinstance(run.exception, ConnectionError)


async def test_thumbnails_are_made_side_by_side(autojump_clock: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = await run_job(app.thumbnail, "cat.jpg", [256, 64])
    assert (run.state, run.result) == ("completed", 2)
    assert capsys.readouterr().out.splitlines() == ["cat.jpg at 64 pixels", "cat.jpg at 256 pixels"]


async def test_a_cancellation_reaches_the_thumbnails_that_are_being_made(
    autojump_clock: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = await run_job(app.thumbnail, "cat.jpg", [64, 5000], cancel_after=1)
    assert (run.outcome, run.state) == ("cancelled", "cancelled")
    assert capsys.readouterr().out.splitlines() == ["cat.jpg at 64 pixels"]


async def test_no_sizes_are_not_tried_again() -> None:
    run = await run_job(app.thumbnail, "cat.jpg", [])
    assert (run.outcome, run.state) == ("discarded", "dead")


async def test_a_checksum_is_that_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"pulse")
    assert (await run_job(app.checksum, str(file))).result == hashlib.sha256(b"pulse").hexdigest()
    file.unlink()
    run = await run_job(app.checksum, str(file))
    assert (run.outcome, type(run.exception)) == ("failed", FileNotFoundError)


async def test_the_demo_measures_a_file_whose_name_is_no_text(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/\xff"
    (tmp_path / os.fsdecode(b"\xff")).write_bytes(b"one two\nthree\n")
    run = await run_job(demo.measure, name.decode(errors="replace"), raw=name)
    assert run.result | {"compressed": 0} == {
        "bytes": 14,
        "lines": 2,
        "words": 3,
        "compressed": 0,
        "sha256": hashlib.sha256(b"one two\nthree\n").hexdigest(),
    }


async def test_the_demo_gives_up_a_file_that_is_gone(tmp_path: Path) -> None:
    run = await run_job(demo.measure, str(tmp_path / "gone"))
    assert (run.outcome, run.state) == ("discarded", "dead")
    assert "No such file or directory" in str(run.error)


async def test_the_demo_announces_at_the_second_attempt(autojump_clock: Any) -> None:
    assert (await run_job(demo.announce, "Ada")).outcome == "failed"
    assert (await run_job(demo.announce, "Ada", attempt=2)).result == "Ada knows"


async def test_the_demos_doomed_job_dies_at_its_third_attempt() -> None:
    # A retry that is due within moments is "available" already, so the state of the others is a matter of the jitter.
    assert [(await run_job(demo.doomed, attempt=n)).state == "dead" for n in (1, 2, 3)] == [False, False, True]


# A crash at each point


@pytest.mark.parametrize(
    ("handler", "args", "result"),
    [
        (app.send_welcome, (42,), "sent default to user 42"),
        (app.thumbnail, ("cat.jpg", [64, 256]), 2),
        (app.checksum, (__file__,), hashlib.sha256(Path(__file__).read_bytes()).hexdigest()),
        (demo.announce, ("Ada",), "Ada knows"),
    ],
    ids=["send_welcome", "thumbnail", "checksum", "announce"],
)
async def test_a_job_completes_wherever_its_worker_crashes(
    handler: Any, args: tuple[Any, ...], result: Any, autojump_clock: Any
) -> None:
    points: list[str] = []
    async for run in crash_points(handler, *args):
        assert run.reached, str(run)
        assert (run.state, run.result) == ("completed", result), str(run)
        points.append(run.point)
    assert {"none", "kill@start", "kill@1", "lost@1", "kill@end"} <= set(points)


# With a real worker, on PostgreSQL


@pytest.fixture
def pulse_handlers(request: pytest.FixtureRequest) -> Handlers:
    return request.param.handlers


@pytest.mark.parametrize("pulse_handlers", [app], ids=["app"], indirect=True)
async def test_the_app_does_its_work(pulse_client: Any, pulse_worker: PulseWorker) -> None:
    jobs = [
        await pulse_client.enqueue(app.send_welcome, 42),
        await pulse_client.enqueue(app.thumbnail, "cat.jpg", [64, 256]),
        await pulse_client.enqueue(app.checksum, __file__),
        await pulse_client.enqueue(app.thumbnail, "cat.jpg", []),
    ]
    assert (await pulse_worker.drain()).ended == {"completed": 3, "discarded": 1}
    assert [(await pulse_client.job(job.id)).state for job in jobs] == ["completed"] * 3 + ["dead"]


@pytest.mark.usefixtures("mail_fails")
@pytest.mark.parametrize("pulse_handlers", [app], ids=["app"], indirect=True)
async def test_a_welcome_that_always_fails_is_dead_in_the_end(
    pulse_client: Any, pulse_clock: Any, pulse_worker: PulseWorker
) -> None:
    job = await pulse_client.enqueue(app.send_welcome, 42)
    assert (await pulse_worker.drain()).ended == {"failed": 5}
    assert (await pulse_client.job(job.id)).state == "dead"


@pytest.mark.parametrize("pulse_handlers", [demo], ids=["demo"], indirect=True)
async def test_the_demo_measures_every_file_of_a_folder(
    pulse_client: Any, pulse_clock: Any, pulse_worker: PulseWorker, tmp_path: Path
) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("one two\n" * number)
    tree = demo.Tree(tmp_path)
    assert await demo.enqueue(pulse_client, tree, "demo") == 3 + 1 + demo.FLAKY
    report = await pulse_worker.drain(queues=("demo",))
    # Each announcement fails once, the doomed job three times.
    assert report.ended == {"completed": 3 + demo.FLAKY, "failed": demo.FLAKY + 3}
    assert await demo.finished(pulse_client, "demo") == 3 + 1 + demo.FLAKY
