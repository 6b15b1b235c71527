"""How a worker calls a task: plain functions in a thread, coroutine functions on asyncio, both with Django's connections as in
a request, and Django's signals around them."""

# pyright: basic
# Django has no types.

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from asgiref.sync import ThreadSensitiveContext, iscoroutinefunction, sync_to_async
from django.db import close_old_connections, connections, reset_queries
from django.utils import timezone

from ..jobs import Discard, Job, RetryAfter, Snooze
from .library import TaskContext, TaskError, TaskResult, TaskResultStatus, normalize_json, signals
from .results import task_of_row

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from .backend import PulseBackend


def call_of(backend: PulseBackend, task: Any) -> Callable[..., Any]:
    """The handler's function for a task. Its parameters are what an enqueue writes."""

    def in_thread(job: Job, args: list[Any], kwargs: dict[str, Any], run_after: str | None = None) -> Any:
        with _connections_of_a_request():
            attempt = _Attempt(backend, task, job, args, kwargs, run_after)
            signals.task_started.send_robust(type(backend), task_result=attempt.result)
            try:
                returned = normalize_json(task.func(*attempt.arguments, **kwargs))
            except BaseException as error:
                if attempt.ends_with(error):
                    signals.task_finished.send_robust(type(backend), task_result=attempt.result)
                raise
            attempt.succeed(returned)
            signals.task_finished.send_robust(type(backend), task_result=attempt.result)
            return returned

    async def on_asyncio(job: Job, args: list[Any], kwargs: dict[str, Any], run_after: str | None = None) -> Any:
        # As Django's ASGI handler: a thread of its own for what is synchronous, such as the ORM.
        async with ThreadSensitiveContext():
            try:
                attempt = await sync_to_async(_Attempt)(backend, task, job, args, kwargs, run_after)
                await signals.task_started.asend_robust(type(backend), task_result=attempt.result)
                try:
                    returned = normalize_json(await task.func(*attempt.arguments, **kwargs))
                except BaseException as error:
                    if attempt.ends_with(error):
                        # Not after a cancellation, which is no Exception.
                        await signals.task_finished.asend_robust(type(backend), task_result=attempt.result)  # noqa: ASYNC102
                    raise
                attempt.succeed(returned)
                await signals.task_finished.asend_robust(type(backend), task_result=attempt.result)
                return returned
            finally:
                # The thread ends here, and its connections with it.
                await sync_to_async(connections.close_all)()  # noqa: ASYNC102 -- asyncio cancels once

    return on_asyncio if iscoroutinefunction(task.func) else in_thread


@contextmanager
def _connections_of_a_request() -> Generator[None]:
    """What Django does when a request begins and ends, in a thread that serves one task after another."""
    reset_queries()
    close_old_connections()
    try:
        yield
    finally:
        close_old_connections()


class _Attempt:
    """One attempt of a task, as Django's signals and a task that takes its context see it."""

    def __init__(
        self,
        backend: PulseBackend,
        task: Any,
        job: Job,
        args: list[Any],
        kwargs: dict[str, Any],
        run_after: str | None,
    ) -> None:
        self._job = job
        self._retries = backend.retries
        # The history is read only where it matters: the task itself may have no use for a connection.
        if task.takes_context or job.attempt > 1:
            self.result = backend.get_result(str(job.id))
        else:
            now = timezone.now()
            self.result = TaskResult(
                task=task_of_row(task, {"run_after": run_after}, job.queue, job.priority, backend.alias),
                id=str(job.id),
                status=TaskResultStatus.RUNNING,
                enqueued_at=None,
                started_at=now,
                finished_at=None,
                last_attempted_at=now,
                args=args,
                kwargs=kwargs,
                backend=backend.alias,
                errors=[],
                worker_ids=[str(job.session)],
            )
        self.arguments = [TaskContext(task_result=self.result), *args] if task.takes_context else args

    def succeed(self, returned: Any) -> None:
        """The task has returned."""
        self._end(TaskResultStatus.SUCCESSFUL)
        object.__setattr__(self.result, "_return_value", returned)

    def ends_with(self, error: BaseException) -> bool:
        """Notes an exception; whether the task ends with it, or is tried again."""
        from traceback import format_exception

        if isinstance(error, Snooze) or not isinstance(error, Exception | SystemExit):
            return False
        again = isinstance(error, RetryAfter) or (self._retries and not isinstance(error, Discard))
        if again and self._job.attempt < self._job.max_attempts:
            return False
        kind = type(error)
        self.result.errors.append(
            TaskError(
                exception_class_path=f"{kind.__module__}.{kind.__qualname__}",
                traceback="".join(format_exception(error)),
            )
        )
        self._end(TaskResultStatus.FAILED)
        return True

    def _end(self, status: Any) -> None:
        object.__setattr__(self.result, "status", status)
        object.__setattr__(self.result, "finished_at", timezone.now())
