"""What an invariant says when it is broken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Violation:
    """One broken promise. `evidence` has the lines it was seen in."""

    invariant: str
    job: int | None
    message: str
    evidence: tuple[Any, ...] = ()

    def __str__(self) -> str:
        lines = "".join(f"\n    {line}" for line in self.evidence)
        return f"{self.invariant}: job {self.job}: {self.message}{lines}"
