"""Mistakes in durable handlers: the error says whose it is and what to do."""

from __future__ import annotations

import functools
import linecache
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import ConfigurationError, Handlers, Job, StepFailed, SyncClient, UsageError
from pulse_trio.text import spelled

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.trees import Trees

_elsewhere = Handlers()


class Unknown:
    """What JSON cannot carry."""


@_elsewhere.job
async def pack(order: int) -> int:
    return order


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda job: job.step(pack, 1), "job.step takes a function, got the handler 'pack', which is a job of its own"),
        (lambda job: job.step(functools.partial(pack, 1)), "nursery.start_soon"),
        (lambda job: job.transaction_step(pack, 1), "job.transaction_step takes a function, got the handler 'pack'"),
        (lambda job: job.step(job.wait_for_event, "x"), "got job.wait_for_event, which is a durable call itself"),
        (lambda job: job.step("pack"), "job.step takes a function and its arguments, got 'pack'"),
        (lambda job: job.wait_for_event("x", timeout="3d"), r"job.wait_for_event\(timeout=\) takes .* got '3d'"),
        (lambda job: job.sleep(timedelta(days=-1)), "job.sleep takes a number of seconds from 0 on or a timedelta"),
        (lambda job: job.sleep(float("nan")), "job.sleep takes .* got nan"),
        (lambda job: job.sleep(True), "job.sleep takes .* got True"),
        (lambda job: job.sleep(None), "job.sleep takes .* got None"),
        (lambda job: job.move_on_after("1"), "job.move_on_after takes .* got '1'"),
        (lambda job: job.fail_after(b"1"), "job.fail_after takes .* got b'1'"),
        (lambda job: job.durable_nursery(collect="no"), r"job.durable_nursery\(collect=\) is True or False, got 'no'"),
        (lambda job: job.durable_nursery().__enter__(), "needs `async with job.durable_nursery"),
        (
            lambda job: _enter(job.move_on_after(5)),
            r"job.move_on_after\(...\) needs `with job.move_on_after\(...\) as scope:`",
        ),
        (lambda job: _enter(job.fail_after(5)), r"needs `with job.fail_after\(...\) as scope:`, not `async with`"),
    ],
)
async def test_a_durable_call_that_cannot_be_is_a_usage_error_that_names_the_call(
    trees: Trees, call: Callable[[Any], Any], said: str
) -> None:
    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        with pytest.raises(UsageError, match=said):
            await call(job)
        return "refused"

    job_id = trees.enqueue("order")
    await trees.burst()
    assert (trees.job(job_id)["result"], trees.lines(job_id)) == ("refused", [])


@pytest.mark.parametrize("use", ["cancelled_caught", "cancel", "cancel_called"])
async def test_what_is_entered_says_that_it_is_not_the_scope(trees: Trees, use: str) -> None:
    """As in Trio it may be made before its `with`; there it is the scope as well."""

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        block: Any = job.move_on_after(30)
        with block, pytest.raises(AttributeError) as caught:
            getattr(block, use)
        return str(caught.value)

    job_id = trees.enqueue("order")
    await trees.burst()
    said = f"write `with job.move_on_after(...) as scope:` and use scope.{use}."
    assert trees.job(job_id)["result"] == f"job.move_on_after(...) is not the scope yet: {said}"


async def _enter(block: Any) -> None:
    async with block:
        raise AssertionError("it is refused")


