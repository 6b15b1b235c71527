"""The filters of a search for jobs, as they come from a query string or a form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from ..errors import InvalidArguments, UsageError
from ..store.filtering import FILTERS
from ..text import parse_moment

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ..store.filtering import JobFilter


_TICKED = frozenset(("1", "on", "true", "yes"))
"""What a box that is ticked says, and what programs write for it."""


def check_names(given: Sequence[tuple[str, str]], known: Collection[str]) -> None:
    """Raises `UsageError` for a filter that does not exist or is given twice: a program would take it for heeded."""
    names = [name for name, _ in given]
    for name in names:
        if name not in known:
            there = f"The filters are: {', '.join(known)}." if known else "This page has none."
            raise UsageError(f"There is no filter {name[:40]!r}. {there}")
        if names.count(name) > 1:
            raise UsageError(f"The filter {name} is given {names.count(name)} times; each can be given once.")


def chosen_of(said: Mapping[str, str]) -> JobFilter:
    """The filter of these texts; other names are left out. Raises `InvalidArguments` for one that cannot be read."""
    chosen: dict[str, Any] = {name: said[name] for name in FILTERS if name in said}
    for name in ("since", "until"):
        if name in chosen:
            try:
                chosen[name] = parse_moment(chosen[name])
            except ValueError as error:
                message = str(error)
                raise InvalidArguments(f"{message[:1].upper()}{message[1:]}.") from None
    if "owes_clean_up" in chosen:
        if chosen["owes_clean_up"].lower() not in _TICKED:
            raise InvalidArguments(f"owes_clean_up is 1 or left out, not {chosen['owes_clean_up'][:40]!r}.")
        chosen["owes_clean_up"] = True
    return cast("JobFilter", chosen)
