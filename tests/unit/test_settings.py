"""Settings: one table, four sources, clear refusals."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click
import pytest
from click.testing import CliRunner

from pulse_trio import ConfigurationError, Handlers, InvalidName, Worker, WorkerSettings, settings
from pulse_trio.cli import options, reference
from pulse_trio.setting_types import parse_list
from pulse_trio.settings import environment_settings, file_dsn, file_instruments, file_settings, load_settings
from pulse_trio.worker.processes import launch

if TYPE_CHECKING:
    from pathlib import Path

NAMES = [f.name for f in fields(WorkerSettings)]
# Something other than the default for each setting: as text, and as the value it stands for.
OTHER: dict[str, tuple[str, Any]] = {
    "queues": ("b, a,c", ("b", "a", "c")),
    "concurrency": ("7", 7),
    "processes": ("1", 1),
    "process_slots": ("3", 3),
    "quarantine_slots": ("1", 1),
    "lease": ("60", 60.0),
    "heartbeat": ("2.5", 2.5),
    "stale": ("300", 300.0),
    "poll": ("0.5", 0.5),
    "watchdog": ("9", 9.0),
    "grace": ("0", 0.0),
    "lag_warning": ("0.5", 0.5),
    "timeout": ("900", 900.0),
    "cleanup": ("1e1", 10.0),
    "connect_timeout": ("3", 3.0),
    "retention": ("86400", 86400.0),
    "unfit_patience": ("60", 60.0),
    "schema": ("other", "other"),
    "direct_dsn": ("host=direct", "host=direct"),
    "http": ("127.0.0.1:9464", "127.0.0.1:9464"),
}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(f"PULSE_TRIO_{name.upper()}", raising=False)


def test_every_setting_is_tried_here() -> None:
    assert set(OTHER) == set(NAMES)


def test_every_setting_says_what_it_is() -> None:
    for f in fields(WorkerSettings):
        assert f.metadata["help"].endswith(".")


# Precedence


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_comes_from_the_environment(name: str) -> None:
    text, value = OTHER[name]
    assert environment_settings({f"PULSE_TRIO_{name.upper()}": text, "PULSE_TRIO_DSN": "x", "OTHER": "y"}) == {
        name: value
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", ["pulse-trio.toml", "pyproject.toml"])
@pytest.mark.parametrize("spelling", ["_", "-"])
def test_every_setting_comes_from_a_file(name: str, place: str, spelling: str, tmp_path: Path) -> None:
    _, value = OTHER[name]
    toml = list(value) if isinstance(value, tuple) else value
    header = "" if place == "pulse-trio.toml" else "[tool.pulse-trio]\n"
    literal = repr(toml).replace("'", '"')
    (tmp_path / place).write_text(f"{header}{name.replace('_', spelling)} = {literal}\n")
    assert file_settings(tmp_path) == {name: value}


def test_given_beats_environment_beats_file_beats_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pulse-trio.toml").write_text("concurrency = 1\npoll = 2\nlease = 40\n")
    monkeypatch.setenv("PULSE_TRIO_CONCURRENCY", "3")
    monkeypatch.setenv("PULSE_TRIO_POLL", "4")
    settings = load_settings({"concurrency": 5, "poll": None}, folder=tmp_path)
    assert (settings.concurrency, settings.poll, settings.lease, settings.grace) == (5, 4, 40, 25)


def test_the_nearest_file_counts(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "pulse-trio.toml").write_text("poll = 1\n")
    assert file_settings(inner) == {"poll": 1.0}
    (tmp_path / "a" / "pyproject.toml").write_text("[tool.pulse-trio]\npoll = 2\n")
    assert file_settings(inner) == {"poll": 2.0}
    (tmp_path / "a" / "pulse-trio.toml").write_text("poll = 3\n")
    assert file_settings(inner) == {"poll": 3.0}


def test_no_file_is_no_settings(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert file_settings(tmp_path) == {}
    assert load_settings({}, folder=tmp_path) == WorkerSettings()


def test_a_dsn_in_the_file_is_no_worker_setting(tmp_path: Path) -> None:
    (tmp_path / "pulse-trio.toml").write_text("dsn = 'postgresql:///x'\npoll = 2\n")
    assert file_settings(tmp_path) == {"poll": 2.0}
    assert file_dsn(tmp_path) == ("postgresql:///x", tmp_path / "pulse-trio.toml")


@pytest.mark.parametrize("given", ["['m:a', 'm:b']", "'m:a m:b'", "'m:a, m:b'"])
def test_instruments_in_the_file_are_no_worker_setting(given: str, tmp_path: Path) -> None:
    (tmp_path / "pulse-trio.toml").write_text(f"instrument = {given}\npoll = 2\n")
    assert file_settings(tmp_path) == {"poll": 2.0}
    assert file_instruments(tmp_path) == ("m:a", "m:b")


def test_the_processes_of_a_worker_start_nothing_anew_and_take_no_instruments_from_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PULSE_TRIO_RELOAD", "1")
    environment = launch.launch_of("app:handlers", "", WorkerSettings()).environment
    assert (environment["PULSE_TRIO_RELOAD"], environment["PULSE_TRIO_INSTRUMENT"]) == ("0", "")


# Refusals


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("poll = \n", "not valid TOML"),
        ("pol = 1\n", "unknown setting 'pol'; known: dsn, instrument, cleanup, concurrency"),
        ("reload = true\n", "has 'reload', which is an option of a single run: give --reload or PULSE_TRIO_RELOAD=1"),
        ("instrument = 5\n", "instrument must be text or a list of texts, as in .*, got 5"),
        ("instrument = [5]\n", "instrument must be text or a list of texts"),
        (
            "burst = true\n",
            "has 'burst', which is an option of a single run: give --burst or PULSE_TRIO_BURST=1 instead",
        ),
        ("json = true\n", "give --json or PULSE_TRIO_JSON=1"),
        ("poll = 'soon'\n", "poll must be a number of seconds, got 'soon'"),
        ("poll = true\n", "poll must be a number of seconds, got True"),
        ("concurrency = 1.5\n", "concurrency must be a whole number, got 1.5"),
        ("concurrency = true\n", "concurrency must be a whole number"),
        ("concurrency = [1]\n", "concurrency must be a whole number"),
        ("queues = 5\n", "queues must be a list of queues, got 5"),
        ("schema = 5\n", "schema must be text, got 5"),
        ("[poll]\nx = 1\n", "poll must be a number of seconds"),
        ("lag-warning = 2\nlag_warning = 3\n", "has 'lag_warning' twice, with a hyphen and with an underscore"),
        ("dsn = 5\n", "dsn must be text"),
    ],
)
def test_a_file_that_makes_no_sense_is_named_with_the_reason(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "pulse-trio.toml"
    path.write_text(content)
    read = {"dsn": file_dsn, "instrument": file_instruments}.get(content.partition(" ")[0], file_settings)
    with pytest.raises(ConfigurationError, match=message) as caught:
        read(tmp_path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pulse-trio.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="not valid TOML"):
        file_settings(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [("POLL", "soon"), ("POLL", ""), ("CONCURRENCY", "1.5"), ("CONCURRENCY", "many"), ("LEASE", "30s")],
)
def test_a_variable_that_makes_no_sense_is_named(name: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"PULSE_TRIO_{name} must be a .*number.*, got {text!r}"):
        environment_settings({f"PULSE_TRIO_{name}": text})


def test_a_misspelt_variable_is_named_and_another_programs_is_not(caplog: pytest.LogCaptureFixture) -> None:
    settings._warned.clear()
    for _ in range(2):
        environment_settings({"PULSE_TRIO_CONCURENCY": "5", "PULSE_TRIO_WEB_USERS": "ada", "PULSE_TRIO_PHASE": "blue"})
    assert caplog.messages == [
        "the variable PULSE_TRIO_CONCURENCY is ignored: there is no such setting. Did you mean PULSE_TRIO_CONCURRENCY?"
    ]


@pytest.mark.parametrize(
    "given",
    [
        {"lease": 0}, {"lease": -1}, {"lease": float("nan")}, {"lease": float("inf")},
        {"heartbeat": 0}, {"heartbeat": float("nan")}, {"heartbeat": 15.1}, {"lease": 19.9},
        {"poll": 0}, {"watchdog": 0}, {"watchdog": float("inf")}, {"retention": 0}, {"retention": float("inf")},
        {"retention": 1e300}, {"grace": -1}, {"grace": float("nan")}, {"cleanup": -0.1}, {"connect_timeout": -1},
        {"concurrency": 0}, {"concurrency": -5}, {"concurrency": 3_000_000_000}, {"processes": 0}, {"process_slots": -1},
        {"schema": ""}, {"schema": "pg_mine"}, {"schema": "x" * 64}, {"schema": "ü" * 32}, {"schema": "a\0"}, {"queues": ()},
        {"queues": "mail"},
    ],
    ids=repr,
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"The setting '({'|'.join(NAMES)})'"):
        WorkerSettings(**given)


WHOLE, SECONDS, TEXT, LIST = "a whole number", "a number of seconds", "text", "a list of queues"
WRONG: dict[str, tuple[str, list[Any]]] = {
    **{
        n: (WHOLE, ["5", 1.5, True, None, [1], b"5"])
        for n in ("concurrency", "processes", "process_slots", "quarantine_slots")
    },
    **{f.name: (SECONDS, ["30", True, None, [1.0], timedelta(1)]) for f in fields(WorkerSettings) if f.type == "float"},
    **{name: (TEXT, [9464, None, True, b"x", ["x"]]) for name in ("schema", "http", "direct_dsn")},
    "queues": (LIST, [5, True, "mail", b"mail", {"mail": 1}, [1], (None,), iter(["mail"])]),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in WRONG for value in WRONG[name][1]])
def test_a_setting_of_another_type_is_refused_by_its_name(name: str, value: Any) -> None:
    """`http=9464` was an AttributeError, `concurrency="5"` a TypeError, and `concurrency=True` one job at once."""
    for refuse in (
        lambda: WorkerSettings(**{name: value}),
        lambda: Worker(Handlers(), "postgresql:///x", **{name: value}),
    ):
        with pytest.raises(ConfigurationError) as refused:
            refuse()
        assert str(refused.value).startswith(f"The setting {name!r} must be {WRONG[name][0]}")
    assert set(WRONG) == set(NAMES)


def test_an_address_of_another_type_is_not_shown() -> None:
    with pytest.raises(ConfigurationError, match="'direct_dsn' must be text, got bytes"):
        WorkerSettings(direct_dsn=b"password=hush")  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"queues": ["a"]}, {"queues": None}, {"lease": 60}, {"timeout": 5}], ids=repr)
def test_a_value_that_stands_for_one_of_the_right_type_is_taken(given: dict[str, Any]) -> None:
    assert WorkerSettings(**given)


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(TypeError, match="colour"):
        WorkerSettings(colour="red")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("handlers", "given", "said"),
    [
        (Handlers(), {"heartbeats": 3}, "A worker has no setting 'heartbeats'. Did you mean heartbeat?"),
        (Handlers(), {"colour": "red"}, "A worker has no setting 'colour'. The settings are: cleanup, concurrency, "),
        ([], {}, "Worker(handlers, dsn); got list."),
        ("postgresql://user:hush@host/db", {}, "Worker(handlers, dsn); got str."),
    ],
)
def test_a_worker_says_what_it_takes(handlers: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        Worker(handlers, "", **given)
    assert said in str(refused.value)
    assert "hush" not in str(refused.value)


def test_a_worker_checks_its_queues() -> None:
    with pytest.raises(InvalidName):
        Worker(Handlers(), "", queues=("two words",))
    with pytest.raises(ConfigurationError):
        Worker(Handlers(), "", queues="mail")


def test_a_list_is_separated_by_commas() -> None:
    assert parse_list("default,mail") == ("default", "mail")
    assert parse_list(" a , ,b,") == ("a", "b")
    assert parse_list("") == ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tagged(WorkerSettings):
    """With a second list, as somebody who adds a setting writes it."""

    tags: tuple[str, ...] = field(default=(), metadata={"help": "Tags to claim."})


@pytest.fixture
def tagged(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (settings, options, reference, launch):
        monkeypatch.setattr(module, "WorkerSettings", Tagged)


@pytest.mark.usefixtures("tagged")
def test_another_list_comes_from_the_environment_the_file_and_the_command_line(tmp_path: Path) -> None:
    @click.command()
    @options.setting_options(only="tags")
    def command(tags: tuple[str, ...] | None) -> None:
        click.echo(repr(tags))

    (tmp_path / "pulse-trio.toml").write_text('tags = ["b", "a"]\n')
    assert file_settings(tmp_path) == {"tags": ("b", "a")}
    assert environment_settings({"PULSE_TRIO_TAGS": "b, a"}) == {"tags": ("b", "a")}
    assert CliRunner().invoke(command, ["--tags", "b,a"]).output == "('b', 'a')\n"
    assert "--tags A,B,..." in CliRunner().invoke(command, ["--help"]).output
    assert "| `tags` | none | Tags to claim. | `--tags` | `PULSE_TRIO_TAGS` |" in reference.settings_page()
    assert launch.environment_of("", Tagged(tags=("b", "a")), {})["PULSE_TRIO_TAGS"] == "b,a"


@pytest.mark.usefixtures("tagged")
def test_another_list_that_is_none_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "pulse-trio.toml").write_text("tags = 5\n")
    with pytest.raises(ConfigurationError, match="tags must be a list of tags, got 5"):
        file_settings(tmp_path)
    with pytest.raises(ConfigurationError, match="'tags' must be a list of tags, not a single text, got 'mail'"):
        Tagged(tags="mail")  # type: ignore[arg-type]


# The margin


@pytest.mark.parametrize(
    ("given", "margin"),
    [
        ({}, 6.0),
        ({"cleanup": 0}, 1.0),
        ({"cleanup": 2.5}, 3.5),
        ({"cleanup": 100}, 9.7),
        ({"lease": 6.0, "heartbeat": 2.0, "cleanup": 0.5}, 1.5),
        ({"lease": 3.0, "heartbeat": 1.0}, 0.97),
        ({"lease": 0.3, "heartbeat": 0.1}, 0.097),
        # One beat decides from here on.
        ({"lease": 60.0, "heartbeat": 30.0}, 6.0),
        ({"lease": 30.0, "heartbeat": 12.0}, 6.0),
        ({"lease": 8.0, "heartbeat": 4.0}, 2.0),
    ],
)
def test_the_margin_is_cleanup_and_a_second_unless_two_beats_would_not_fit(
    given: dict[str, Any], margin: float
) -> None:
    settings = WorkerSettings(**given)
    assert settings.margin == pytest.approx(margin)
    beats = 1 if settings.one_beat_decides else 2
    assert settings.lease - settings.margin > beats * settings.heartbeat
    assert settings.margin > 0


# Whose file it is

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
SOMEBODY = 12345


def _own_folder(tmp_path: Path) -> Path:
    """A project with a file of its own, and a folder in which a user works."""
    (tmp_path / "pulse-trio.toml").write_text("poll = 2")
    inner = tmp_path / "shared" / "mine"
    inner.mkdir(parents=True)
    return inner


@as_root
@pytest.mark.parametrize("name", ["pulse-trio.toml", "pyproject.toml"])
def test_another_users_file_above_is_passed_over_and_named(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inner = _own_folder(tmp_path)
    planted = inner.parent / name
    planted.write_text("dsn = 'host=theirs'" if name == "pulse-trio.toml" else "[tool.pulse-trio]\ndsn = 'host=theirs'")
    os.chown(planted, SOMEBODY, SOMEBODY)
    with caplog.at_level(logging.WARNING):
        assert file_dsn(inner) is None
        assert file_settings(inner) == {"poll": 2.0}
    (record,) = caplog.records  # once
    assert f"{planted} is ignored" in record.getMessage()
    assert "belongs to another user (uid 12345)" in record.getMessage()
    assert "chown" in record.getMessage()


@as_root
def test_a_link_of_another_users_above_is_passed_over_even_if_it_leads_to_a_file_of_ours(tmp_path: Path) -> None:
    inner = _own_folder(tmp_path)
    (tmp_path / "other.toml").write_text("poll = 9")
    link = inner.parent / "pulse-trio.toml"
    link.symlink_to(tmp_path / "other.toml")
    assert file_settings(inner) == {"poll": 9.0}
    os.chown(link, SOMEBODY, SOMEBODY, follow_symlinks=False)
    assert file_settings(inner) == {"poll": 2.0}


def test_a_file_above_that_every_user_may_write_is_passed_over(tmp_path: Path) -> None:
    inner = _own_folder(tmp_path)
    planted = inner.parent / "pulse-trio.toml"
    planted.write_text("poll = 9")
    planted.chmod(0o666)
    assert file_settings(inner) == {"poll": 2.0}
    # Of one's own, in the folder that one chose, it counts.
    assert file_settings(inner.parent) == {"poll": 9.0}


@as_root
def test_another_users_file_in_the_current_folder_is_an_error_unless_it_says_nothing(tmp_path: Path) -> None:
    inner = _own_folder(tmp_path)
    planted = inner / "pyproject.toml"
    planted.write_text("[tool.other]\nx = 1")
    os.chown(planted, SOMEBODY, SOMEBODY)
    assert file_settings(inner) == {}
    planted.write_text("[tool.pulse-trio]\npoll = 9")
    with pytest.raises(
        ConfigurationError, match=r"pyproject.toml is not used: it belongs to another user \(uid 12345\)"
    ):
        file_settings(inner)


@as_root
def test_under_sudo_the_callers_own_file_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = _own_folder(tmp_path)
    os.chown(tmp_path / "pulse-trio.toml", SOMEBODY, SOMEBODY)
    assert file_settings(inner) == {}
    monkeypatch.setenv("SUDO_UID", str(SOMEBODY))
    assert file_settings(inner) == {"poll": 2.0}
