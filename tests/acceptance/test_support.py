"""The tests' own network and processes do what the tests rely on."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import psycopg
import pytest
import trio
import trio.testing

if TYPE_CHECKING:
    from pulse_trio.testing.faults.processes import Processes
    from pulse_trio.testing.faults.proxy import Proxy


async def connect(dsn: str) -> psycopg.Connection:
    return await trio.to_thread.run_sync(lambda: psycopg.connect(dsn, autocommit=True))


async def ask(connection: psycopg.Connection) -> object:
    cursor = await trio.to_thread.run_sync(lambda: connection.execute("SELECT 42"), abandon_on_cancel=True)
    return cursor.fetchone()


async def test_a_forwarding_proxy_is_the_server(proxy: Proxy) -> None:
    with await connect(proxy.dsn) as connection:
        assert await ask(connection) == (42,)
    await proxy.connected(0)


async def test_a_cut_resets_the_open_connections_and_spares_new_ones(proxy: Proxy) -> None:
    with await connect(proxy.dsn) as old:
        proxy.cut()
        with pytest.raises(psycopg.OperationalError):
            await ask(old)
    with await connect(proxy.dsn) as new:
        assert await ask(new) == (42,)


async def test_a_held_answer_comes_when_the_network_heals(proxy: Proxy) -> None:
    answers: list[object] = []

    async def keep_answer() -> None:
        answers.append(await ask(connection))

    with await connect(proxy.dsn) as connection:
        proxy.to_client.hold()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_answer)
            await proxy.to_client.arrival()
            assert answers == []
            proxy.forward()
    assert answers == [(42,)]


async def test_a_swallowed_question_leaves_the_connection_half_open_for_good(proxy: Proxy) -> None:
    connection = await connect(proxy.dsn)
    proxy.to_server.swallow()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fails, connection)
        await proxy.to_server.arrival()
        await trio.testing.wait_all_tasks_blocked()
        proxy.forward()
        with await connect(proxy.dsn) as new:
            assert await ask(new) == (42,)
        # Nobody told the old connection anything: it is open, and ends only by being cut.
        assert proxy.connections >= 1
        proxy.cut()
    connection.close()


async def fails(connection: psycopg.Connection) -> None:
    with pytest.raises(psycopg.OperationalError):
        await ask(connection)


async def test_a_refusing_proxy_resets_newcomers(proxy: Proxy) -> None:
    proxy.refuse()
    with pytest.raises(psycopg.OperationalError):
        await connect(proxy.dsn)


async def test_a_delay_is_added_to_each_direction(proxy: Proxy) -> None:
    with await connect(proxy.dsn) as connection:
        proxy.delay(0.1)
        began = trio.current_time()
        assert await ask(connection) == (42,)
        assert trio.current_time() - began >= 0.2


async def test_a_line_is_waited_for_on_either_stream(processes: Processes) -> None:
    script = "import sys; print('one'); print('two', file=sys.stderr); sys.stdin.read(); print('three')"
    running = await processes.python("-c", script)
    assert (await running.line("t(w)o")).group(1) == "w"
    await running.line("one")
    await running.line("three")
    assert await running.ended() == 0
    assert (running.stdout, running.stderr) == ("one\nthree\n", "two\n")


async def test_a_process_that_ends_without_the_line_fails_at_once(processes: Processes) -> None:
    running = await processes.python("-c", "print('only this')")
    with pytest.raises(AssertionError, match="only this"):
        await running.line("something else")


async def test_a_signal_reaches_the_process(processes: Processes) -> None:
    running = await processes.python("-c", "import signal; print('up'); signal.pause()")
    await running.line("up")
    running.send(signal.SIGTERM)
    assert await running.ended() == -signal.SIGTERM
