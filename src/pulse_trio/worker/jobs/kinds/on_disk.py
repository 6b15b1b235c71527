"""Whether the code of a module is still the code that this process has imported: a deploy replaces files under workers that
run, and a process of `runs="process"` imports them afresh."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def has_changed(module: str, since: float) -> bool:
    """Whether the file of a module, or of another one that was imported from its folder or below, was written or removed
    `since` then, in seconds since 1970. Takes some 2 us for each module; asked only after a failure."""
    return any(_is_newer(file, since) for file in _files_beside(module))


def _files_beside(module: str) -> Iterator[str]:
    top = module.partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None)
    if file is None:
        return
    folder = os.path.dirname(file)
    if os.path.basename(file).startswith("__init__."):
        folder = os.path.dirname(folder)
    for one in tuple(sys.modules.values()):
        its = getattr(one, "__file__", None)
        if isinstance(its, str) and its.startswith(folder + os.sep):
            yield its


def _is_newer(file: str, since: float) -> bool:
    try:
        # Not st_mtime, which a copy keeps from its original.
        return os.stat(file).st_ctime > since
    except FileNotFoundError:
        return True
    except OSError:
        return False