async def test_a_flush_that_is_not_awaited_fails_the_attempt_and_names_its_line(trees: Trees) -> None:
    @trees.handlers.job
    async def child() -> None: ...

    @trees.handlers.job(durable=True, max_attempts=1)
    async def order(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(child)
            nursery.flush()  # type: ignore[unused-coroutine]

    job_id = trees.enqueue("order")
    with pytest.warns(RuntimeWarning, match="coroutine 'nursery.flush' was never awaited") as warned:
        await trees.burst()
    found = trees.job(job_id)
    assert found["state"] == "dead"
    assert "nursery.flush was called and not awaited, so it did nothing: write `await nursery.flush(" in found["error"]
    (warning,) = warned
    assert warning.filename == __file__
    assert "nursery.flush()" in linecache.getline(__file__, warning.lineno)


async def test_a_child_is_not_awaited(trees: Trees) -> None:
    @trees.handlers.job
    async def child() -> None: ...

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        async with job.durable_nursery() as nursery:
            started: Any = nursery.start_soon(child)
            with pytest.raises(UsageError) as caught:
                await started
        return str(caught.value)

    job_id = trees.enqueue("order")
    await trees.burst()
    assert trees.job(job_id)["result"].startswith(
        "nursery.start_soon(child) is not awaited, for it does not wait: write"
    )


@pytest.mark.parametrize("key", [None, "patience"])
async def test_an_end_of_patience_says_which_scope_and_how_long_in_every_attempt(trees: Trees, key: str | None) -> None:
    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        try:
            with job.fail_after(timedelta(seconds=0.05), key=key):
                await job.wait_for_event("never")
        except trio.TooSlowError as error:
            said = str(error)
        await job.step(str)
        if job.attempt == 1:
            raise RuntimeError("once more")
        return said

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        while trees.job(job_id)["finished_at"] is None:
            await trees.burst()
            trees.again()
    name = key or "1:scope"
    assert (
        trees.job(job_id)["result"]
        == f"The block of job.fail_after with the key {name!r} was cut short: it had 0.05 s."
    )


async def test_durations_may_be_of_every_kind_of_number(trees: Trees) -> None:
    class Seconds:
        def __float__(self) -> float:
            return 0.0

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        duration: Any = Seconds()
        await job.sleep(duration)
        await job.sleep(timedelta(0))
        with job.move_on_after(60):
            await job.sleep(0)
        return "slept"

    job_id = trees.enqueue("order")
    await trees.burst()
    assert trees.job(job_id)["result"] == "slept"


async def test_a_child_is_not_started_inside_of_a_step(trees: Trees) -> None:
    @trees.handlers.job
    async def child() -> None: ...

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> list[str]:
        said = list[str]()
        async with job.durable_nursery() as nursery:

            async def start() -> None:
                with pytest.raises(UsageError) as caught:
                    nursery.start_soon(child)
                said.append(str(caught.value).partition(":")[0])

            async def start_in_a_task() -> None:
                async with trio.open_nursery() as tasks:
                    tasks.start_soon(start)

            def start_in_a_thread() -> None:
                with pytest.raises(UsageError) as caught:
                    nursery.start_soon(child)
                said.append(str(caught.value).partition(":")[0])

            for step in (start, start_in_a_task, start_in_a_thread):
                await job.step(step)
            async with trio.open_nursery() as tasks:
                tasks.start_soon(lambda: _starts(nursery, child.options(child_key="from a task")))
            unread = nursery.start_soon(child)
            with pytest.raises(UsageError, match="has no result yet: read it after the block of the durable nursery"):
                _ = unread.result
        return said

    job_id = trees.enqueue("order")
    await trees.burst()
    inside, thread = "start_soon(child) inside of a step", "start_soon(child) in a thread"
    assert trees.job(job_id)["result"] == [inside, inside, thread]
    assert trees.window.value("SELECT count(*) FROM jobs WHERE kind = 'child'") == 2


async def test_a_task_beside_a_step_starts_children(trees: Trees) -> None:
    begun, started = trio.Event(), trio.Event()

    async def fetch() -> None:
        begun.set()
        await started.wait()

    @trees.handlers.job
    async def child() -> None: ...

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        async with job.durable_nursery() as nursery, trio.open_nursery() as tasks:

            async def start() -> None:
                await begun.wait()
                nursery.start_soon(child.options(child_key="beside"))
                started.set()

            tasks.start_soon(start)
            await job.step(fetch)

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        await trees.burst()
    assert trees.job(job_id)["state"] == "completed"


async def _starts(nursery: Any, handler: Any) -> None:
    nursery.start_soon(handler)


async def test_a_step_that_returns_what_its_annotation_does_not_say_keeps_its_result_for_code_that_fits(
    trees: Trees,
) -> None:
    calls: list[int] = []

    async def charge() -> int:
        calls.append(1)
        result: Any = "seven"
        return result

    async def mended() -> str:
        raise AssertionError("its result is remembered")

    mended.__name__ = "charge"
    code: list[Callable[..., Any]] = [charge]

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        return f"{await job.step(code[0])}"

    job_id = trees.enqueue("order")
    await trees.burst()
    found = trees.job(job_id)
    assert (found["state"], found["attempt"]) == ("dead", 1)
    assert f"UnfitValue: job {job_id}, line 1: step charge returned what does not fit" in found["error"]
    assert f"then pulse-trio jobs retry {job_id};" in found["error"]
    code[0] = mended
    SyncClient(trees.dsn).retry(job_id)
    await trees.burst()
    assert (trees.job(job_id)["result"], calls) == ("seven", [1])


async def test_a_step_whose_result_json_cannot_carry_says_that_it_has_run_and_has_no_line(trees: Trees) -> None:
    calls: list[int] = []

    async def charge() -> object:
        calls.append(1)
        return object() if len(calls) == 1 else "charged"

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> object:
        return await job.step(charge)

    job_id = trees.enqueue("order")
    await trees.burst()
    found = trees.job(job_id)
    assert (found["state"], found["attempt"], trees.lines(job_id)) == ("dead", 1, [])
    assert "The step has run: its effects stay, and no line was written" in found["error"]
    assert f"pulse-trio jobs retry {job_id} calls it again" in found["error"]
    SyncClient(trees.dsn).retry(job_id)
    await trees.burst()
    assert (trees.job(job_id)["result"], calls) == ("charged", [1, 1])


async def test_a_step_whose_annotation_json_cannot_carry_is_refused_before_it_has_an_effect(trees: Trees) -> None:
    calls: list[int] = []

    async def charge() -> Unknown:
        calls.append(1)
        return Unknown()

    charge.__annotations__["return"] = Unknown

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        await job.step(charge)

    job_id = trees.enqueue("order")
    await trees.burst()
    found = trees.job(job_id)
    assert (found["state"], calls) == ("retryable", [])
    assert "ConfigurationError: Step 'charge' returns" in found["error"]


@pytest.mark.parametrize("runs", ["trio", "asyncio", "thread"])
async def test_a_durable_call_in_a_handler_that_is_not_durable_ends_the_job_at_once_wherever_it_runs(
    trees: Trees, runs: Any
) -> None:
    if runs == "thread":

        @trees.handlers.job(name="plain")
        def in_thread(job: Job) -> None:
            _ = job.sleep(1)

    else:

        @trees.handlers.job(name="plain", runs=runs)
        async def plain(job: Job) -> None:
            await job.sleep(1)

    job_id = trees.enqueue("plain")
    await trees.burst()
    found = trees.job(job_id)
    assert (found["state"], found["attempt"]) == ("dead", 1)
    assert found["error"].startswith("NotDurable: 'plain' is not durable")
    assert f"pulse-trio jobs retry {job_id}" in found["error"]
    assert ("this one has runs=" in found["error"]) == (runs != "trio")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"version": 2}, "version is for handlers with durable=True"),
        ({"version": 2, "suspend_after": 1}, "suspend_after and version are for handlers with durable=True"),
        ({"durable": True, "version": 2**31}, "version must be a whole number from 1 to 2147483647, got 2147483648"),
    ],
)
def test_a_declaration_that_cannot_be_says_which_of_its_options(options: dict[str, Any], said: str) -> None:
    async def order(job: Job) -> None: ...

    with pytest.raises(ConfigurationError, match=said):
        Handlers().job(**options)(order)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(259200, "3 days"), (3600, "1 hour"), (120, "2 minutes"), (0.05, "0.05 s"), (90, "1 min 30 s")],
)
def test_a_timeout_is_told_as_people_say_it(seconds: float, said: str) -> None:
    assert spelled(seconds) == said


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (
            lambda scope: setattr(scope, "shield", True),
            "do not shield: what must be done after a cancellation goes into",
        ),
        (lambda scope: scope.shield, "do not shield"),
        (lambda scope: setattr(scope, "deadline", 5), "is remembered, and cannot be moved: open another one in it"),
        (lambda scope: scope.deadline, "is remembered, and cannot be moved"),
    ],
)
async def test_what_a_scope_of_trio_has_and_a_remembered_one_has_not_says_what_to_do(
    trees: Trees, use: Callable[[Any], Any], said: str
) -> None:
    errors: list[str] = []

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        with job.move_on_after(5) as scope, pytest.raises(UsageError) as caught:
            use(scope)
        errors.append(str(caught.value))
        with job.fail_after(5) as scope, pytest.raises(AttributeError):
            setattr(scope, "deadlin", 7)  # noqa: B010 -- pyright knows that there is none

    trees.enqueue("order")
    await trees.burst()
    assert said in errors[0]


