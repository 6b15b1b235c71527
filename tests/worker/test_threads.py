"""The threads of plain handlers: no function and no result waits for another function to end."""

from __future__ import annotations

import gc
import threading
import weakref
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import sniffio
import trio

from pulse_trio.worker.jobs.kinds.threads import Threads

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.real_clock  # There are real threads here.
WITHIN = 30.0


async def test_functions_that_wait_for_each_other_all_begin() -> None:
    threads, all_there = Threads(60), threading.Barrier(60)
    with trio.fail_after(WITHIN):
        async with trio.open_nursery() as nursery:
            for _ in range(60):
                nursery.start_soon(threads.run, all_there.wait, WITHIN)


async def test_no_more_functions_run_at_once_than_there_are_threads() -> None:
    threads, lock, three = Threads(3), threading.Lock(), threading.Event()
    now, most, ran = 0, 0, 0

    def count() -> None:
        nonlocal now, most, ran
        with lock:
            now += 1
            most = max(most, now)
        if now == 3:
            three.set()
        three.wait(WITHIN)  # one thread alone may be quick enough for them all
        trio.from_thread.run(trio.lowlevel.checkpoint)
        with lock:
            now -= 1
            ran += 1

    with trio.fail_after(WITHIN):
        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(threads.run, count)
    assert (ran, most) == (100, 3)


@pytest.mark.parametrize("slots", [1, 2, 10])
async def test_a_result_waits_for_no_other_function(slots: int) -> None:
    """Also where the thread that has it goes on with the next function, and is the only one."""
    threads, let_go = Threads(slots), threading.Event()
    results: list[int] = []

    async def note(function: Callable[[int], int], number: int) -> None:
        results.append(await threads.run(function, number))
        if len(results) == 20:
            let_go.set()

    def long(number: int) -> int:
        assert let_go.wait(WITHIN)
        return number

    with trio.fail_after(WITHIN):
        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(note, int, number)
            await trio.lowlevel.checkpoint()
            nursery.start_soon(note, long, 20)
    assert sorted(results) == list(range(21))
    assert results[-1] == 20


async def test_short_functions_go_on_beside_a_long_one() -> None:
    threads, let_go = Threads(2), threading.Event()
    with trio.fail_after(WITHIN):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(threads.run, let_go.wait, WITHIN)
            for number in range(50):
                assert await threads.run(int, number) == number
            let_go.set()


async def test_one_that_has_no_thread_yet_is_cancelled_and_never_begins() -> None:
    threads, let_go, began = Threads(1), threading.Event(), threading.Event()
    ran: list[str] = []

    def long() -> str:
        began.set()
        assert let_go.wait(WITHIN)
        return "long"

    async with trio.open_nursery() as nursery:
        with trio.fail_after(WITHIN):

            async def first() -> None:
                ran.append(await threads.run(long))

            nursery.start_soon(first)
            await trio.to_thread.run_sync(began.wait, WITHIN)
            with trio.move_on_after(0.01) as scope:
                await threads.run(ran.append, "never")
            assert scope.cancelled_caught
            let_go.set()
    assert ran == ["long"]
    assert await threads.run(str, 1) == "1"


async def test_one_that_has_begun_is_not_cancelled_and_can_ask() -> None:
    threads, began = Threads(1), threading.Event()

    def asks() -> str:
        began.set()
        while True:
            try:
                trio.from_thread.check_cancelled()
            except trio.Cancelled:  # noqa: ASYNC103 -- in a thread: its result says it
                return "was told"  # noqa: ASYNC104 -- the same

    with trio.fail_after(WITHIN), trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def cancel() -> None:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(began.wait, WITHIN)
                scope.cancel()

            nursery.start_soon(cancel)
            assert await threads.run(asks) == "was told"


async def test_what_a_function_runs_in_trio_runs_in_its_own_task() -> None:
    threads = Threads(4)
    variable: ContextVar[int] = ContextVar("variable")

    async def here() -> tuple[Any, int]:
        await trio.lowlevel.checkpoint()
        return trio.lowlevel.current_task(), variable.get()

    def function() -> list[Any]:
        assert sniffio.thread_local.name is None
        with pytest.raises(sniffio.AsyncLibraryNotFoundError):
            sniffio.current_async_library()
        seen = [variable.get(), trio.from_thread.run_sync(trio.lowlevel.current_task), *trio.from_thread.run(here)]
        variable.set(-1)
        return seen

    async def one(number: int) -> None:
        variable.set(number)
        task = trio.lowlevel.current_task()
        assert await threads.run(function) == [number, task, task, number]
        assert variable.get() == number

    with trio.fail_after(WITHIN):
        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(one, number)


async def test_a_thread_that_has_ended_belongs_to_no_task() -> None:
    """Trio's cache hands it to whoever asks next."""
    threads, known = Threads(1), trio.lowlevel.current_trio_token()
    ident = await threads.run(threading.get_ident)
    seen: list[tuple[int, str]] = []

    def look(all_there: threading.Barrier) -> None:
        try:
            trio.from_thread.check_cancelled()
        except RuntimeError as error:
            seen.append((threading.get_ident(), str(error)))
        all_there.wait(WITHIN)

    with trio.fail_after(WITHIN):
        while ident not in dict(seen):
            # More at once than there are threads: asked for one at a time, the cache hands out the last one again and again,
            # which is another where this one was not idle yet.
            many = threading.active_count() + 1
            all_there, ended = threading.Barrier(many), trio.Semaphore(0)
            for _ in range(many):
                trio.lowlevel.start_thread_soon(
                    partial(look, all_there), lambda _, ended=ended: known.run_sync_soon(ended.release)
                )
            for _ in range(many):
                await ended.acquire()
    assert all("wasn't created by Trio" in said for _, said in seen)


async def test_an_exception_arrives_and_leaves_nothing_behind() -> None:
    threads = Threads(1)

    class Kept:
        pass

    def fails(kept: Kept) -> None:
        raise ValueError("no")

    kept = Kept()
    gone = weakref.ref(kept)
    gc.disable()
    try:
        with pytest.raises(ValueError, match="no") as caught:
            await threads.run(fails, kept)
        del kept, caught
        await trio.lowlevel.checkpoint()  # Trio's loop keeps what it last gave to a task.
        assert gone() is None
    finally:
        gc.enable()


async def test_without_room_for_a_thread_the_call_fails_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads(2)

    def no_room(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(trio.lowlevel, "start_thread_soon", no_room)
        with trio.fail_after(WITHIN), pytest.raises(RuntimeError, match="can't start new thread"):
            await threads.run(int, 1)
    assert await threads.run(int, 1) == 1


async def test_without_room_for_a_second_thread_the_first_runs_all(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, let_go, began = Threads(3), threading.Event(), threading.Event()
    results: list[Any] = []

    def long() -> None:
        began.set()
        assert let_go.wait(WITHIN)

    def no_room(*_: object) -> None:
        let_go.set()
        raise RuntimeError("can't start new thread")

    async def note(number: int) -> None:
        results.append(await threads.run(int, number))

    with trio.fail_after(WITHIN):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(threads.run, long)
            await trio.to_thread.run_sync(began.wait, WITHIN)
            monkeypatch.setattr(trio.lowlevel, "start_thread_soon", no_room)
            for number in range(5):
                nursery.start_soon(note, number)
    assert sorted(results) == list(range(5))
