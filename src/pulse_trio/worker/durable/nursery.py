"""`job.durable_nursery()`: a block whose children are jobs, on any machine, with the rules of a Trio nursery.

The block ends when its children have. The failure of one cancels the others and the body, and an exception of the body cancels
all of them; what is raised is always a group. A crash of the worker, a lost lease, a shutdown and a suspension leave the
children alone, and the next attempt adopts them by their keys. How it does this is in opened.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar, cast

import trio

from ...errors import UsageError
from ...handlers import Handler
from .beginning import is_in_step, refusal

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from .block import Block
    from .children import Child
    from .durable import Durable

P = ParamSpec("P")
R = TypeVar("R")


class DurableNursery:
    """What `async with job.durable_nursery() as nursery` gives."""

    __slots__ = ("_block", "_count", "_ended", "_task")

    def __init__(self, block: Block) -> None:
        self._block = block
        self._task = trio.lowlevel.current_task()
        self._count = 0
        self._ended = False

    def start_soon(self, handler: Handler[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Child[R]:
        """Starts a job as a child. It is written together with others, at once before the handler's next durable call, and
        within some hundredths of a second otherwise.

        On a later attempt a child that is completed is a result; one that lives is waited for.

        Raises:
            InvalidArguments: the arguments do not fit the handler's signature.
            UsageError: the block has ended, the `child_key` is used twice, a second task of the handler gave none, there is a
                `unique_key`, or it is called inside of a step.
            ReplayMismatch: an earlier attempt has started something else under the same key.
        """
        if not isinstance(cast("object", handler), Handler):
            raise UsageError(
                f"start_soon takes a handler (a function decorated with @handlers.job), got {handler!r:.200}."
            )
        if self._ended:
            raise UsageError("The block of this durable nursery has ended: it starts no more children.")
        if (where := _outside_of_the_handler(self._block.durable)) is not None:
            raise UsageError(
                f"start_soon({handler.kind}) {where}: start it in the handler itself. A later attempt gets a step's result "
                "without calling its function, and would not start this child."
            )
        key = handler.defaults.child_key
        mine = trio.lowlevel.current_task() is self._task
        if mine:
            # Children with a key count too, so that giving one a key renames no other.
            self._count += 1
        if key is None:
            if not mine:
                raise UsageError(
                    f"start_soon({handler.kind}) in a second task of the handler needs a child_key: which task comes "
                    "first may differ from attempt to attempt."
                )
            key = f"#{self._count}"
        return self._block.add(handler, key, args, kwargs)

    def flush(self) -> Coroutine[Any, Any, None]:
        """Returns when all children that were started are written, and so have an `id`. Raises what `start_soon` does."""
        # No `async def`, as in `Job`: a call that is not awaited fails the attempt.
        return self._block.durable.keys.called("nursery.flush", self._flush)

    async def _flush(self) -> None:
        await trio.lowlevel.checkpoint()
        if (refused := refusal(self._block.durable, "nursery.flush")) is not None:
            raise refused
        if self._block.durable.history.replay.over:
            await self._block.flush()
            # Where a child has failed, the body is cut short here, as it is in later attempts: above.
            await trio.lowlevel.checkpoint_if_cancelled()
        else:
            await self._block.learn()

    @property
    def cancel_scope(self) -> NoReturn:
        """There is none: no later attempt would remember it. Raises `AttributeError`, which names what is remembered."""
        raise AttributeError(
            "A durable nursery has no cancel_scope. Put the block into `with job.move_on_after(seconds) as scope:` and call "
            "scope.cancel(), which later attempts remember."
        )

    def end(self) -> None:
        """The block is over."""
        self._ended = True


def _outside_of_the_handler(durable: Durable) -> str | None:
    """Where the caller runs, if that is a thread, another run of Trio, or the function of a step (in its task, or in one
    that it has started)."""
    if (where := durable.running.run.where_else()) is not None:
        return where
    return "inside of a step" if is_in_step(durable) else None
