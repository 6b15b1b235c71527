"""A producer process of the chaos run: `python -m support.chaos.producer ORDER` (JSON: dsn, who, seed, rate, tasks).

It enqueues singly, in bulk, in transactions that commit and that roll back, with unique keys, with delays, by plain SQL; now
and then it cancels one of its jobs or retries a finished one, as a person would. What it asked and heard goes to its log:
"failed" is said only when the enqueue cannot have happened, "unknown" when it may have.
"""

from __future__ import annotations

import json
import random
import signal
import sys
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import psycopg
import trio

from pulse_trio import open_client
from pulse_trio.errors import InvalidTransition, PulseTrioError, UnknownJob
from pulse_trio.postgres import TrioConnection
from support.chaos import handlers as h
from support.chaos.orphans import die_with_parent
from support.chaos.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pulse_trio import Client, JobRef
    from pulse_trio.jobs import JobRequest

WITHIN = 8.0  # seconds for one operation: a lock may be held on the table


class RolledBack(Exception):
    """The producer's own reason to roll back."""


class Producer:
    """One task of the process, with a connection of its own for transactions."""

    def __init__(self, order: dict[str, Any], number: int, client: Client, recorder: Recorder) -> None:
        self._dsn = order["dsn"]
        self._name = f"{order['who']}.{number}"
        self._random = random.Random(f"{order['seed']} {self._name}")
        self._pause = 1 / order["rate"]
        self._client = client
        self._recorder = recorder
        self._count = 0
        self._known: deque[int] = deque(maxlen=200)
        self._trees: deque[int] = deque(maxlen=10)
        self._sent = 0

    async def run(self) -> None:
        """Until cancelled."""
        ways: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (10, self.single), (2, self.bulk), (3, self.committed), (2, self.rolled_back), (2, self.unique), (2, self.delayed),
            (2, self.by_sql), (1, self.cancel), (1, self.retry), (3, self.tree), (3, self.send),
        ]  # fmt: skip
        weights, methods = [w for w, _ in ways], [m for _, m in ways]
        while True:
            (method,) = self._random.choices(methods, weights)
            try:
                with trio.fail_after(WITHIN):
                    await method()
            except (PulseTrioError, psycopg.Error, OSError, trio.TooSlowError):
                await trio.sleep(0.2)
            await trio.sleep(self._random.expovariate(1 / self._pause))

    def request(self, token: str, **options: Any) -> JobRequest:
        chance = self._random
        seconds = chance.choices([0.0, 0.1, 0.5, 1.5, 8.0], [50, 25, 13, 8, 4])[0] * chance.uniform(0.7, 1.1)
        (handler,) = chance.choices(
            [h.steady, h.failing, h.slow, h.snoozing, h.discarding, h.family, h.booking, h.narrow, h.tenant, h.in_thread,
             h.on_asyncio, h.in_process],
            [60, 12, 6, 6, 4, 12, 20, 10, 10, 8, 8, 4],
        )  # fmt: skip
        more: dict[str, Any] = {}
        if handler is h.failing:
            seconds, more = min(seconds, 1), {"times": chance.choice([1, 2, 9])}
        elif handler is h.slow:
            seconds = 1.0
        elif handler is h.booking:
            more = {"how": chance.choice(["at once", "at once", "lingers", "fails", "goes on"])}
        elif handler is h.tenant:
            more = {"tenant": chance.choice(h.TENANTS)}
        if handler in (h.narrow, h.tenant, h.in_process):
            seconds = min(seconds, 1.5)
        if handler in (h.narrow, h.tenant):
            options.pop("queue", None)  # limits count within their queue
        chosen: Any = handler.options(**options) if options else handler
        return chosen.request(token=token, seconds=round(seconds, 3), **more)

    def token(self) -> str:
        self._count += 1
        return f"{self._name}-{self._count}"

    def options(self) -> dict[str, Any]:
        return {
            "queue": self._random.choice(["default", "default", "mail"]),
            "priority": self._random.choice([0, 0, 5]),
        }

    def heard(self, answer: dict[str, Any], tokens: list[str], refs: list[JobRef[Any]]) -> None:
        self._known.extend(ref.id for ref in refs)
        duplicates = {token: ref.id for token, ref in zip(tokens, refs, strict=True) if not ref.added}
        if duplicates:
            answer["duplicates"] = duplicates

    async def enqueue(self, **options: Any) -> None:
        token = self.token()
        with self._recorder.operation("enqueue", tokens=[token]) as answer:
            refs = await self._client.enqueue_many([self.request(token, **self.options(), **options)])
            self.heard(answer, [token], refs)

    async def single(self) -> None:
        await self.enqueue()

    async def unique(self) -> None:
        await self.enqueue(unique_key=f"key-{self._random.randrange(6)}")

    async def delayed(self) -> None:
        await self.enqueue(delay=self._random.uniform(0.2, 3))

    async def bulk(self) -> None:
        tokens = [self.token() for _ in range(self._random.randrange(5, 25))]
        with self._recorder.operation("enqueue_many", tokens=tokens) as answer:
            refs = await self._client.enqueue_many([self.request(t, **self.options()) for t in tokens])
            self.heard(answer, tokens, refs)

    async def committed(self) -> None:
        token = self.token()
        with self._recorder.operation("transaction", tokens=[token]) as answer:
            async with await TrioConnection.connect(self._dsn) as connection:
                async with connection.transaction():
                    await self._client.using(connection).enqueue_many([self.request(token)])
                    await trio.sleep(self._random.choice([0.0, 0.1, 0.5]))
                answer["committed"] = True

    async def rolled_back(self) -> None:
        token = self.token()
        try:
            with self._recorder.operation("rollback", tokens=[token]) as answer:
                answer["phase"] = "failed"  # whatever happens, nothing here commits
                async with await TrioConnection.connect(self._dsn) as connection, connection.transaction():
                    await self._client.using(connection).enqueue_many([self.request(token)])
                    raise RolledBack
        except RolledBack:
            pass

    async def by_sql(self) -> None:
        token = self.token()
        with self._recorder.operation("sql", tokens=[token]):
            async with await TrioConnection.connect(self._dsn, autocommit=True) as connection:
                await connection.execute(
                    "SELECT pulse.enqueue('steady', %s::text::jsonb, max_attempts => 8)",
                    [json.dumps({"token": token, "seconds": 0.05})],
                )

    async def tree(self) -> None:
        token = self.token()
        with self._recorder.operation("enqueue", tokens=[token]) as answer:
            refs = await self._client.enqueue_many([h.tree.request(token=token, shape=self.shape(2))])
            self.heard(answer, [token], refs)
            self._trees.extend(ref.id for ref in refs)

    def shape(self, levels: int) -> dict[str, Any]:
        """A tree of at most so many levels below its root. See `handlers.grow`."""
        chance = self._random

        def some(probability: float, low: float, high: float) -> float:
            return round(chance.uniform(low, high), 3) if chance.random() < probability else 0

        drawn: dict[str, Any] = {
            "steps": chance.randrange(3), "rows": chance.randrange(2), "pause": some(0.3, 0, 0.3), "ends": some(0.3, 0, 1),
            "fails": chance.choice([0, 0, 0, 1, 2]), "forgiving": chance.random() < 0.3, "body": some(0.3, 0, 1),
            "patience": some(0.2, 0.3, 4), "sleep": some(0.3, 0, 2), "event": some(0.5, 0.5, 3),
            "refund": chance.random() < 0.3, "kind": "branch",
        }  # fmt: skip
        if levels:
            drawn["children"] = [self.shape(levels - 1) for _ in range(chance.choice([0, 1, 2, 4]))]
        else:
            times = chance.choice([0, 0, 0, 1])
            drawn = {
                "kind": chance.choice(["leaf", "leaf", "thread leaf"]),
                "ends": chance.uniform(0, 1),
                "fails": times,
            }
        return {name: value for name, value in drawn.items() if value}

    async def send(self) -> None:
        """An event for a tree, or the same one again."""
        if not self._trees:
            return
        job = self._random.choice(self._trees)
        self._sent += self._random.random() < 0.8
        payload = crc32(f"{self._name} {self._sent}".encode()) % 2**31
        with self._recorder.operation("send", job=job, payload=payload) as answer:
            try:
                await self._client.send_event(job, "go", payload, event_key=f"{payload}")
            except (InvalidTransition, UnknownJob):
                answer["phase"] = "failed"
                raise

    async def cancel(self) -> None:
        if self._known:
            await self._client.cancel(self._random.choice(self._known), reason="chaos")

    async def retry(self) -> None:
        if self._known:
            await self._client.retry(self._random.choice(self._known))


async def main(order: dict[str, Any]) -> None:
    """Produces until SIGTERM."""
    recorder = Recorder(Path(f"producer-{order['who']}.jsonl"), order["who"])
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async with open_client(order["dsn"]) as client, trio.open_nursery() as nursery:
            for number in range(order["tasks"]):
                nursery.start_soon(Producer(order, number, client, recorder).run)
            async for _ in signals:
                nursery.cancel_scope.cancel()


if __name__ == "__main__":
    die_with_parent()
    trio.run(main, json.loads(sys.argv[1]))