async def test_a_step_is_an_async_function_however_it_is_made_and_no_plain_one_that_returns_a_coroutine(
    trees: Trees,
) -> None:
    class Fetch:
        async def __call__(self, page: int) -> int:
            return page

        async def again(self, page: int) -> int:
            return page + 1

    async def fetch(page: int) -> int:
        return page

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> list[Any]:
        found: list[Any] = [
            await job.step(Fetch(), 1),
            await job.step(Fetch().again, 1),
            await job.step(functools.partial(fetch, 3)),
        ]
        with pytest.raises(StepFailed) as caught:
            await job.step(lambda: fetch(4))
        return [*found, str(caught.value)]

    job_id = trees.enqueue("order")
    await trees.burst()
    *found, said = trees.job(job_id)["result"]
    assert found == [1, 2, 3]
    assert "got <lambda>, which is no async function and returns a coroutine: write `job.step(fetch, page)`" in said


@pytest.mark.parametrize("fails", [False, True])
async def test_a_remembered_scope_is_entered_once_as_trios_is(fails: bool, trees: Trees) -> None:
    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> list[str]:
        refused: list[str] = []
        patience = (job.fail_after if fails else job.move_on_after)(3600)
        with patience:
            await job.sleep(0.01)
            with pytest.raises(UsageError) as within, patience:
                raise AssertionError
            refused.append(str(within.value))
        with pytest.raises(UsageError) as after, patience:
            raise AssertionError
        return [*refused, str(after.value)]

    job_id = trees.enqueue("order")
    await trees.burst()
    trees.again()
    await trees.burst()
    call = "job.fail_after(...)" if fails else "job.move_on_after(...)"
    said = f"This {call} was entered before: call {call} anew for each `with`."
    assert trees.job(job_id)["result"] == [said, said]


