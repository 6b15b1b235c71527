"""`PulseBackend`: Django's tasks as pulse-trio's jobs, enqueued on Django's own connection and so in its transaction."""

# pyright: basic
# Django has no types.

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any

import psycopg
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction
from django.utils import timezone
from django.utils.connection import ConnectionDoesNotExist
from psycopg.conninfo import make_conninfo

from ..client import SyncClient
from ..errors import ConfigurationError, PulseTrioError, UnknownJob
from ..handlers import Handlers, check_queue
from ..store import operations
from .finding import in_no_app, tasks_of_project
from .library import (
    BaseTaskBackend,
    InvalidTask,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
    signals,
    task_backends,
)
from .results import has_arguments_of_a_task, result_of
from .task_calls import call_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_OPTIONS = {"database", "schema", "modules", "handlers", "retries", "max_attempts", "timeout", "migrate"}
_LARGEST_ID = 2**63 - 1


class PulseBackend(BaseTaskBackend):
    """Django's tasks on pulse-trio: `TASKS = {"default": {"BACKEND": "pulse_trio.django.PulseBackend", "OPTIONS": {...}}}`.

    Options, all optional: `database` is an alias of DATABASES ("default"), `schema` pulse-trio's schema there ("pulse").
    `modules` are modules that have tasks, besides `tasks` of each installed app. `handlers` ("shop.jobs.handlers") is a
    `Handlers` object whose jobs the same worker runs. `retries` (False): whether a task that raises is tried again, up to
    `max_attempts` times (20) and with a growing pause; without it the first exception is the last, as in Django's own
    backends. `timeout` is seconds for one attempt. `migrate` (True): whether `manage.py migrate` migrates pulse-trio's schema.

    A task may run twice whatever the options say: when a worker is lost, another runs its tasks again.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        super().__init__(alias, params)
        self.database: str = self.options.get("database", "default")
        self.schema: str = self.options.get("schema", "pulse")
        self.retries = bool(self.options.get("retries", False))
        self.migrates = bool(self.options.get("migrate", True))

    # What Django calls

    def validate_task(self, task: Any) -> None:
        """Raises `InvalidTask` for a task that cannot be enqueued."""
        super().validate_task(task)
        try:
            check_queue(task.queue_name)
        except PulseTrioError as error:
            raise InvalidTask(str(error)) from None

    def enqueue(self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Enqueues a task in the current transaction of its database's connection.

        Raises `InvalidTask` for one that no worker would find, `TypeError` for arguments that JSON does not have,
        `InvalidArguments` for other arguments that cannot be stored, and what the database refuses.
        """
        self.validate_task(task)
        result = TaskResult(
            task=task,
            id="",
            status=TaskResultStatus.READY,
            enqueued_at=None,
            started_at=None,
            finished_at=None,
            last_attempted_at=None,
            args=list(args),
            kwargs=dict(kwargs),
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )
        given: dict[str, Any] = {"args": result.args, "kwargs": result.kwargs}
        due = task.run_after
        if due is not None:
            given["run_after"] = due.isoformat()
            due = timezone.make_aware(due) if timezone.is_naive(due) else due
        handler = self._handler_of(task).options(queue=task.queue_name, priority=task.priority, at=due)
        # Here, because an exception inside of the block would mark the caller's transaction as broken.
        handler.request(**given)
        block: Any = transaction.atomic(using=self.database, savepoint=False)
        in_callers = connections[self.database].in_atomic_block
        with block:
            enqueued = self._client().enqueue(handler, **given)
            with connections[self.database].cursor() as cursor:
                # The moment that the row has.
                cursor.execute("SELECT now()")
                moment = cursor.fetchone()[0]
            object.__setattr__(result, "id", str(enqueued.id))
            object.__setattr__(result, "enqueued_at", moment)
            if not in_callers:
                # A receiver that raises leaves no task behind, of which its caller does not know.
                signals.task_enqueued.send(type(self), task_result=result)
        if in_callers:
            signals.task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> Any:
        """The task's state, with its attempts and their errors. Raises `TaskResultDoesNotExist`."""
        text = str(result_id)
        if not (text.isascii() and text.isdigit() and int(text) <= _LARGEST_ID):
            raise TaskResultDoesNotExist(text)
        client = self._client()
        try:
            record = client.job(int(text))
        except UnknownJob:
            raise TaskResultDoesNotExist(text) from None
        task = self.tasks.get(record.kind)
        if task is None or not has_arguments_of_a_task(record.args):
            raise TaskResultDoesNotExist(f"{text}: that job is none of this project's tasks")
        return result_of(task, record, client.run(operations.attempts(int(text))), self.alias)

    def check(self, **_: Any) -> list[Any]:
        """Django's system checks of this backend's settings."""
        return list(self._faults())

    def _faults(self) -> Any:
        where = f"TASKS[{self.alias!r}]"
        if unknown := sorted(set(self.options) - _OPTIONS):
            yield checks.Error(
                f"{where} has unknown OPTIONS: {', '.join(map(repr, unknown))}.",
                hint=f"The options are: {', '.join(sorted(_OPTIONS))}.",
                id="pulse_trio.E001",
            )
        try:
            vendor = connections[self.database].vendor
        except ConnectionDoesNotExist:
            yield checks.Error(
                f"{where} names the database {self.database!r}, which DATABASES does not have.", id="pulse_trio.E002"
            )
        except ImproperlyConfigured as error:
            yield checks.Error(f"{where}: the database {self.database!r} cannot be used: {error}", id="pulse_trio.E002")
        else:
            if vendor != "postgresql":
                yield checks.Error(
                    f"{where} needs PostgreSQL, and the database {self.database!r} is {vendor}.",
                    hint='OPTIONS = {"database": ...} names another one of DATABASES.',
                    id="pulse_trio.E003",
                )
        for queue in sorted(self.queues):
            try:
                check_queue(queue)
            except PulseTrioError as error:
                yield checks.Error(f"{where}, QUEUES: {error}", id="pulse_trio.E004")
        for other in task_backends().settings:
            found = task_backends()[other]
            if other < self.alias and isinstance(found, PulseBackend) and self._shares(found):
                yield checks.Error(
                    f"{where} and TASKS[{other!r}] use the same schema {self.schema!r} of the database {self.database!r}.",
                    hint="Give one of them another schema, or use one backend with several QUEUES.",
                    id="pulse_trio.E005",
                )
        try:
            _ = self.handlers
        except (PulseTrioError, ImportError) as error:
            yield checks.Error(f"{where}: {error}", id="pulse_trio.E006")
        for name in in_no_app(self._modules):
            yield checks.Warning(
                f"{where}: no installed app has a module {name!r}, which the option modules names.",
                hint="A name without a dot is a module of each installed app. Any other is named with its package, as in "
                f"'package.{name}'; one that is in no package cannot be named.",
                id="pulse_trio.W002",
            )
        if not _is_installed():
            yield checks.Warning(
                f"{where} uses pulse-trio, and 'pulse_trio.django' is not in INSTALLED_APPS.",
                hint="Without it there is no manage.py pulse_worker, and manage.py migrate does not make the schema.",
                id="pulse_trio.W001",
            )

    def _shares(self, other: PulseBackend) -> bool:
        return (self.database, self.schema) == (other.database, other.schema)

    # For workers

    @property
    def tasks(self) -> dict[str, Any]:
        """Every task that this backend runs, by its path."""
        return tasks_of_project(self._modules)

    @property
    def _modules(self) -> tuple[str, ...]:
        return tuple(self.options.get("modules", ()))

    @cached_property
    def handlers(self) -> Handlers:
        """The tasks, and the jobs of the option `handlers`, as a worker runs them. Raises `ConfigurationError`."""
        made = Handlers()
        # A handler's own policy for what it raises; a lost worker's tasks are run again in any case.
        policy: dict[str, Any] = {} if self.retries else {"discard_on": BaseException}
        policy |= {name: self.options[name] for name in ("max_attempts", "timeout") if name in self.options}
        for path, task in self.tasks.items():
            function = call_of(self, task)
            made.job(name=path, runs="asyncio" if iscoroutinefunction(function) else "thread", **policy)(function)
        if (also := self.options.get("handlers")) is not None:
            others = _named(also)
            made.include(others)
            made.codec = others.codec
        return made

    @property
    def dsn(self) -> str:
        """The address of the database, as Django's settings have it."""
        known = {each.keyword.decode() for each in psycopg.pq.Conninfo.get_defaults()}
        given = connections[self.database].get_connection_params()
        return make_conninfo(**{name: value for name, value in given.items() if name in known and value is not None})

    def _handler_of(self, task: Any) -> Any:
        handler = self.handlers.get(task.module_path)
        if handler is None or task.module_path not in self.tasks:
            raise InvalidTask(
                f"No worker would find {task.module_path}: move it to the module tasks of an installed app"
                f"{self._another_way(task.func.__module__)}."
            )
        return handler

    def _another_way(self, module: str) -> str:
        """What else would let a worker find a task of this module, as the end of a sentence."""
        if "." not in module:
            return (
                f", or its module into a package and name that, as in 'modules': ['package.{module}']. {module!r} alone would "
                f"mean a module {module} of each installed app"
            )
        if module in self._modules:
            return f". {module} is among the 'modules' of OPTIONS, but has no such task at its top level"
        return (
            f", or name its module, as in TASKS = {{{self.alias!r}: {{..., 'OPTIONS': {{'modules': [{module!r}]}}}}}}"
        )

    def _client(self) -> SyncClient:
        return SyncClient(connections[self.database], schema=self.schema, handlers=self.handlers)


def _named(path: str) -> Handlers:
    module, _, name = str(path).replace(":", ".").rpartition(".")
    try:
        found = getattr(import_module(module), name, None) if module else None
    except ImportError as error:
        raise ConfigurationError(f"The option handlers names {path!r}, which cannot be imported: {error}.") from error
    if not isinstance(found, Handlers):
        raise ConfigurationError(
            f"The option handlers must name a Handlers object, as in 'shop.jobs.handlers', got {path!r}."
        )
    return found


def _is_installed() -> bool:
    from django.apps import apps

    return apps.is_installed("pulse_trio.django")


def backend_named(alias: str) -> PulseBackend:
    """The backend of that alias in TASKS. Raises `ConfigurationError` if it is none of pulse-trio's."""
    backends = task_backends()
    ours = [each for each in backends.settings if isinstance(backends[each], PulseBackend)]
    if alias not in ours:
        said = f"these do: {', '.join(ours)}" if ours else "no other does either"
        raise ConfigurationError(f"TASKS[{alias!r}] does not use pulse_trio.django.PulseBackend; {said}.")
    return backends[alias]
