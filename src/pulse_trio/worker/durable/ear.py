"""What a block has been told of its children."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from .calls import Call


class Ear:
    """What a block has been told, and whether the handler reads its children's states."""

    def __init__(self) -> None:
        self.event = trio.Event()
        self.interest = False
        self.living = 0
        """Children whose end is not known."""
        self.call: Call | None = None
        """The call that waits for them."""

    def one_ended(self) -> None:
        self.living -= 1
        if self.call is not None:
            self.call.moved = True
        if not self.living:
            self.told()

    def one_lives(self) -> None:
        self.living += 1

    def asked(self) -> None:
        self.interest = True

    def take_interest(self) -> bool:
        interest, self.interest = self.interest, False
        return interest

    def told(self) -> None:
        self.event.set()