async def test_a_step_that_fails_in_a_nursery_of_its_own_says_of_what(trees: Trees) -> None:
    told: list[str] = []

    async def broken(what: str) -> None:
        raise ValueError(f"no {what}\nat all")

    async def fetch() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(broken, "paper")
            nursery.start_soon(broken, "ink")

    async def long() -> None:
        raise ExceptionGroup("x" * 3900, [ValueError("y" * 1000)])

    @trees.handlers.job(durable=True, max_attempts=2, suspend_after=0)
    async def order(job: Job) -> None:
        for step in (fetch, long):
            try:
                await job.step(step)
            except StepFailed as error:
                told.append(str(error))
                await job.sleep(0.01)
        await job.step(fetch)

    job_id = trees.enqueue("order")
    while trees.job(job_id)["state"] != "dead":
        trees.again()
        await trees.burst(log=False)
    # Where the machine is busy the sleep is over before the attempt suspends, and the same attempt goes on to `long`.
    first, again = [said for said in told if said.startswith("Step fetch failed")][:2]
    assert first == again
    assert first.startswith("Step fetch failed: ExceptionGroup: Exceptions from Trio nursery (2 sub-exceptions): ")
    assert {"ValueError: no paper at all", "ValueError: no ink at all"} == set(first.rpartition("): ")[2].split("; "))
    assert max(len(said) for said in told) == 4000
    error = trees.job(job_id)["error"].partition("\n")[0]
    assert error.startswith(
        "StepFailed: Step fetch failed: ExceptionGroup: Exceptions from Trio nursery (2 sub-exceptions): "
    )
    assert "ValueError: no paper at all" in error


async def test_a_durable_nursery_that_is_open_is_not_entered_again(trees: Trees) -> None:
    """Trio said that its stack of cancel scopes was corrupted. One that has ended may be."""

    @trees.handlers.job
    async def pack(number: int) -> int:
        return number

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> list[int]:
        opened, packed = job.durable_nursery(), []
        for number in range(2):
            async with opened as nursery:
                child = nursery.start_soon(pack, number)
                with pytest.raises(UsageError, match=r"This job.durable_nursery\(\) is open already"):
                    await opened.__aenter__()
            packed.append(child.result)
        return packed

    found = await trees.ended(trees.enqueue("order"))
    assert (found["result"], found["error"]) == ([0, 1], None)
