"""A handler: the function that a kind's jobs run, and how they are enqueued unless a call says otherwise."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar

from ..errors import UsageError
from .options import Defaults, request_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Unpack

    from ..jobs import JobRequest
    from .durable import Durability
    from .limits import KeyOf
    from .options import CallOptions
    from .retries import Retries
    from .signature import Signature

P = ParamSpec("P")
R = TypeVar("R")
Runs = Literal["trio", "asyncio", "thread", "process"]


@dataclass(frozen=True, slots=True, eq=False)
class Handler(Generic[P, R]):
    """A registered function. Calling it calls the function itself, so that tests can call it directly."""

    kind: str
    function: Callable[..., Any]
    runs: Runs
    defaults: Defaults
    signature: Signature
    result_type: Any = field(default=Any)
    retries: Retries | None = None
    key_of: KeyOf | None = None
    on_death: str | None = None
    durability: Durability | None = None
    chosen: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What `options` was given."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Handler {self.kind!r} on queue {self.defaults.queue!r}>"

    def options(self, **given: Unpack[CallOptions]) -> Handler[P, R]:
        """The same handler with other options for one enqueue.

        `delay` and `timeout` are seconds or a `timedelta`; `at` is when the job is due, an aware datetime. A job that has not
        finished by its `deadline` is cancelled, or never started; a job that has not started when it `expires` never starts.
        Both are seconds or a `timedelta` from the enqueue, or an aware datetime. `child_key` names a child of a durable
        nursery; without one it is known by its number. Raises `InvalidName` or `ConfigurationError`, before anything is
        written.
        """
        return replace(self, defaults=self.defaults.changed(**given), chosen={**self.chosen, **given})

    def request(self, *args: P.args, **kwargs: P.kwargs) -> JobRequest:
        """One job, checked and ready for `client.enqueue_many`. Raises `InvalidArguments`."""
        return self._request(self.signature.encode(args, kwargs))

    def request_by_name(self, args: Mapping[str, Any]) -> JobRequest:
        """The same, from arguments by name, as the command line gets them."""
        return self._request(self.signature.encode((), args))

    def child_request(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> JobRequest:
        """A child of a durable nursery, without its key. Raises `InvalidArguments` or `UsageError`."""
        if self.defaults.unique_key is not None:
            raise UsageError(
                f"A child has no unique_key: its child_key is its identity, and {self.kind!r} was given the unique_key "
                f"{self.defaults.unique_key!r}."
            )
        # Fan-outs make one request for each child: only a handler with a key is copied, without it.
        bare = (
            self if self.defaults.child_key is None else replace(self, defaults=replace(self.defaults, child_key=None))
        )
        return bare._request(self.signature.encode(args, kwargs))

    def _request(self, encoded: str) -> JobRequest:
        if self.key_of is None or self.defaults.key is not None:
            return request_of(self.kind, encoded, self.defaults)
        key = self.key_of(self.signature.by_name(encoded))
        return request_of(self.kind, encoded, self.defaults, key)


def where_is(handler: Handler[..., Any]) -> str:
    """The function and the line where it is defined, for error messages."""
    function = inspect.unwrap(handler.function)
    code = getattr(function, "__code__", None)
    return f"{function.__qualname__} ({code.co_filename}:{code.co_firstlineno})" if code else repr(function)
