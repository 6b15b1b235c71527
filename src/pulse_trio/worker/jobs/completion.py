"""The outcome of a job whose handler returned a value, or whose transaction completes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...codec import coded_result
from ...handlers import encode_result
from ...jobs import Outcome

if TYPE_CHECKING:
    from ...codec import Codec
    from ...jobs import Claim


def completed(claim: Claim, value: Any) -> Outcome:
    """The outcome of a handler that returned. Raises `UnfitValue` if JSON cannot carry the value."""
    if value is None:
        return Outcome(claim, "completed")
    return Outcome(claim, "completed", result=encode_result(claim.kind, value))


def completed_in_transaction(codec: Codec | None, claim: Claim, value: Any) -> Outcome:
    """The outcome of a job that its transaction completes. The caller has encoded the handler's own value."""
    return completed(claim, value if codec is None else coded_result(codec, claim.kind, claim.id, value))
