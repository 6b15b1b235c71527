"""When a handler that only waits gives its slot back, in a worker without a free one. In virtual time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import trio

from pulse_trio.worker.durable.calls import Call
from pulse_trio.worker.durable.suspension import Suspension

if TYPE_CHECKING:
    import pytest
    from trio.testing import MockClock

    from pulse_trio.worker.durable.durable import Durable


async def test_a_parent_whose_children_end_one_after_the_other_keeps_its_slot(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    suspended: list[float] = []
    monkeypatch.setattr(Suspension, "_suspend_if_all_wait", lambda _: suspended.append(trio.current_time()))
    call = Call("block", "1:block")
    durable: Any = SimpleNamespace(
        running=SimpleNamespace(scope_nursery=None),
        parts=SimpleNamespace(jobs=SimpleNamespace(full=True, take_back=lambda _: None)),
        standing={trio.lowlevel.current_task(): call},
        scopes=[],
    )

    async def children() -> None:
        for _ in range(40):
            await trio.sleep(0.05)
            call.moved = True

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(children)
        await Suspension(cast("Durable", durable), 3600).wait(call, trio.Event(), began + 4)
    # The last child ends after 2 s.
    assert 2.1 <= suspended[0] - began < 2.5
