"""From which of the numbered worlds that an explorer has seen a goal can be reached."""

from __future__ import annotations


def first_stuck(goals: list[int], before: list[list[int]]) -> int | None:
    """The first world from which none of the `goals` can be reached; None if there is none. `before[n]`: the worlds from which
    one step leads to world `n`."""
    hopeful = set(goals)
    todo = list(goals)
    while todo:
        for number in before[todo.pop()]:
            if number not in hopeful:
                hopeful.add(number)
                todo.append(number)
    return next((number for number in range(len(before)) if number not in hopeful), None)
