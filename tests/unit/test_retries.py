"""Retry policies: how long after a failure, and which failures end a job at once."""

from __future__ import annotations

import functools
import math
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse_trio import ConfigurationError, Exponential, Fixed, Handlers, Linear, RetryAfter, RetryContext, Snooze
from pulse_trio.handlers.retries import Retries, retries_of
from pulse_trio.jobs import Claim
from pulse_trio.states import outcome_of_cancel, outcome_of_error

seconds = st.floats(min_value=1e-6, max_value=1e300)
counts = st.integers(min_value=1, max_value=2**31 - 1)


def claim(failures: int = 0, options: str | None = None) -> Claim:
    return Claim(7, failures + 1, 20, failures, 0, "", "mail", "send", "{}", options, 5)


def failure(failures: int, error: BaseException | None = None) -> RetryContext:
    return RetryContext(7, "send", "mail", failures, 20, failures, error or ValueError())


def retries(**options: Any) -> Retries:
    made = retries_of("send", **options)
    assert made is not None
    return made


def delay(error: BaseException, failures: int = 0, **options: Any) -> float | None:
    return retries(**options).delay(claim(failures), error)


# The built-in policies


@given(base=seconds, cap=seconds, failures=counts)
def test_exponential_stays_within_its_cap_and_jitter_within_the_wait(base: float, cap: float, failures: int) -> None:
    wait = Exponential(base, cap, jitter=False)(failure(failures))
    assert wait == min(cap, base * 2.0 ** min(failures, 64))
    assert 0 <= Exponential(base, cap)(failure(failures)) <= wait


@given(step=seconds, cap=seconds, failures=counts)
def test_linear_grows_by_its_step_up_to_its_cap(step: float, cap: float, failures: int) -> None:
    wait = Linear(step, cap)(failure(failures))
    assert wait == min(cap, step * failures)
    assert wait <= Linear(step, cap)(failure(failures + 1)) <= cap


def test_the_built_in_policies_in_numbers() -> None:
    assert [Exponential(2, 60, jitter=False)(failure(n)) for n in (1, 2, 3, 9)] == [4, 8, 16, 60]
    assert [Linear(10, 25)(failure(n)) for n in (1, 2, 3)] == [10, 20, 25]
    assert [Fixed(5)(failure(n)) for n in (1, 2, 3)] == [5, 5, 5]


def test_exponential_is_the_default_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda _, high: high)
    for failures in (0, 1, 5, 50, 5000):
        default = outcome_of_error(claim(failures), ValueError()).delay
        assert delay(ValueError(), failures, retry=Exponential()) == default


def test_the_numbers_of_exponential_stand_on_the_row_like_the_defaults() -> None:
    handlers = Handlers()

    @handlers.job(retry=Exponential(base=5, cap=60))
    async def one() -> None: ...

    @handlers.job(backoff_base=5, backoff_cap=60)
    async def two() -> None: ...

    @handlers.job(retry=Fixed(3))
    async def three() -> None: ...

    assert one.request().options == two.request().options == '{"backoff_base":5,"backoff_cap":60}'
    assert three.request().options is None
    assert one.options(queue="other").retries is one.retries


# Which policy decides


def test_a_policy_of_ones_own_sees_the_failure_and_says_when() -> None:
    seen: list[RetryContext] = []

    def policy(failure: RetryContext) -> timedelta:
        seen.append(failure)
        return timedelta(minutes=failure.failures)

    error = KeyError("x")
    assert delay(error, 2, retry=policy) == 180
    assert seen == [RetryContext(7, "send", "mail", 3, 20, 3, error)]


def test_no_time_means_dead_at_once() -> None:
    outcome = outcome_of_error(claim(), KeyError("x"), retries(retry=lambda _: None))
    assert (outcome.kind, outcome.delay) == ("discarded", 0)
    assert outcome.error is not None
    assert outcome.error.startswith("KeyError: 'x'")


def test_the_first_rule_that_fits_decides_and_without_one_the_default_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda _, high: high)
    rules = {ConnectionResetError: Fixed(1), (OSError, KeyError): Fixed(2), LookupError: lambda _: None}
    assert delay(ConnectionResetError(), retry=rules) == 1
    assert delay(FileNotFoundError(), retry=rules) == 2
    assert delay(KeyError(), retry=rules) == 2
    assert delay(IndexError(), retry=rules) is None
    assert delay(ValueError(), retry=rules) == 4


def test_what_is_not_listed_in_retry_on_ends_the_job() -> None:
    listed = {"retry_on": (TimeoutError, KeyError), "retry": Fixed(3)}
    assert delay(TimeoutError(), **listed) == 3
    assert delay(ValueError(), **listed) is None
    assert delay(ValueError(), retry_on=()) is None


