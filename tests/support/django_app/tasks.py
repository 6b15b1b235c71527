"""Tasks for tests/django."""

# Django has no types.
# pyright: reportUnknownMemberType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

from django.db import connection

from pulse_trio import RetryAfter, Snooze, current_job
from support.django_project import task


@task
def add(first: int, second: int = 0) -> int:
    return first + second


@task
def anything(*args: Any, **kwargs: Any) -> list[Any]:
    return [list(args), kwargs]


@task(takes_context=True)
async def tells(context: Any) -> dict[str, Any]:
    return {"id": context.task_result.id, "attempt": context.attempt, "status": context.task_result.status}


@task(takes_context=True)
def fails_once(context: Any) -> list[Any]:
    if context.attempt == 1:
        raise RetryAfter(0)
    return [context.attempt, len(context.task_result.errors), len(context.task_result.worker_ids)]


@task
def fails(why: str) -> None:
    raise LookupError(why)


@task
async def fails_on_asyncio() -> None:
    raise ExceptionOfTheAppError("as it must")


class ExceptionOfTheAppError(Exception):
    pass


@task
def exits() -> None:
    raise SystemExit("and no further")


@task
def returns_what_json_does_not_have() -> object:
    return object()


@task
def snoozes_once() -> int:
    if current_job().attempt == 1:
        raise Snooze(0)
    return current_job().attempt


@task
def finds_a_connection() -> bool:
    found = connection.connection is not None
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    return found
