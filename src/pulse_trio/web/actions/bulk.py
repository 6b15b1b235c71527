"""Acting on many jobs: first a page that says how many and which, then the act, in steps.

The page before counts the jobs once and gives the browser their ids, signed for this user and session: the act goes to the jobs
that were counted, whichever jobs match by then. Each step is a statement for 500 jobs, under the user's name; a request
does as many steps as fit into its time, and answers with how far it has come and the signed rest. So nothing goes on when the
person has left, and every number shown is true.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

from starlette.responses import JSONResponse

from ...errors import InvalidArguments, UsageError
from ...states import State
from ...store import cancelling, history
from ...store.filtering import FILTERS
from ...store.places import left_to_parents
from ...text import count_of
from ..filters import chosen_of
from ..rendering import page
from ..security import passage_of, within
from ..site import site_of
from .common import SENT_ALREADY, act, back, form_of, is_given, route, text_of, user_of
from .foretold import Foretold, foretell

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from ...store.filtering import JobFilter
    from ..database import Database

MOST = 10_000
"""Jobs of one act."""
PATIENCE = 10.0
"""Seconds that each statement may take which finds them, or what would become of them."""
VALID = 15 * 60
"""Seconds within which a count must be confirmed: it becomes less true with time."""
_STEP, _STEPS = 1.0, 20.0
"""Seconds of work for one request: of a script that shows each step, and of a plain form."""
PAST = {"cancel": "cancelled", "retry": "retried", "delete": "deleted"}
_SAMPLE = 10


@dataclass(frozen=True)
class Plan:
    """What a person is asked to confirm, and how far it has come. `said` are the filters, as they were given; `again` the jobs
    that were retried, and `left` how many were left to those of them that are above them in their trees."""

    verb: str
    ids: list[int]
    said: dict[str, str] = field(default_factory=dict[str, str])
    total: int = 0
    moved: int = 0
    refused: int = 0
    reason: str = ""
    """Why the first one was refused."""
    back: str = "/jobs"
    afresh: bool = False
    left: int = 0
    again: list[int] = field(default_factory=list[int])

    def packed(self) -> list[Any]:
        """As JSON; ids as differences, which compress well."""
        rest = [self.total, self.moved, self.refused, self.reason, self.back, self.afresh, self.left]
        return [self.verb, _steps(self.ids), self.said, _steps(self.again), *rest]

    @classmethod
    def unpacked(cls, found: Any) -> Plan:
        """The reverse."""
        verb, steps, said, again, *rest = found
        return replace(cls(verb, _summed(steps), said, *rest), again=_summed(again))

    @property
    def past(self) -> str:
        """`retried`, and so on."""
        return PAST[self.verb]

    @property
    def done(self) -> int:
        """How many were tried."""
        return self.moved + self.refused + self.left


def _steps(ids: list[int]) -> list[int]:
    return [one - before for before, one in zip([0, *ids], ids, strict=False)]


def _summed(steps: list[int]) -> list[int]:
    return list(accumulate(steps))


@dataclass(frozen=True)
class Preview:
    """The page before: the plan, signed; whether there are more jobs than one act takes; the first of those to which it would
    be done, or of all if it would be done to none; and what it would do."""

    plan: Plan
    signed: str
    more: bool = False
    sample: list[Any] = field(default_factory=list[Any])
    foretold: Foretold = field(default_factory=Foretold)


async def preview(request: Request) -> Response:
    """How many jobs, and which: changes nothing."""
    verb = text_of(request, "verb")
    if verb not in PAST:
        raise InvalidArguments(f"Say what to do with the jobs: {', '.join(PAST)}.")
    said = {name: text for name in FILTERS if (text := text_of(request, name)) is not None}
    where = within(form_of(request).get("back")) or "/jobs"
    database = site_of(request).database
    chosen = _selected(request)
    if chosen:
        ids, said = chosen, {}
    else:
        ids = await _matching(database, said)
    more = len(ids) > MOST
    # The newest, if there are more than one act takes; the oldest of these first.
    ids = sorted(ids[:MOST])
    if not ids:
        return back(request, "/jobs", "No job matches: nothing was changed.")
    plan = Plan(verb, ids, said, total=len(ids), back=where, afresh=is_given(request, "afresh"))
    state = State(said["state"]) if "state" in said else None
    foretold = await database.read(foretell(verb, ids, state, afresh=plan.afresh), patience=PATIENCE)
    sample = await database.read(history.page((foretold.moved or ids)[:_SAMPLE]))
    asked = Preview(plan, passage_of(request).plan(plan.packed()), more, sample, foretold)
    return page(request, "bulk_preview.html", asked, live=False)


def _selected(request: Request) -> list[int]:
    given = [each for each in form_of(request).getlist("ids") if isinstance(each, str)]
    found: set[int] = set()
    for each in given:
        if not each.isdecimal() or len(each) > 19:
            raise InvalidArguments("A job's id is a whole number.")
        found.add(cancelling.check_id(int(each)))
    return sorted(found, reverse=True)


async def _matching(database: Database, said: dict[str, str]) -> list[int]:
    if "state" not in said:
        raise UsageError("Say which state of jobs is meant, such as dead: without one every job would be chosen.")
    # One more than an act takes tells whether there are more.
    found = history.matching(chosen_of(said), limit=MOST + 1, timeout=PATIENCE)
    return await database.read(found, patience=PATIENCE)


async def bulk(request: Request) -> Response:
    """Acts on the jobs that were confirmed, for as long as one request may take."""
    passage = passage_of(request)
    signed = form_of(request).get("plan")
    found = passage.planned(signed, VALID)
    as_json = "application/json" in request.headers.get("accept", "")
    if found is None:
        told = "That list was made too long ago, or in another session. Nothing was changed: look again."
        return _answer(request, back(request, "/jobs", told, failed=True), as_json)
    plan = Plan.unpacked(found)
    if not passage.is_first(signed):
        return _answer(request, back(request, plan.back, SENT_ALREADY, failed=True), as_json)
    until = time.monotonic() + (_STEP if as_json else _STEPS)
    while plan.ids:
        plan = await _step(request, plan)
        if time.monotonic() >= until:
            break
    if not plan.ids:
        return _answer(request, _end(request, plan), as_json)
    signed = passage.plan(plan.packed())
    if as_json:
        return JSONResponse({"plan": signed, "done": plan.done, "total": plan.total, "past": plan.past})
    return page(request, "bulk.html", Preview(plan, signed), live=False)


async def _step(request: Request, plan: Plan) -> Plan:
    ids, rest = plan.ids[: history.BATCH], plan.ids[history.BATCH :]
    chosen = cast("JobFilter", plan.said)
    reasons: dict[int, str] = {}
    again, left = plan.again, 0
    match plan.verb:
        case "retry":
            retried = await act(request, history.retry_batch(ids, chosen=chosen, afresh=plan.afresh, before=again))
            moved, reasons, left = len(retried.retried), retried.refused, len(retried.left_to_parents)
            again = [*again, *retried.retried]
        case "delete":
            deleted = await act(request, history.delete_batch(ids, chosen=chosen))
            moved, reasons = len(deleted.deleted), deleted.refused
        case _:
            by = f"{user_of(request).name} (web)"
            asked = await act(request, cancelling.cancel_many(ids, by=by))
            moved = sum(each.cancellation is not None for each in asked)
            reasons = {
                each.job_id: f"Job {each.job_id} is {each.state} already."
                for each in asked
                if each.cancellation is None
            }
    reason = plan.reason or next(iter(reasons.values()), "")
    return replace(
        plan,
        ids=rest,
        moved=plan.moved + moved,
        refused=plan.refused + len(ids) - moved - left,
        reason=reason[:300],
        left=plan.left + left,
        again=again,
    )


def _end(request: Request, plan: Plan) -> Response:
    told = f"{count_of(plan.moved, 'job')} {plan.past}."
    if plan.verb == "cancel":
        told = f"{count_of(plan.moved, 'job')} cancelled; handlers that run are being cancelled."
    if plan.left:
        told += f" {left_to_parents(plan.left, afresh=plan.afresh)}."
    if plan.refused:
        told += f" {plan.refused:,} not: {plan.reason}" if plan.reason else f" {plan.refused:,} were gone."
    return back(request, plan.back, told, failed=bool(plan.refused and not plan.moved))


def _answer(request: Request, answer: Response, as_json: bool) -> Response:
    if not as_json:
        return answer
    return JSONResponse({"location": answer.headers["location"]})


ROUTES = [route("/jobs/preview", preview, "/jobs"), route("/jobs/bulk", bulk, "/jobs")]
