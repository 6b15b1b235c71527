"""What a handler gets of a transaction that the worker commits."""

from __future__ import annotations

from typing import Any


class Transaction:
    """What `async with job.transaction() as tx` gives. `tx.connection` is a `TrioConnection` inside the transaction;
    `tx.result` becomes the job's result."""

    __slots__ = ("connection", "result")

    def __init__(self, connection: Any, result: Any) -> None:
        self.connection = connection
        self.result = result

    async def execute(self, query: Any, parameters: Any = None, **options: Any) -> Any:
        """`tx.connection.execute`: runs one statement in the transaction; returns a cursor."""
        return await self.connection.execute(query, parameters, **options)

    def cursor(self, *args: Any, **options: Any) -> Any:
        """`tx.connection.cursor`."""
        return self.connection.cursor(*args, **options)

    def transaction(self, *args: Any, **options: Any) -> Any:
        """`tx.connection.transaction`: a savepoint."""
        return self.connection.transaction(*args, **options)
