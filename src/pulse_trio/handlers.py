"""The registry of handlers, and typed arguments: what may be enqueued and how it is called.

Each handler's signature becomes a msgspec Struct once, at registration. Arguments are checked against it before anything
is written, stored as a JSON object by parameter name, and decoded straight from the row's text when the job runs. Default
arguments are not stored: a new default takes effect for jobs already enqueued.
"""

from __future__ import annotations

import difflib
import inspect
import re
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    TypeVar,
    cast,
    get_type_hints,
    overload,
)

import msgspec

from .errors import ConfigurationError, InvalidArguments, InvalidName, UnknownKind
from .jobs import DEFAULT_OPTIONS, Job, JobRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

P = ParamSpec("P")
R = TypeVar("R")
Runs = Literal["trio", "thread"]

_encode = msgspec.json.Encoder().encode

MAX_ARGS = 1_048_576
"""The largest `args` in bytes of JSON; the database checks the same."""

_QUEUE = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


class UnfitArguments(InvalidArguments):
    """The row's arguments do not fit the handler, and will not next time: no retry mends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """How a handler's jobs are enqueued, and what one call may change with `Handler.options`. Times are in seconds."""

    queue: str = "default"
    priority: int = 0
    max_attempts: int = 20
    timeout: float | None = None
    backoff_base: float = 2.0
    backoff_cap: float = 3600.0
    delay: float | None = None
    run_at: datetime | None = None
    unique_key: str | None = None

    def __post_init__(self) -> None:
        check_queue(self.queue)
        self._whole("max_attempts", 1)
        self._whole("priority", -(2**31))
        for name in ("timeout", "backoff_base", "backoff_cap"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 < value < float("inf")):
                raise ConfigurationError(f"{name} must be a positive number of seconds, got {value!r}.")
        if self.delay is not None and self.run_at is not None:
            raise ConfigurationError("Give delay or run_at, not both.")
        if self.delay is not None and not (_is_number(self.delay) and 0 <= self.delay < float("inf")):
            raise ConfigurationError(f"delay must be a number of seconds from now on, got {self.delay!r}.")
        if self.run_at is not None:
            _check_moment(self.run_at)
        if self.unique_key is not None:
            check_text("unique_key", self.unique_key, 512)

    def _whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
            raise ConfigurationError(f"{name} must be a whole number from {least} to {2**31 - 1}, got {value!r}.")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_moment(run_at: object) -> None:
    if not isinstance(run_at, datetime):
        raise ConfigurationError(f"run_at must be a datetime, got {run_at!r}.")
    if run_at.utcoffset() is None:
        raise ConfigurationError(
            f"run_at must know its time zone, got the naive {run_at!r}; use datetime.now(UTC) and the like."
        )


def given_options(**options: Any) -> dict[str, Any]:
    """Options as `Defaults` takes them, from what a caller gave: None means not given, a delay may be a `timedelta`."""
    if isinstance(delay := options.get("delay"), timedelta):
        options["delay"] = delay.total_seconds()
    return {name: value for name, value in options.items() if value is not None}


def check_queue(queue: str) -> str:
    """Returns the queue's name. Raises `InvalidName` if it is not 1 to 128 letters, digits or any of `_ . : / -`."""
    if not isinstance(cast("object", queue), str) or not _QUEUE.fullmatch(queue):
        raise InvalidName(f"Queue name {queue!r} is not valid: use 1 to 128 ASCII letters, digits or any of _ . : / -")
    return queue


def check_text(what: str, text: str, limit: int) -> str:
    """Returns `text`. Raises `InvalidName` if it is empty, over `limit` bytes of UTF-8, or has control characters."""
    if not isinstance(cast("object", text), str):
        raise InvalidName(f"{what} must be text, got {text!r}.")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidName(f"{what} {text!r} has a lone surrogate, which is not a character.") from None
    if not 1 <= size <= limit:
        raise InvalidName(f"{what} must have 1 to {limit} bytes, got {size}.")
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise InvalidName(f"{what} {text!r} has control characters.")
    return text