def test_what_is_listed_in_discard_on_ends_the_job_whatever_else_is_said() -> None:
    listed = {"discard_on": UnicodeError, "retry_on": ValueError, "retry": Fixed(3)}
    assert delay(ValueError(), **listed) == 3
    assert delay(UnicodeDecodeError("utf-8", b"", 0, 1, ""), **listed) is None


leaf_types = st.sampled_from([TimeoutError, KeyError, ValueError, OSError])


@given(leaves=st.lists(leaf_types, min_size=1, max_size=5), nested=st.booleans())
def test_a_group_ends_the_job_only_if_every_leaf_would_and_waits_for_its_slowest(
    leaves: list[type[Exception]], nested: bool
) -> None:
    rules: dict[Any, Any] = {KeyError: Fixed(5), ValueError: Fixed(9), OSError: lambda _: None}
    made = retries(retry=rules, discard_on=TimeoutError)
    group = ExceptionGroup("", [leaf() for leaf in leaves])
    alone = [made.delay(claim(), leaf()) for leaf in leaves]
    waits = [wait for wait in alone if wait is not None]
    assert made.delay(claim(), ExceptionGroup("", [group]) if nested else group) == (max(waits) if waits else None)


def test_what_the_handler_asks_for_itself_goes_before_its_policy() -> None:
    never = retries(retry=lambda _: None, retry_on=(), discard_on=Exception)
    assert outcome_of_error(claim(), Snooze(5), never).kind == "snoozed"
    asked = outcome_of_error(claim(), RetryAfter(5), never)
    assert (asked.kind, asked.delay) == ("failed", 5)


def test_a_timeout_is_a_timeouterror_to_the_policy() -> None:
    held = claim(options='{"timeout":1.5}')
    outcome = outcome_of_cancel(held, "timeout", retries(retry={TimeoutError: Fixed(8)}))
    assert outcome is not None
    assert (outcome.kind, outcome.delay, outcome.error) == ("timeout", 8, "TimeoutError: ran longer than 1.5 s")
    outcome = outcome_of_cancel(held, "timeout", retries(retry_on=KeyError))
    assert outcome is not None
    assert (outcome.kind, outcome.error) == ("discarded", "TimeoutError: ran longer than 1.5 s")


def broken(_: RetryContext) -> float:
    raise ZeroDivisionError("in the policy")


@pytest.mark.parametrize(
    "policy", [broken, *[functools.partial(lambda _, v: v, v=v) for v in ("5", -1, math.nan, math.inf, True)]]
)
def test_a_policy_that_fails_leaves_the_failure_with_the_default_backoff_and_is_named(
    policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.uniform", lambda _, high: high)
    outcome = outcome_of_error(claim(), KeyError("the job's own"), retries(retry=policy))
    assert (outcome.kind, outcome.delay) == ("failed", 4)
    assert outcome.error is not None
    assert outcome.error.startswith('KeyError: "the job\'s own"')
    assert "The retry policy failed" in outcome.error
    assert ("ZeroDivisionError: in the policy" if policy is broken else "must return seconds") in outcome.error


# Mistakes


async def asynchronous(_: RetryContext) -> float:
    return 1


class Asynchronous:
    async def __call__(self, _: RetryContext) -> float:
        return 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"retry": 5}, "must be Exponential"),
        ({"retry": asynchronous}, "plain function"),
        ({"retry": Asynchronous()}, "plain function"),
        ({"retry": Fixed}, "must be Exponential"),
        ({"retry": {ValueError: 5}}, "must be Exponential"),
        ({"retry": {"ValueError": Fixed(5)}}, "exception types, got 'ValueError'"),
        ({"retry_on": [ValueError]}, r"exception types, got \["),
        ({"discard_on": (ValueError, 5)}, "exception types, got 5"),
        ({"discard_on": ExceptionGroup}, "leaf by leaf"),
        ({"retry": Fixed(5), "backoff_base": 3}, "not both"),
    ],
)
def test_options_that_cannot_work_are_refused_at_registration(options: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Handlers().job(name="send", **options)(lambda: None)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Exponential(0), lambda: Exponential(2, math.inf), lambda: Linear(-1), lambda: Linear("1"),  # type: ignore[arg-type]
        lambda: Linear(1, 0), lambda: Fixed(-1), lambda: Fixed(math.nan), lambda: Fixed(True),
    ],
)  # fmt: skip
def test_policies_with_impossible_numbers_are_refused(make: Any) -> None:
    with pytest.raises(ConfigurationError):
        make()
