"""The examples of durable handlers, crashed with the kit at each of their points, as their reader would do it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pulse_trio.testing import crash_points, run_job

if TYPE_CHECKING:
    from pulse_trio import Handlers
    from pulse_trio.testing import PulseClock

pytestmark = pytest.mark.trio

EXAMPLES = Path(__file__).parents[2] / "examples/durable"


def example(name: str) -> Any:
    """The module of an example, under a name that no other test imports."""
    spec = importlib.util.spec_from_file_location(f"pulse_trio_durable_example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


agent, order, resizes = example("agent"), example("order"), example("resizes")


@pytest.fixture
def pulse_handlers() -> Handlers:
    return order.handlers


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What an order's steps did. The provider knows charges by their keys and refunds by name: a repetition is none."""
    made: list[str] = []
    seen: set[str] = set()

    async def charge_card(order_id: int, key: str) -> str:
        if key not in seen:
            seen.add(key)
            made.append(f"charge-{order_id}")
        return f"charge-{order_id}"

    async def refund(charge: str) -> None:
        if f"refund of {charge}" not in made:
            made.append(f"refund of {charge}")

    monkeypatch.setattr(order, "charge_card", charge_card)
    monkeypatch.setattr(order, "refund", refund)
    return made


async def test_the_agent_gives_its_answer_wherever_it_is_killed(pulse_clock: PulseClock, pulse_dsn: str) -> None:
    points = 0
    async for run in crash_points(agent.answer, "What do 3 boxes of 14 weigh?", dsn=pulse_dsn):
        assert (run.state, run.result) == ("completed", "What do 3 boxes of 14 weigh? 43.5 kg"), run
        points += run.reached
    assert points >= 22  # five steps, each struck before and after its line, by two strikes


async def test_an_order_is_paid_once_wherever_it_is_killed_and_refunded_where_it_is_cancelled(
    made: list[str], pulse_clock: PulseClock, pulse_dsn: str
) -> None:
    ended: set[str] = set()
    async for run in crash_points(
        order.order, 42, 1, cancel=True, dsn=pulse_dsn, handlers=order.handlers, events={"approved": {"by": "Ada"}}
    ):
        ended.add(run.state)
        if run.state == "cancelled":
            assert made in ([], ["charge-42", "refund of charge-42"]), run
        else:
            assert (run.state, run.result, made) == ("completed", "label-42.pdf", ["charge-42"]), run
        made.clear()
    assert ended == {"completed", "cancelled"}


async def test_the_resizes_are_summed_once_wherever_their_parent_is_killed(
    pulse_clock: PulseClock, pulse_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def sleep(_: float) -> None:
        await resizes_sleep(0.01)

    resizes_sleep = resizes.trio.sleep
    # It reports its progress once a second.
    monkeypatch.setattr(resizes, "trio", SimpleNamespace(sleep=sleep))
    for point in ("none", "kill@start", "kill@2", "lost@2", "kill@3", "kill@end"):
        async for run in crash_points(resizes.resize_all, 2, dsn=pulse_dsn, handlers=resizes.handlers, only=point):
            assert (run.state, run.result) == ("completed", 2001), run


async def test_an_order_that_cannot_be_packed_or_is_not_approved_is_refunded_and_dead_at_once(
    made: list[str],
) -> None:
    unpacked = await run_job(
        order.order, 42, 1, handlers=order.handlers, children={order.pack: OSError("no cardboard")}
    )
    assert (unpacked.outcome, made) == ("discarded", ["charge-42", "refund of charge-42"])
    assert "Discard: it could not be packed" in str(unpacked.error)
    made.clear()
    unanswered = await run_job(order.order, 43, 1, handlers=order.handlers)
    assert (unanswered.outcome, made) == ("discarded", ["charge-43", "refund of charge-43"])
    assert "Discard: nobody approved it in three days" in str(unanswered.error)
