"""The filters of a search for jobs, as they come from a query string or a form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from ..errors import InvalidArguments
from ..store.filtering import FILTERS
from ..text import parse_moment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..store.filtering import JobFilter


def chosen_of(said: Mapping[str, str]) -> JobFilter:
    """The filter of these texts; other names are left out. Raises `InvalidArguments` for a moment that cannot be read."""
    chosen: dict[str, Any] = {name: said[name] for name in FILTERS if name in said}
    for name in ("since", "until"):
        if name in chosen:
            try:
                chosen[name] = parse_moment(chosen[name])
            except ValueError as error:
                message = str(error)
                raise InvalidArguments(f"{message[:1].upper()}{message[1:]}.") from None
    if "owes_clean_up" in chosen:  # A box that is ticked.
        chosen["owes_clean_up"] = True
    return cast("JobFilter", chosen)
