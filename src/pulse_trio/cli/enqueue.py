"""`pulse-trio enqueue`: one job from the shell."""

from __future__ import annotations

import json
import sys
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, NoReturn, cast

import click

from ..client import request_by_name
from ..codec import in_schema
from ..errors import InvalidArguments
from ..handlers.payloads import twin_in
from ..store import new_jobs
from ..store.audit import by_hand
from ..text import shown
from .database import open_store
from .loading import load_handlers
from .options import WholeNumber, actor_option, dsn_option, json_option, schema_option
from .output import notice, print_json

if TYPE_CHECKING:
    from ..codec import Codec
    from ..jobs import JobRequest

NEARBY = 20
"""Characters shown on each side of a mistake."""


def _metadata(_: click.Context, __: click.Parameter, text: str | None) -> dict[str, Any] | None:
    return None if text is None else parse_arguments(text, "metadata")


@click.command()
@click.argument("kind")
@click.argument("arguments", metavar="[JSON]", default="{}")
@click.option("--queue", metavar="NAME", help="The queue.  [default: the handler's with --app, else default]")
@click.option("--delay", type=float, metavar="SECONDS", help="Due this many seconds from now.")
@click.option(
    "--priority", type=WholeNumber(-(2**31), 2**31 - 1), metavar="NUMBER", help="Higher runs first.  [default: 0]"
)
@click.option(
    "--max-attempts",
    type=WholeNumber(1, 2**31 - 1),
    metavar="NUMBER",
    help="Dead after this many failures.  [default: 20]",
)
@click.option("--unique-key", metavar="KEY", help="At most one live job of the queue has this key.")
@click.option("--tag", "tags", metavar="TAG", multiple=True, help="A tag; may be repeated.")
@click.option(
    "--meta", callback=_metadata, metavar="JSON", help="Metadata: an object of texts, numbers, booleans and nulls."
)
@click.option("--app", metavar="APP:HANDLERS", help="Check the arguments against this handler, and use its options.")
@actor_option
@schema_option
@dsn_option
@json_option
def enqueue(
    kind: str, arguments: str, app: str | None, schema: str | None, dsn: str | None, as_json: bool, **options: Any
) -> None:
    """Enqueue one job and print its id.

    KIND is the name its handler is registered under. JSON is an object with the arguments by name, as in
    '{"user_id": 42}'; - reads it from the standard input.
    """
    text = sys.stdin.read() if arguments == "-" else arguments
    request, codec = _request(
        kind, parse_arguments(text), app, {k: v for k, v in options.items() if v is not None and v != ()}
    )
    with open_store(dsn, schema) as client:
        done = client.run_together(
            by_hand(new_jobs.enqueue(request, in_schema(codec, client.schema)), f"{request.queue} {request.kind}")
        )
    if as_json:
        print_json({"id": done.id, "added": done.added})
        return
    if not done.added:
        notice("nothing was added: this live job has the same unique key")
    click.echo(done.id)


def _request(
    kind: str, arguments: dict[str, Any], app: str | None, options: dict[str, Any]
) -> tuple[JobRequest, Codec | None]:
    if app is None:
        return request_by_name(kind, arguments, **options), None
    handlers = load_handlers(app)
    return handlers[kind].options(**options).request_by_name(arguments), handlers.codec


def parse_arguments(text: str, what: str = "arguments") -> dict[str, Any]:
    """A JSON object. Raises `InvalidArguments`, saying where the mistake is."""
    value = parse_json(text, f"The {what} are")
    if not isinstance(value, dict):
        raise InvalidArguments(f"The {what} must be a JSON object, as in '{{\"user_id\": 42}}', not {_kind(value)}.")
    return cast("dict[str, Any]", value)


def parse_json(text: str, what_is: str) -> Any:
    """A JSON value; `what_is` is the beginning of a message ("The payload is"). Raises `InvalidArguments`, saying where the
    mistake is, also for what Python would change: twins among the keys, and digits that a float does not keep."""
    try:
        return json.loads(
            text,
            parse_constant=lambda name: _refuse_constant(name, what_is),
            parse_float=lambda number: _as_float(number, what_is),
            object_pairs_hook=lambda pairs: _as_object(pairs, what_is),
        )
    except json.JSONDecodeError as error:
        raise InvalidArguments(
            f"{what_is} not valid JSON: {error.msg.lower()} at line {error.lineno}, column {error.colno}, "
            f"here: {_around(text, error.pos)}"
        ) from None
    except ValueError:
        raise InvalidArguments(
            f"{what_is} not read: a whole number in JSON has more digits than Python takes."
        ) from None
    except RecursionError:
        raise InvalidArguments(f"{what_is} nested too deeply.") from None


def _refuse_constant(name: str, what_is: str) -> NoReturn:
    raise InvalidArguments(f"{what_is} not valid JSON, which has no {name}.")


def _as_float(number: str, what_is: str) -> float:
    value = float(number)
    try:
        # 1.10 and 1e2 are the same numbers as what Python writes of them.
        kept = Decimal(number) == Decimal(repr(value))
    except InvalidOperation:  # an exponent of twenty digits
        kept = False
    if not kept:
        raise InvalidArguments(f"{what_is} not stored as given: {number:.60} would be {value!r}. Give it as text.")
    return value


def _as_object(pairs: list[tuple[str, Any]], what_is: str) -> dict[str, Any]:
    if (twice := twin_in(pairs)) is not None:
        raise InvalidArguments(f"{what_is} ambiguous: an object has two keys {twice!r:.60}, and one would be lost.")
    return dict(pairs)


def _around(text: str, position: int) -> str:
    before, after = text[max(0, position - NEARBY) : position], text[position : position + NEARBY]
    return shown(f"{before} >>>{after}").replace("\n", " ")


def _kind(value: object) -> str:
    match value:
        case str():
            return "a string"
        case list():
            return "an array"
        case bool():
            return "a boolean"
        case None:
            return "null"
        case _:
            return "a number"
