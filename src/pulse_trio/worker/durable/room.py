"""The room that a history has for lines. A step whose line has no room is not called: no line would say that it was, and each
retry would call it again."""

from __future__ import annotations

from ...lines import BeyondLimit

MOST_LINES = 10_000
SPARE = 1_000
"""Lines beyond that for the clean-up of a job that is cancelled."""
NEARLY_ALL = 8_000
"""Lines at which the operator is warned."""
MOST_SIZE = 64 * 1024 * 1024
"""Bytes of one history."""


class Room:
    """The room in the history of one attempt."""

    __slots__ = ("_job_id", "_kept", "acknowledged", "cleans_up", "next", "size")

    def __init__(self, job_id: int) -> None:
        self._job_id = job_id
        self._kept = 0
        """Lines of calls whose work is under way."""
        self.cleans_up = False
        """Whether the job cleans up after its cancellation."""
        self.acknowledged = 0
        """The number of the last line that this attempt was told is written; 0 if none was."""
        self.next = 1
        """The number of the next line."""
        self.size = 0
        """Bytes of the values so far."""

    def check(self) -> None:
        """Raises `BeyondLimit` if there is no room for one more line."""
        if self.next + self._kept > MOST_LINES + (SPARE if self.cleans_up else 0):
            raise BeyondLimit(f"A history has at most {MOST_LINES:,} lines; put loops into children.")

    def take(self, size: int = 0) -> int:
        """Takes the place of a line of so many bytes. Returns its number. Raises `BeyondLimit`."""
        self.check()
        if self.size + size > MOST_SIZE:
            raise BeyondLimit(
                f"The history of job {self._job_id} would take more than {MOST_SIZE // 1024**2} MiB; keep large values "
                "elsewhere and their names in steps."
            )
        number = self.next
        self.next += 1
        self.size += size
        return number

    @staticmethod
    def is_nearly_full(number: int) -> bool:
        """Whether the line with this number is the one at which the operator is warned."""
        return number == NEARLY_ALL

    def keep(self) -> None:
        """Keeps room for the line of a call whose work begins, until `give_back`. Raises `BeyondLimit`."""
        self.check()
        self._kept += 1

    def give_back(self) -> None:
        """The work has ended, well or not; its line comes next."""
        self._kept -= 1
