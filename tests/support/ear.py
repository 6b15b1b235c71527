"""What a test hears from handlers, wherever they run."""

from __future__ import annotations

import json
import select
from typing import TYPE_CHECKING, Any

import trio

if TYPE_CHECKING:
    from pathlib import Path

WITHIN = 30.0


class Ear:
    """Hears what the handlers tell, from wherever they run."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._socket = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_DGRAM)

    async def open(self) -> None:
        await self._socket.bind(self.path)

    async def hear(self, word: str) -> dict[str, Any]:
        with trio.fail_after(WITHIN):
            heard = json.loads(await self._socket.recv(4096))
        assert heard["word"] == word
        return heard

    def wait_for_word(self) -> None:
        """Waits for a word and leaves it to `hear`. Nothing else runs meanwhile: no task of the worker's either."""
        assert select.select([self._socket.fileno()], [], [], WITHIN)[0]

    def close(self) -> None:
        self._socket.close()