@dataclass(frozen=True, slots=True, eq=False)
class Handler(Generic[P, R]):
    """A registered function. Calling it calls the function itself, so that it can be tested as one."""

    kind: str
    function: Callable[..., Any]
    runs: Runs
    defaults: Defaults
    signature: Signature
    result_type: Any = field(default=Any)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Handler {self.kind!r} on queue {self.defaults.queue!r}>"

    def options(
        self,
        *,
        queue: str | None = None,
        priority: int | None = None,
        max_attempts: int | None = None,
        timeout: float | None = None,
        delay: float | timedelta | None = None,
        run_at: datetime | None = None,
        unique_key: str | None = None,
    ) -> Handler[P, R]:
        """The same handler with other options for one enqueue. `delay` in seconds; `run_at` must know its time zone.

        Raises `InvalidName` or `ConfigurationError`, before anything is written.
        """
        given = given_options(
            queue=queue,
            priority=priority,
            max_attempts=max_attempts,
            timeout=timeout,
            delay=delay,
            run_at=run_at,
            unique_key=unique_key,
        )
        return replace(self, defaults=replace(self.defaults, **given))

    def request(self, *args: P.args, **kwargs: P.kwargs) -> JobRequest:
        """One job, checked and ready for `client.enqueue_many`. Raises `InvalidArguments`."""
        return self._request(self.signature.encode(args, kwargs))

    def request_by_name(self, args: Mapping[str, Any]) -> JobRequest:
        """The same from arguments by name, as the command line has them."""
        return self._request(self.signature.encode((), args))

    def _request(self, encoded: str) -> JobRequest:
        d = self.defaults
        return JobRequest(
            kind=self.kind,
            args=encoded,
            queue=d.queue,
            priority=d.priority,
            max_attempts=d.max_attempts,
            delay=d.delay,
            run_at=d.run_at.isoformat() if d.run_at else None,
            unique_key=d.unique_key,
            options=encode_options(d),
        )


def encode_options(defaults: Defaults) -> str | None:
    """The row's `options`: JSON of what is not the default, None when all of it is."""
    fields = ("timeout", "backoff_base", "backoff_cap")
    chosen = {f: getattr(defaults, f) for f in fields if getattr(defaults, f) != getattr(DEFAULT_OPTIONS, f)}
    return msgspec.json.encode(chosen).decode() if chosen else None


