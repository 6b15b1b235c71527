"""A run that was killed leaves nothing behind: its processes end when it has gone."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import NoReturn


def die_with_parent() -> None:
    """From now on this process ends within a second of the one that started it."""
    parent = os.getppid()

    def look() -> NoReturn:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(9)

    threading.Thread(target=look, name="orphan", daemon=True).start()
