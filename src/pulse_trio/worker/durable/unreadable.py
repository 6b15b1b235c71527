"""What other programs have encoded, and this one cannot decode: a line of the history, an event, a child's result. A deploy may
bring the key. Until then the handler must not act on it: what it undoes because of that is at odds with a history that goes on.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from ...describing import headline_of
from .interrupted import Interrupted

if TYPE_CHECKING:
    from collections.abc import Generator

    from .durable import Durable


class Unreadable(Interrupted):
    """What durable calls raise after that. The attempt ends with the codec's `error`, and the next one replays again."""

    def __init__(self, error: Exception) -> None:
        Exception.__init__(
            self,
            f"the handler was given what its codec cannot decode ({headline_of(error)}), and what it calls then is refused. "
            "The next attempt replays again",
        )
        self.error = error


@contextmanager
def decoding(durable: Durable) -> Generator[None]:
    """The block decodes. What the codec raises ends the attempt, whatever the handler does with it."""
    try:
        yield
    except Exception as error:  # a codec is the user's, and may raise any
        durable.fail(Unreadable(error))
        raise