class Signature:
    """A handler's parameters: encodes arguments to JSON and calls the function from JSON."""

    def __init__(self, kind: str, function: Callable[..., Any]) -> None:
        self.kind = kind
        self._what = f"Arguments of {kind!r}"
        hints = _hints(kind, function)
        parameters = list(inspect.signature(function).parameters.values())
        self.job_parameter = _job_parameter(kind, parameters, hints)
        self.parameters = [p for p in parameters if p.name != self.job_parameter]
        for p in self.parameters:
            _refuse_parameter(kind, p)
        self._inspected = inspect.Signature(self.parameters)
        self._positional = [p.name for p in self.parameters if p.kind is not p.KEYWORD_ONLY]
        self._keyword = [p.name for p in self.parameters if p.kind is p.KEYWORD_ONLY]
        self._decoder = msgspec.json.Decoder(self._struct(hints))
        first = parameters[0] if parameters else None
        self._job_first = (
            first is not None and first.name == self.job_parameter and first.kind is not first.KEYWORD_ONLY
        )

    def _struct(self, hints: Mapping[str, Any]) -> type[msgspec.Struct]:
        fields: list[Any] = []
        for p in self.parameters:
            annotation = hints.get(p.name, Any)
            if p.default is p.empty:
                fields.append((p.name, annotation))
            else:
                fields.append((p.name, annotation, msgspec.field(default_factory=_constant(p.default))))
        try:
            struct = msgspec.defstruct(f"Arguments of {self.kind}", fields, kw_only=True, forbid_unknown_fields=True)
            msgspec.json.Decoder(struct)
        except (TypeError, NotImplementedError) as error:
            raise ConfigurationError(
                f"Handler {self.kind!r} has a parameter whose type JSON cannot carry: {error}"
            ) from error
        return struct

    def encode(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """The arguments as JSON by name, without defaults. Raises `InvalidArguments`; nothing was written."""
        # The decoder refuses missing and unknown names, so positions are all that has to be checked here.
        if len(args) > len(self._positional) or not kwargs.keys().isdisjoint(self._positional[: len(args)]):
            self._refuse_call(args, kwargs)
        try:
            encoded = _encode({**dict(zip(self._positional, args, strict=False)), **kwargs})
            self._decoder.decode(encoded)
        except msgspec.ValidationError as error:
            self._refuse_call(args, kwargs)
            raise InvalidArguments(f"Arguments do not fit {self.kind}{self._inspected}: {error}.") from None
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidArguments(f"Arguments of {self.kind!r} cannot be written as JSON: {error}.") from None
        return check_json(encoded, self._what)

    def _refuse_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Says what Python would say of a call that does not fit. Slow (5 us), so only for calls that are refused."""
        try:
            self._inspected.bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidArguments(f"Arguments do not fit {self.kind}{self._inspected}: {error}.") from None

    def decode(self, args: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(positional, keyword) arguments of a call. Raises `UnfitArguments`."""
        try:
            struct = self._decoder.decode(args)
        except msgspec.DecodeError as error:
            raise UnfitArguments(f"Arguments do not fit {self.kind}{self._inspected}: {error}.") from None
        if not self._keyword:
            return msgspec.structs.astuple(struct), {}
        return (
            tuple([getattr(struct, name) for name in self._positional]),
            {name: getattr(struct, name) for name in self._keyword},
        )

    def bind(self, function: Callable[..., Any]) -> Callable[[Job, str], Any]:
        """A call of `function` from a job and its JSON; chosen once, so that the common shapes cost no more than they must."""
        decode = self.decode
        if not self.parameters and self.job_parameter is None:
            return lambda job, args: decode(args) and function()
        if self.job_parameter is None and not self._keyword:
            return lambda job, args: function(*decode(args)[0])
        if self._job_first and not self._keyword:
            return lambda job, args: function(job, *decode(args)[0])
        return self._bind_by_name(function)

    def _bind_by_name(self, function: Callable[..., Any]) -> Callable[[Job, str], Any]:
        names = [p.name for p in self.parameters]
        by_position = inspect.signature(function)

        def call(job: Job, args: str) -> Any:
            positional, keyword = self.decode(args)
            given = dict(zip(names, positional, strict=False)) | keyword
            if self.job_parameter is not None:
                given[self.job_parameter] = job
            bound = inspect.BoundArguments(by_position, cast("Any", {n: given[n] for n in by_position.parameters}))
            return function(*bound.args, **bound.kwargs)

        return call


def check_json(encoded: bytes, what: str) -> str:
    """JSON as text that PostgreSQL will take and show: below the size cap, without NUL and lone surrogates."""
    if len(encoded) > MAX_ARGS:
        raise InvalidArguments(
            f"{what} take {len(encoded):,} bytes of JSON; the limit is {MAX_ARGS:,}. Store a reference."
        )
    text = encoded.decode()
    if "\\u" in text:
        _check_escapes(encoded, text, what)
    return text


def _check_escapes(encoded: bytes, text: str, what: str) -> None:
    if "\\u0000" in text and _NUL.search(text):
        raise InvalidArguments(f"{what} hold a NUL character, which PostgreSQL's JSON cannot hold.")
    try:
        # msgspec escapes no surrogates of its own: these came as `msgspec.Raw`, which nobody has looked at.
        msgspec.json.decode(encoded)
    except msgspec.DecodeError as error:
        raise InvalidArguments(f"{what} are not JSON that PostgreSQL can show: {error}.") from None


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def _hints(kind: str, function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigurationError(
            f"The annotations of handler {kind!r} cannot be read: {error}. Import that name at the module's top level."
        ) from error


def _job_parameter(kind: str, parameters: list[inspect.Parameter], hints: Mapping[str, Any]) -> str | None:
    found = [p.name for p in parameters if hints.get(p.name) is Job]
    if len(found) > 1:
        raise ConfigurationError(f"Handler {kind!r} has {len(found)} parameters annotated Job; one at most.")
    return found[0] if found else None


def _refuse_parameter(kind: str, p: inspect.Parameter) -> None:
    if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
        raise ConfigurationError(
            f"Handler {kind!r} takes {p}: a job's arguments are stored by name, so each needs a parameter of its own."
        )


class Handlers:
    """What a worker can run: `handlers = Handlers()`, then `@handlers.job(...)` on functions."""

    def __init__(self) -> None:
        self._by_kind: dict[str, Handler[..., Any]] = {}

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
        """The handler of a kind. Raises `UnknownKind`, naming those that look like it."""
        handler = self._by_kind.get(kind)
        if handler is None:
            near = difflib.get_close_matches(kind, self._by_kind, n=3)
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise UnknownKind(f"No handler is registered as {kind!r}.{hint}")
        return handler

    def include(self, other: Handlers) -> None:
        """Adds another registry's handlers. Raises `ConfigurationError` on a kind both have."""
        for handler in other:
            self._add(handler)

    @overload
    def job(self, function: Callable[Concatenate[Job, P], Awaitable[R]], /) -> Handler[P, R]: ...
    @overload
    def job(self, function: Callable[P, Awaitable[R]], /) -> Handler[P, R]: ...
    @overload
    def job(
        self,
        *,
        name: str | None = None,
        queue: str = "default",
        priority: int = 0,
        max_attempts: int = 20,
        timeout: float | None = None,
        backoff_base: float = 2.0,
        backoff_cap: float = 3600.0,
        runs: Runs | None = None,
    ) -> _Decorator: ...
    def job(self, *function: Callable[..., Any], **given: Any) -> Any:
        """Registers a function as the handler of a kind.

        `name` is the kind (the function's name by default). `timeout` is seconds for one attempt. A retry waits a random
        time up to `backoff_base * 2**failures` seconds, at most `backoff_cap`. `runs` is "trio" for async functions and
        "thread" for plain ones. A parameter annotated `Job` is given the job; the others are the job's arguments.
        Raises `ConfigurationError` for a signature that cannot be stored, an unknown `runs`, or a kind registered twice.
        """
        if function:
            return self._register(*function)

        def register(function: Callable[..., Any]) -> Handler[..., Any]:
            return self._register(function, **given)

        return register

    def _register(
        self, function: Callable[..., Any], *, name: str | None = None, runs: str | None = None, **given: Any
    ) -> Handler[..., Any]:
        if isinstance(function, Handler):
            raise ConfigurationError(f"{function!r} is registered already; decorate the plain function.")
        if not inspect.isroutine(function):
            raise ConfigurationError(
                f"{function!r} is not a function; wrap it in one, whose parameters are the arguments."
            )
        kind = check_text("kind", name if name is not None else function.__name__, 256)
        handler: Handler[..., Any] = Handler(
            kind=kind,
            function=function,
            runs=_how_it_runs(kind, function, runs),
            defaults=Defaults(**given),
            signature=Signature(kind, function),
            result_type=_hints(kind, function).get("return", Any),
        )
        self._add(handler)
        return handler

    def _add(self, handler: Handler[..., Any]) -> None:
        if (other := self._by_kind.get(handler.kind)) is not None:
            raise ConfigurationError(
                f"The kind {handler.kind!r} is registered twice: {_where(other)} and {_where(handler)}. "
                'Give one of them another name: @handlers.job(name="...").'
            )
        self._by_kind[handler.kind] = handler


class _Decorator(Protocol):
    """The type of `handlers.job(...)`: takes the job's parameter, if there is one, out of what callers pass."""

    @overload
    def __call__(self, function: Callable[Concatenate[Job, P], Awaitable[R]], /) -> Handler[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, Awaitable[R]], /) -> Handler[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Job, P], R], /) -> Handler[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Handler[P, R]: ...
    def __call__(self, function: Callable[..., Any], /) -> Any: ...


def _how_it_runs(kind: str, function: Callable[..., Any], runs: str | None) -> Runs:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(
            f"Handler {kind!r} is a generator: a job is called once, and what it returns is its result."
        )
    is_async = inspect.iscoroutinefunction(function)
    if runs is None:
        return "trio" if is_async else "thread"
    if runs == "trio" and is_async:
        return "trio"
    if runs == "thread" and not is_async:
        return "thread"
    if runs in ("trio", "thread"):
        wanted = "an async function" if runs == "trio" else "a plain function"
        raise ConfigurationError(f"Handler {kind!r} has runs={runs!r}, which needs {wanted}.")
    raise ConfigurationError(f"Handler {kind!r} has runs={runs!r}; this version knows 'trio' and 'thread'.")


def _where(handler: Handler[..., Any]) -> str:
    function = inspect.unwrap(handler.function)
    code = getattr(function, "__code__", None)
    return f"{function.__qualname__} ({code.co_filename}:{code.co_firstlineno})" if code else repr(function)
