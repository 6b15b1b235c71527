"""The registry of handlers: which kinds may be enqueued, and how they are called."""

from __future__ import annotations

import difflib
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    ParamSpec,
    Protocol,
    TypeVar,
    cast,
    overload,
)

from ..callables import is_function
from ..errors import ConfigurationError, UnknownKind
from ..timing import timing
from .declaring import how_it_runs, take_on_death, take_retries, take_upgrade
from .durable import take_durability
from .handler import Handler, where_is
from .limits import KeyOf, QueueLease, QueueLimits, queue_lease, queue_limits
from .middleware import Middleware, middleware_of
from .names import check_text
from .options import Defaults, HandlerOptions, given_options
from .payloads import readable_result
from .resources import Resource, Resources, resource_of
from .schedules import Schedule, schedule
from .signature import Signature, hints_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
    from datetime import timedelta
    from typing import Unpack

    from ..jobs import Job
    from ..observe import Instrument
    from ..timing import CatchUp
    from .codecs import Codec
    from .handler import Runs
    from .resources import ResourceRuns

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound="Callable[..., Any]")
_OF_HANDLERS = ("name", "runs", *HandlerOptions.__optional_keys__)
"""What `handlers.job(...)` takes."""


class Handlers:
    """The handlers that a worker can run: `handlers = Handlers()`, then `@handlers.job(...)` on functions.

    `codec` decodes the arguments of its workers' jobs and encodes the results; it may also be set later. `instruments`
    receive the events of `pulse_trio.observe` from every worker of these handlers, in addition to the worker's own
    instruments."""

    def __init__(self, *, codec: Codec | None = None, instruments: Iterable[Instrument] = ()) -> None:
        self.codec = codec
        self.instruments = list(instruments)
        self.resources = Resources()
        self._middleware: list[Middleware] = []
        self._origins: dict[str, Handlers] = {}
        """By kind: the registry that a handler was included from."""
        self._by_kind: dict[str, Handler[..., Any]] = {}
        self._schedules: dict[str, Schedule] = {}
        self._queues: dict[str, QueueLimits] = {}
        self._leases: dict[str, QueueLease] = {}

    def __iter__(self) -> Iterator[Handler[..., Any]]:
        return iter(self._by_kind.values())

    def __len__(self) -> int:
        return len(self._by_kind)

    def __contains__(self, kind: object) -> bool:
        return kind in self._by_kind

    def get(self, kind: str) -> Handler[..., Any] | None:
        """The handler of a kind, or None."""
        return self._by_kind.get(kind)

    def __getitem__(self, kind: str) -> Handler[..., Any]:
        """The handler of a kind. Raises `UnknownKind`, naming similar kinds."""
        handler = self._by_kind.get(kind)
        if handler is None:
            near = difflib.get_close_matches(kind, self._by_kind, n=3)
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise UnknownKind(f"No handler is registered as {kind!r}.{hint}")
        return handler

    def include(self, other: Handlers) -> None:
        """Adds another registry's handlers, schedules, resources and instruments. Raises `ConfigurationError` on a name both
        have."""
        for resource in other.resources:
            self._add_resource(resource)
        for handler in other:
            self._add(handler)
            self._origins[handler.kind] = other
        for declared in other.schedules:
            self._add_schedule(declared)
        for limits in other.queue_limits:
            self._limit(limits)
        for queue, lease in other.queue_leases.items():
            self._lease(queue, lease)
        known = set(map(id, self.instruments))
        self.instruments += [instrument for instrument in other.instruments if id(instrument) not in known]

    @property
    def queues(self) -> list[str]:
        """The queues of these handlers, of their schedules, and those with limits or a lease, by name."""
        used = {handler.defaults.queue for handler in self} | {declared.request.queue for declared in self.schedules}
        return sorted(used | self._queues.keys() | self._leases.keys())

    @property
    def queue_limits(self) -> list[QueueLimits]:
        """The limits given to `queue`, which a worker writes to the database when it starts."""
        return list(self._queues.values())

    @property
    def queue_leases(self) -> Mapping[str, QueueLease]:
        """The queues with their own lease."""
        return dict(self._leases)

    def queue(
        self,
        name: str,
        *,
        limit: int | None = None,
        rate: str | None = None,
        key_limit: int | None = None,
        key_rate: str | None = None,
        retention: timedelta | None = None,
        lease: float | timedelta | None = None,
        heartbeat: float | timedelta | None = None,
    ) -> None:
        """Limits a queue, across all workers: at most `limit` of its jobs run at once, and at most `rate` of them start
        ("10/s", "100/m", "1000/h"); `key_limit` and `key_rate` do the same for each key whose jobs have no limits of their
        own. `retention` is how long its finished jobs are kept, instead of the worker's setting. A worker writes these to the
        database when it starts: the newest deploy wins.

        `lease` (seconds, or a `timedelta`) is how long a claim or heartbeat of a worker with these handlers reserves a job of
        this queue, instead of the worker's own lease; `heartbeat` is how often it is renewed, a third of the lease if not
        given and at most half of it. Raises `InvalidName` or `ConfigurationError`.
        """
        limits = (limit, rate, key_limit, key_rate, retention)
        if all(given is None for given in (*limits, lease, heartbeat)):
            raise ConfigurationError(f"Queue {name!r}: give limit, rate, key_limit, key_rate, retention or lease.")
        chosen = queue_limits(name, *limits)
        if lease is not None or heartbeat is not None:
            self._lease(name, queue_lease(name, lease, heartbeat))
        if any(given is not None for given in limits):
            # Not for a lease alone: limits that are not given here would be removed in the database.
            self._limit(chosen)

    def _lease(self, queue: str, lease: QueueLease) -> None:
        if self._leases.get(queue, lease) != lease:
            raise ConfigurationError(f"The queue {queue!r} is given two different leases.")
        self._leases[queue] = lease

    def _limit(self, limits: QueueLimits) -> None:
        if self._queues.get(limits.queue, limits) != limits:
            raise ConfigurationError(f"The queue {limits.queue!r} is given two different limits.")
        self._queues[limits.queue] = limits

    @overload
    def job(self, function: Callable[Concatenate[Job, P], Awaitable[R]], /) -> Handler[P, R]: ...
    @overload
    def job(self, function: Callable[P, Awaitable[R]], /) -> Handler[P, R]: ...
    @overload
    def job(self, function: Callable[Concatenate[Job, P], R], /) -> Handler[P, R]: ...
    @overload
    def job(self, function: Callable[P, R], /) -> Handler[P, R]: ...
    @overload
    def job(
        self, *, name: str | None = None, runs: Runs | None = None, **given: Unpack[HandlerOptions]
    ) -> _Decorator: ...
    def job(self, *function: Callable[..., Any], **given: Any) -> Any:
        """Registers a function as the handler of a kind.

        `name` is the kind (the function's name by default). `timeout` is seconds for one attempt. A retry waits a random
        time up to `backoff_base * 2**failures` seconds, at most `backoff_cap`; `retry` gives a policy instead (`Exponential`,
        `Linear`, `Fixed`, a function of a `RetryContext`, or a dictionary from exception types to these). With `retry_on`,
        exceptions of other types make the job dead at once; those of `discard_on` always do.

        `upgrade` turns arguments that an older version enqueued into those that the function takes now: a plain function from
        a dictionary by name to a dictionary. It is called for every job, and must return new arguments unchanged.

        `on_death` is another handler, or its kind: when a job dies, for any reason, the database enqueues that handler's job
        in the same transaction. It receives those of these arguments that its parameters name: `job_id`, `kind`, `queue`,
        `error`, `attempts`, `died_at`, `args` (by default None: they are left out when they are large or cannot be read).

        `durable=True` lets a Trio handler remember what it has done (`job.step`) and start children (`job.durable_nursery`);
        `suspend_after` is how many seconds it may only wait before it gives its slot back (5 by default), `version` that of its
        code.

        `runs` is "trio" for async functions and "thread" for plain ones. A parameter annotated `Job` receives the job; the
        others are the job's arguments. Raises `ConfigurationError` for a signature that cannot be stored, an unknown `runs`,
        a kind registered twice, or options that cannot work.
        """
        if function:
            return self._register(*function)

        def register(function: Callable[..., Any]) -> Handler[..., Any]:
            return self._register(function, **given)

        return register

    def middleware(self, function: F) -> F:
        """Declares a function around every attempt of this registry's jobs, included ones too, whatever their kind:

            @handlers.middleware
            async def timed(job: Job, call: Callable[[], Awaitable[Any]]) -> Any:
                began = time.perf_counter()
                try:
                    return await call()
                finally:
                    print(job.kind, time.perf_counter() - began)

        The first that is declared is the outermost; an included registry's are inside of this one's. It runs in Trio, in the
        job's own task. It must await `call()` once, return the result and let exceptions through: what it returns is the job's
        result, what it raises the job's failure. Further parameters are resources. Returns the function. Raises
        `ConfigurationError` if it is not an async function with these two parameters.
        """
        self._middleware.append(middleware_of(function))
        return function

    def middleware_around(self, kind: str) -> list[Middleware]:
        """The middleware around the handler of a kind, the outermost first."""
        origin = self._origins.get(kind)
        return [*self._middleware, *(origin.middleware_around(kind) if origin is not None else ())]

    @overload
    def resource(self, function: F, /) -> F: ...
    @overload
    def resource(self, *, name: str | None = None, runs: ResourceRuns | None = None) -> Callable[[F], F]: ...
    def resource(self, *function: Any, name: str | None = None, runs: ResourceRuns | None = None) -> Any:
        """Declares what a worker opens once, before its first job, and closes after its last: a generator function that yields
        it, async or plain.

            @handlers.resource
            async def http() -> AsyncIterator[httpx.AsyncClient]:
                async with httpx.AsyncClient() as client:
                    yield client

        A parameter of a handler, or of another resource, receives it if its annotation is the type that is yielded, or if it
        has the resource's name (`name`; the function's by default). An async function is opened in each event loop whose
        handlers ask for it, or only in that of `runs` ("trio" or "asyncio"); a plain one in a thread. Returns the function.
        Raises `ConfigurationError` for a function that is no generator, a name that is taken, a parameter that could be an
        argument or a resource, and resources that depend on each other in a circle.
        """

        def declare(function: Any) -> Any:
            self._add_resource(resource_of(function, name=name, runs=runs))
            return function

        return declare(*function) if function else declare

    def _add_resource(self, resource: Resource) -> None:
        self.resources.add(resource)
        for handler in self:
            self.resources.let_ask(handler.signature, handler.runs)

    @property
    def schedules(self) -> list[Schedule]:
        """The schedules that `cron` declared, in order."""
        return list(self._schedules.values())

    def cron(
        self,
        expression: str | None = None,
        /,
        *,
        every: float | timedelta | None = None,
        timezone: str | None = None,
        catch_up: CatchUp = "last",
        name: str | None = None,
        args: Mapping[str, Any] | None = None,
        due_as: str | None = None,
    ) -> _CronDecorator:
        """Declares a schedule for a handler's job; place it above `@handlers.job`.

            @handlers.cron("30 2 * * *", timezone="Europe/Berlin")
            @handlers.job(queue="reports")
            async def nightly() -> None: ...

        `expression` has five fields (minute, hour, day-of-month, month, day-of-week), or six with the seconds first, or
        is one of `@hourly`, `@daily`, `@weekly`, `@monthly`, `@yearly`; `every` is seconds (or a `timedelta`) instead.
        `timezone` is UTC by default. `catch_up` says what happens to occurrences missed while no worker ran: "skip",
        "last" (one job) or "all" (at most 1,000). `name` is the schedule's (the kind by default). `args` are the job's
        arguments by name; `due_as` names the parameter that receives the occurrence's time.

        A plain function is registered as if by `@handlers.job`. Raises `ConfigurationError`.
        """
        chosen = timing(expression, every, timezone)

        def declare(given: Any) -> Any:
            handler = self._own(given)
            made = schedule(
                name or handler.kind, handler.request_by_name, args, chosen, catch_up=catch_up, due_as=due_as
            )
            self._add_schedule(made)
            return handler

        return declare

    def _own(self, given: Any) -> Handler[..., Any]:
        if not isinstance(given, Handler):
            return self._register(given)
        handler = cast("Handler[..., Any]", given)
        if handler.kind not in self._by_kind:
            raise ConfigurationError(f"{handler!r} is registered elsewhere; declare its schedule there.")
        return handler

    def _add_schedule(self, declared: Schedule) -> None:
        if declared.name in self._schedules:
            raise ConfigurationError(
                f"The schedule {declared.name!r} is declared twice. Give one of them another name: "
                '@handlers.cron(..., name="...").'
            )
        self._schedules[declared.name] = declared

    def _register(
        self, function: Callable[..., Any], *, name: str | None = None, runs: str | None = None, **given: Any
    ) -> Handler[..., Any]:
        if isinstance(function, Handler):
            raise ConfigurationError(
                f"{function!r} is registered already; decorate the plain function (@handlers.cron goes above all other "
                f"decorators)."
            )
        if not is_function(function):
            raise ConfigurationError(
                f"{function!r} is not a function; wrap it in one, whose parameters are the arguments."
            )
        kind = check_text("kind", name if name is not None else function.__name__, 256)
        retries = take_retries(kind, given)
        key = given.pop("key") if callable(given.get("key")) else None
        on_death = take_on_death(kind, given)
        signature = Signature(kind, function, take_upgrade(kind, given))
        how = how_it_runs(kind, function, runs)
        durability = take_durability(kind, how, given)
        self.resources.let_ask(signature, how)
        handler: Handler[..., Any] = Handler(
            kind=kind,
            function=function,
            runs=how,
            defaults=Defaults(**given_options(_OF_HANDLERS, **given)),
            signature=signature,
            result_type=readable_result(f"Handler {kind!r}", hints_of(kind, function).get("return", Any)),
            retries=retries,
            key_of=KeyOf(kind, key, [p.name for p in signature.parameters]) if key is not None else None,
            on_death=on_death,
            durability=durability,
        )
        self._add(handler)
        return handler

    def _add(self, handler: Handler[..., Any]) -> None:
        if (other := self._by_kind.get(handler.kind)) is not None:
            raise ConfigurationError(
                f"The kind {handler.kind!r} is registered twice: {where_is(other)} and {where_is(handler)}. "
                'Give one of them another name: @handlers.job(name="...").'
            )
        self.resources.let_ask(handler.signature, handler.runs)
        self._by_kind[handler.kind] = handler


class _Decorator(Protocol):
    """The type of `handlers.job(...)`: removes the job's parameter, if there is one, from the parameters that callers
    pass."""

    @overload
    def __call__(self, function: Callable[Concatenate[Job, P], Awaitable[R]], /) -> Handler[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, Awaitable[R]], /) -> Handler[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Job, P], R], /) -> Handler[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Handler[P, R]: ...
    def __call__(self, function: Callable[..., Any], /) -> Any: ...


class _CronDecorator(Protocol):
    """The type of `handlers.cron(...)`: a handler stays unchanged, a function becomes a handler."""

    @overload
    def __call__(self, handler: Handler[P, R], /) -> Handler[P, R]: ...
    @overload
    def __call__(self, handler: Callable[Concatenate[Job, P], Awaitable[R]], /) -> Handler[P, R]: ...
    @overload
    def __call__(self, handler: Callable[P, Awaitable[R]], /) -> Handler[P, R]: ...
    @overload
    def __call__(self, handler: Callable[Concatenate[Job, P], R], /) -> Handler[P, R]: ...
    @overload
    def __call__(self, handler: Callable[P, R], /) -> Handler[P, R]: ...
    def __call__(self, handler: Any, /) -> Any: ...
