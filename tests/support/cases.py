"""Every case of the rules for the end of an attempt."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from pulse_trio.states import OUTCOMES, Case

if TYPE_CHECKING:
    from collections.abc import Iterator

CONDITIONS = Case._fields[1:]


def every_case() -> Iterator[Case]:
    """Each outcome under each combination of conditions."""
    for outcome, *conditions in product(OUTCOMES, *[(False, True)] * len(CONDITIONS)):
        yield Case(str(outcome), *map(bool, conditions))
