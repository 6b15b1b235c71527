"""What all actions share: who acts, where the answer leads, and what becomes of a refusal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

from starlette.routing import Route

from ...errors import InvalidArguments, UsageError
from ...store.operations import check_id
from ..addresses import segment
from ..security import passage_of, redirect, within
from ..site import site_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.datastructures import FormData
    from starlette.requests import Request
    from starlette.responses import Response

    from ...store.operations import Operation
    from ..security import User

    Act = Callable[[Request], Awaitable[Response]]

T = TypeVar("T")


def form_of(request: Request) -> FormData:
    """The form, which the guard has read and checked."""
    return cast("FormData", request.state.form)


def text_of(request: Request, name: str) -> str | None:
    """A field without white space around it; None for an empty one."""
    value = form_of(request).get(name)
    return value.strip() or None if isinstance(value, str) else None


def is_given(request: Request, name: str) -> bool:
    """Whether a box is ticked."""
    return text_of(request, name) is not None


def user_of(request: Request) -> User:
    """The user, who may act: the guard has seen to it."""
    return cast("User", request.state.user)


async def act(request: Request, operation: Operation[T]) -> T:
    """Runs an operation under the user's name, in one transaction."""
    return await site_of(request).database.act(operation, user_of(request).name)


def job_id_of(request: Request) -> int:
    """The job that the address names. Raises `InvalidArguments`."""
    return check_id(int(request.path_params["id"]))


def back(request: Request, otherwise: str, told: str, *, failed: bool = False) -> Response:
    """To the page that the form names, or the thing's own, which shows what was done."""
    return redirect(request, within(form_of(request).get("back")) or otherwise, flash=told, failed=failed)


def first_time(request: Request) -> bool:
    """Whether this form is sent for the first time: what adds something must not do it twice for a double click. With another
    text in it, it is another form: the browser's Back, a change and Send again is no double click."""
    return passage_of(request).is_first(sorted(form_of(request).multi_items(), key=str))


SENT_ALREADY = "This form was sent already, and what it asks for was done then."


def route(path: str, action: Act, otherwise: str) -> Route:
    """A route of an action. A refusal is said on the page that the form came from, or `otherwise`."""

    async def answered(request: Request) -> Response:
        try:
            return await action(request)
        except UsageError as error:
            place = otherwise.format(**_quoted(request.path_params))
            return back(request, place, str(error), failed=True)

    return Route(f"/actions{path}", answered, methods=["POST"])


def _quoted(parameters: dict[str, Any]) -> dict[str, str]:
    return {name: segment(value) for name, value in parameters.items()}


def whole_number(text: str | None, what: str) -> int | None:
    """A whole number from a field; None for an empty one. Raises `InvalidArguments`."""
    if text is None:
        return None
    if not text.removeprefix("-").isdecimal() or len(text) > 18:
        raise InvalidArguments(f"{what} is a whole number, not {text!r:.40}.")
    return int(text)
