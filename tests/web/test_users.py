"""Users, their settings, the throttle and redaction: without an app."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from argon2 import PasswordHasher, extract_parameters
from argon2.exceptions import HashingError

from pulse_trio.errors import ConfigurationError
from pulse_trio.web.security import HIDDEN, Access, User, WebSettings, redacted, web_settings
from pulse_trio.web.security import users as users_module
from pulse_trio.web.security.throttle import Throttle
from pulse_trio.web.security.users import Users, hash_password, parse_users

if TYPE_CHECKING:
    from pathlib import Path

CHEAP = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
OTHER = PasswordHasher(time_cost=2, memory_cost=16, parallelism=1)


async def test_a_password_of_an_unknown_name_takes_the_work_of_a_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    real = users_module._matches

    def matches(its_hash: str, password: str) -> bool:
        checked.append(its_hash)
        return real(its_hash, password)

    monkeypatch.setattr(users_module, "_matches", matches)
    users = Users({"ada": CHEAP.hash("a"), "bob": OTHER.hash("b"), "eve": OTHER.hash("c")})
    assert await users.check("ada", "a") is not None
    assert await users.check("ada", "b") is None
    known = list(checked)
    checked.clear()
    for n in range(60):
        assert await users.check(f"name{n}", "a") is None
        assert await users.check(f"name{n}", "") is None
    assert len(known) == 2
    assert len(checked) == 120
    # The same work each time for the same name, else repetition would tell it from a real one; and the work of a real one.
    assert checked[::2] == checked[1::2]
    work = {repr(extract_parameters(each)) for each in checked}
    assert work == {repr(extract_parameters(each)) for each in (CHEAP.hash("x"), OTHER.hash("x"))}


async def test_a_password_is_bounded_and_may_be_any_text() -> None:
    users = Users({"ada": CHEAP.hash("pä ss\0word".encode()), "bob": CHEAP.hash("x" * 1024)})
    assert await users.check("ada", "pä ss\0word") is not None
    assert await users.check("bob", "x" * 1024) is not None
    assert await users.check("bob", "x" * 1025) is None
    assert await users.check("ada", "\ud800") is None
    assert await users.check("\ud800", "x") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ada", "entry 1 must be NAME:HASH"),
        ("ada:secret", "the hash of 'ada' is not an argon2id hash"),
        (":$argon2id$v=19$m=8,t=1,p=1$c2FsdHNhbHQ$aGFzaGhhc2g", "entry 1 must be NAME:HASH"),
        ("ada:$2b$12$abcdefghijklmnopqrstuv", "the hash of 'ada' is not an argon2id hash"),
        ("ada:$argon2i$v=19$m=8,t=1,p=1$c2FsdHNhbHQ$aGFzaGhhc2g", "the hash of 'ada' is not an argon2id hash"),
    ],
)
def test_entries_that_cannot_work_are_refused_without_quoting_them(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said.replace("$", r"\$")) as caught:
        parse_users(text, "PULSE_TRIO_WEB_USERS")
    for secret in ("secret", "abcdefghij", "c2FsdHNhbHQ"):
        assert secret not in str(caught.value)


@pytest.mark.parametrize("name", ["PULSE_TRIO_WEB_USERS", "PULSE_TRIO_WEB_USERS_FILE"])
def test_blank_users_are_refused_and_do_not_open_the_page(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} is set and blank"):
        web_settings({name: "  "})


def test_viewers_without_users_and_a_file_without_users_are_refused(tmp_path: Path) -> None:
    none = tmp_path / "users"
    none.write_text("# nobody yet\n")
    none.chmod(0o600)
    for settings, said in (
        (WebSettings(viewers=("eve",)), "names viewers, and there are no users"),
        (WebSettings(users_file=str(none)), "names no user"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            Access(settings, read_only=False, authenticate=None)


def test_a_name_that_occurs_twice_is_refused_and_comments_and_lines_are_read() -> None:
    one, other = CHEAP.hash("a"), CHEAP.hash("b")
    assert parse_users(f"# the team\nada:{one}\n\n  bob:{other} ", "x") == {"ada": one, "bob": other}
    with pytest.raises(ConfigurationError, match="'ada' occurs twice"):
        parse_users(f"ada:{one} ada:{other}", "x")


def test_a_hash_is_argon2id_and_differs_each_time() -> None:
    one = hash_password("correct horse")
    assert one.startswith("$argon2id$")
    assert one != hash_password("correct horse")
    assert parse_users(f"ada:{one}", "x") == {"ada": one}


def test_a_viewer_who_is_no_user_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'evee', who is not one of the users"):
        Users({"eve": CHEAP.hash("a")}, viewers=frozenset({"evee"})).check_viewers()


@pytest.mark.parametrize(
    ("payloads", "reads"),
    [
        ("operators", {"ada": True, "eve": False}),
        ("all", {"ada": True, "eve": True}),
        ("none", {"ada": False, "eve": False}),
    ],
)
def test_who_acts_and_who_reads_payloads(payloads: str, reads: dict[str, bool]) -> None:
    users = Users({n: CHEAP.hash("a") for n in ("ada", "eve")}, viewers=frozenset({"eve"}), payloads=payloads)
    found = {name: users.user(name) for name in ("ada", "eve")}
    assert {name: user is not None and user.may_act for name, user in found.items()} == {"ada": True, "eve": False}
    assert {name: user is not None and user.may_read_payloads for name, user in found.items()} == reads
    assert users.user("mallory") is None


# Settings


def test_settings_come_from_the_environment_and_show_no_secret() -> None:
    secret = "x" * 32
    entry = f"ada:{CHEAP.hash('a')}"
    found = web_settings(
        {
            "PULSE_TRIO_WEB_USERS": entry,
            "PULSE_TRIO_WEB_VIEWERS": "ada, bob",
            "PULSE_TRIO_WEB_SECRET": secret,
            "PULSE_TRIO_WEB_SESSION": "600",
            "PULSE_TRIO_WEB_REDACT": "",
            "PULSE_TRIO_DSN": "else",
        }
    )
    assert found == WebSettings(users=entry, viewers=("ada", "bob"), secret=secret, session=600.0, redact=())
    assert secret not in repr(found)
    assert "argon2" not in repr(found)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"SECRET": "short"}, "at least 32 characters"),
        ({"SESSION": "1"}, "from 60 s to 30 days"),
        ({"SESSION": "nan"}, "from 60 s to 30 days"),
        ({"SESSION": "long"}, "a number of seconds"),
        ({"PAYLOADS": "some"}, "one of operators, all, none"),
        ({"HOSTS": "https://a.example"}, "host names without a port"),
        ({"HOSTS": "a.example:80"}, "host names without a port"),
        ({"TRUSTED_PROXIES": "nginx"}, "addresses or networks"),
        ({"VIEWRS": "ada"}, "There is no setting PULSE_TRIO_WEB_VIEWRS"),
    ],
)
def test_settings_that_cannot_work_are_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        web_settings({f"PULSE_TRIO_WEB_{name}": value for name, value in given.items()})


def test_a_file_of_users_is_read_unless_others_may_write_it(tmp_path: Path) -> None:
    path = tmp_path / "users"
    path.write_text("ada:x\n")
    assert WebSettings(users_file=str(path)).user_entries()[0] == "ada:x\n"
    path.chmod(0o666)
    with pytest.raises(ConfigurationError, match="can be written by every user"):
        WebSettings(users_file=str(path)).user_entries()
    with pytest.raises(ConfigurationError, match="cannot be read"):
        WebSettings(users_file=str(tmp_path / "none")).user_entries()
    with pytest.raises(ConfigurationError, match="give one of them"):
        WebSettings(users_file=str(path), users="bob:x").user_entries()


# The throttle


def test_attempts_within_the_window_count_and_older_ones_do_not() -> None:
    now = 0.0
    throttle = Throttle(2, 10.0, clock=lambda: now)
    for at, waits in [(0, 0), (4, 0), (6, 4), (10, 0), (11, 3), (30, 0)]:
        now = float(at)
        assert throttle.wait("a") == waits
        if not waits:
            throttle.count("a")
    assert throttle.wait("b") == 0


def test_the_throttle_remembers_only_so_many_keys() -> None:
    throttle = Throttle(1, 10.0, keys=3)
    for key in "abcd":
        throttle.count(key)
    assert [throttle.wait(key) > 0 for key in "abcd"] == [False, True, True, True]


# Redaction

ADA = User("ada", may_act=True, may_read_payloads=True, redact=("*password*", "card"))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"user_id": 1, "Password": "x"}, {"user_id": 1, "Password": HIDDEN}),
        ({"new_password_2": ["x"], "card": {"number": 1}}, {"new_password_2": HIDDEN, "card": HIDDEN}),
        ({"a": [{"b": {"CARD": 1, "cards": 2}}]}, {"a": [{"b": {"CARD": HIDDEN, "cards": 2}}]}),
        ("password", "password"),
        (None, None),
    ],
)
def test_values_of_named_fields_are_shown_to_no_one(value: Any, shown: Any) -> None:
    assert redacted(value, ADA) == shown


@pytest.mark.parametrize("user", [None, User("eve"), User("eve", may_act=True)])
def test_a_user_who_may_not_read_payloads_sees_none(user: User | None) -> None:
    assert [redacted(value, user) for value in ({"a": 1}, [1], 5, "x", False)] == [HIDDEN] * 5
    assert redacted(None, user) is None
    assert redacted({}, user) == {}


def test_a_payload_of_any_depth_is_redacted() -> None:
    value: Any = {"password": "x"}
    for _ in range(500):
        value = {"a": value}
    assert "'x'" not in repr(redacted(value, ADA))


def test_a_hash_that_asks_for_more_memory_than_there_is_is_the_operators_mistake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: PasswordHasher, password: str) -> str:
        raise HashingError("Memory allocation error")

    hashes = {"ada": hash_password("a long enough password")}
    monkeypatch.setattr(PasswordHasher, "hash", refuse)
    with pytest.raises(ConfigurationError, match="make it anew"):
        Users(hashes)
