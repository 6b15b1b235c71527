"""The documentation is true: its code blocks run, and everything that has a name is described.

In Markdown, a comment before a block says what it is: `<!-- file: app.py -->` writes it into the page's folder,
`<!-- sql -->` runs it on a migrated database. The lines of a `console` block that begin with `$ ` are run in that folder in
turn; what follows each is its output (`...` stands for any). After the language, `no-run` leaves a block alone, `exit=2`
expects that exit code, and `until-done` repeats the command until no job waits.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shlex
import subprocess
import tomllib
import typing
from contextlib import AsyncExitStack
from pathlib import Path

import psycopg
import pytest
import trio

import pulse_trio
from pulse_trio import embedded, errors, handlers, migrate, observe, postgres, states
from pulse_trio.embedded import default_folder, open_embedded
from pulse_trio.testing.faults.processes import Processes, Running, clean_environment, open_processes
from support.forking import Forker, open_forker, search_path

if typing.TYPE_CHECKING:
    from collections.abc import Generator

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(?:<!-- (?P<note>[^>]*) -->\n)?^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
FOR_THE_SHELL = re.compile(r"[|&;<>$`*?(){}\\~!#\[\]\n]")
PAGES_THAT_RUN = [
    "README.md",
    "docs/tutorial/first-worker.md",
    "docs/tutorial/an-order-that-waits.md",
    "docs/how-to/django.md",
    "docs/how-to/django-tasks.md",
    "docs/how-to/batches.md",
    "docs/how-to/durable-nursery.md",
    "docs/how-to/enqueue.md",
    "docs/how-to/fastapi-sqlalchemy.md",
    "docs/how-to/web-frameworks.md",
    "docs/how-to/periodic.md",
    "docs/how-to/results.md",
    "docs/how-to/retries.md",
    "docs/how-to/limits.md",
    "docs/how-to/handlers.md",
    "docs/how-to/large-payloads.md",
    "docs/how-to/leases.md",
    "docs/how-to/metrics.md",
    "docs/how-to/logs.md",
    "docs/how-to/middleware.md",
    "docs/how-to/queues.md",
    "docs/how-to/resources.md",
    "docs/how-to/exactly-once.md",
    "docs/how-to/steps.md",
    "docs/how-to/cancel.md",
    "docs/how-to/change-durable-code.md",
    "docs/how-to/inspect.md",
    "docs/how-to/wait-for-events.md",
    "docs/how-to/test-a-web-app.md",
    "docs/how-to/testing.md",
    "docs/how-to/survive.md",
    "docs/how-to/roles.md",
    "docs/how-to/audit.md",
    "docs/how-to/traces.md",
    "docs/how-to/sentry.md",
]


def blocks(page: str) -> list[re.Match[str]]:
    return list(BLOCK.finditer((ROOT / page).read_text(encoding="utf-8")))


@pytest.fixture(scope="session")
def made_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an embedded PostgreSQL with the schema, which is stopped. A copy of it costs a fifth of a new one."""
    folder = tmp_path_factory.mktemp("embedded")
    folder.chmod(0o711)  # where root runs PostgreSQL as `nobody`, who has to come through
    with embedded.embedded_server(folder / "pg") as server:
        migrate.migrate_sync(server.dsn)
    return folder / "pg"


@pytest.fixture(scope="module")
def forker_that_goes_on() -> Generator[Forker]:
    with open_forker(clean_environment(), "goes-on") as forker:
        yield forker


def copy_of(made_before: Path, folder: Path) -> None:
    """A copy with the files' owners, which need not be the tests' user."""
    folder.mkdir(parents=True)
    subprocess.run(["cp", "-a", str(made_before / "data"), str(folder)], check=True)


@pytest.mark.parametrize("page", PAGES_THAT_RUN)
async def test_the_pages_commands_do_what_the_page_says(
    page: str, processes: Processes, scripts: Processes, made_before: Path, forker: Forker, forker_of_pytest: Forker
) -> None:
    async with AsyncExitStack() as stack:
        tests = await stack.enter_async_context(open_processes(processes.folder, forker_of_pytest))
        forks = Forks(processes, tests, scripts, search_path(forker)) if page != PAGES_THAT_RUN[0] else None
        if page != PAGES_THAT_RUN[0]:
            await trio.to_thread.run_sync(copy_of, made_before, default_folder(processes.folder))
            # One start of the embedded PostgreSQL a page. Without this user each command starts and stops it, as on the first.
            await stack.enter_async_context(open_embedded(default_folder(processes.folder)))
        for block in blocks(page):
            language, *flags = block["info"].split()
            if (block["note"] or "").startswith("file: "):
                (processes.folder / block["note"].removeprefix("file: ").strip()).write_text(block["body"])
            elif language == "console" and "no-run" not in flags:
                await run_console(processes, block["body"], flags, forks)


def files_of(page: str) -> dict[str, str]:
    """The files that a page has its reader write."""
    noted = [(block["note"] or "", block["body"]) for block in blocks(page)]
    return {note.removeprefix("file: ").strip(): body for note, body in noted if note.startswith("file: ")}


def modules_of(page: str) -> list[str]:
    """Those that have handlers."""
    return [name[:-3] for name, body in files_of(page).items() if name.endswith(".py") and "Handlers(" in body]


@pytest.mark.parametrize("page", [page for page in PAGES_THAT_RUN if modules_of(page)])
async def test_a_reader_may_go_on_from_the_page_by_awaiting_results_in_an_asyncio_program(
    page: str, tmp_path: Path, dsn: str, forker_that_goes_on: Forker
) -> None:
    for name, body in files_of(page).items():
        (tmp_path / name).write_text(body)
    async with open_processes(tmp_path, forker_that_goes_on) as processes:
        done = await processes.command(dsn, *modules_of(page))
        assert await done.ended(within=120) == 0, done.report()
        assert done.stdout


async def run_console(processes: Processes, body: str, flags: list[str], forks: Forks | None) -> None:
    code = next((int(f.removeprefix("exit=")) for f in flags if f.startswith("exit=")), 0)
    for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        while True:
            running = await start(processes, command, forks)
            assert await running.ended(within=60) == code, running.report()
            if "until-done" not in flags or not await waiting(processes):
                break
        if code == 0:
            assert matches(expected, running.stdout), f"$ {command}\nexpected:\n{expected}\n{running.report()}"


@dataclasses.dataclass(frozen=True)
class Forks:
    """What starts commands as forks of a process that has imported what they need."""

    commands: Processes
    """Pulse-trio's."""
    tests: Processes
    """Runs of pytest."""
    scripts: Processes
    """Of a page's own."""
    path: str
    """Where a shell finds what stands for the programs."""


async def start(processes: Processes, command: str, forks: Forks | None) -> Running:
    """As a reader's shell does it. With `forks`, a command of pulse-trio's, a script or a run of pytest is a fork of a process
    that has imported what it needs; the shell is left out where there is nothing for it to do. On the first page all are the
    installed program."""
    if forks is not None and not FOR_THE_SHELL.search(re.sub(r"'[^']*'", "", command)):
        match shlex.split(command):
            case ["pulse-trio", *arguments]:
                return await forks.commands.command(*arguments)
            case ["python", "-m", "pytest", *arguments]:
                return await forks.tests.command(*arguments, env={"PATH": search_path()})
            case ["python", script, *arguments] if script.endswith(".py"):
                return await forks.scripts.command(script, *arguments, env={"PATH": search_path()})
    path = search_path() if forks is None else forks.path
    return await processes.start("bash", "-c", command, env={"PATH": path})


async def waiting(processes: Processes) -> bool:
    found = json.loads(await processes.run("jobs", "list", "--json"))
    return any(job["state"] in ("available", "scheduled", "retryable", "running") for job in found)


def matches(expected: str, printed: str) -> bool:
    pattern = r".*".join(re.escape(part) for part in expected.strip().split("..."))
    return not expected.strip() or re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


def test_the_sql_on_the_sql_page_runs(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for block in blocks("docs/reference/sql.md"):
            if block["note"] == "sql":
                connection.execute(block["body"].encode())
        found = connection.execute("SELECT kind, queue, args FROM pulse.jobs WHERE kind = 'send_welcome'").fetchall()
    assert found == [("send_welcome", "mail", {"user_id": 42})]


@pytest.mark.parametrize(
    "view", ["jobs", "attempts", "cancellations", "workers", "queues", "schedules", "fires", "audit", "quarantine"]
)
def test_every_column_of_a_view_is_on_the_sql_page(dsn: str, view: str) -> None:
    page = (ROOT / "docs/reference/sql.md").read_text(encoding="utf-8")
    with psycopg.connect(dsn) as connection:
        columns = [c.name for c in connection.execute(f"SELECT * FROM pulse.{view} LIMIT 0".encode()).description or ()]
    (described,) = re.findall(rf"^`pulse\.{view}`.*?(?=\n\n)", page, re.MULTILINE | re.DOTALL)
    assert [name for name in columns if f"`{name}`" not in described] == []


def test_the_diagram_of_states_is_the_table() -> None:
    page = (ROOT / "docs/explanation/how-it-works.md").read_text(encoding="utf-8")
    drawn = set(re.findall(r"^    (\w+) --> (\w+): (.+)$", page, re.MULTILINE))
    assert drawn == {(s, t, e) for s, moves in states.TRANSITIONS.items() for e, t in moves.items()}


def test_every_event_and_its_fields_are_documented() -> None:
    page = (ROOT / "docs/reference/events.md").read_text(encoding="utf-8")
    for event in typing.get_args(observe.Event):
        (row,) = re.findall(rf"^\| `{event.__name__}` .*$", page, re.MULTILINE)
        assert all(f"`{field.name}`" in row for field in dataclasses.fields(event))


def test_every_error_and_its_exit_code_are_documented() -> None:
    page = (ROOT / "docs/reference/errors.md").read_text(encoding="utf-8")
    for error in public_errors():
        family = error.__bases__[0].__name__
        assert re.search(rf"^\| `{error.__name__}` \| `{family}` \| {error.exit_code} \|", page, re.MULTILINE), error


def public_errors() -> set[type[errors.PulseTrioError]]:
    public = (pulse_trio, errors, handlers, postgres, embedded, migrate)
    classes = {
        e for module in public for name, e in vars(module).items() if inspect.isclass(e) and not name.startswith("_")
    }
    return {e for e in classes if issubclass(e, errors.PulseTrioError)}


def test_every_word_with_which_we_begin_a_jobs_error_is_documented() -> None:
    page = (ROOT / "docs/reference/errors.md").read_text(encoding="utf-8").partition("## In a job's error")[2]
    source = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("store", "worker", "sql", "handlers")
        for path in (ROOT / "src/pulse_trio" / folder).rglob("*.[ps][yq]*")
        if path.suffix in (".py", ".sql")
    )
    source += (ROOT / "src/pulse_trio/states.py").read_text(encoding="utf-8")
    begun = set(re.findall(r"""(?<!"")f?["']([A-Z][a-z]+(?:[A-Z][a-z]+)+): """, source))
    assert begun >= {"BadRow", "CrashLimit", "HandlerStuck", "ResultTooSlow", "TimeoutError"}
    assert begun <= set(re.findall(r"^\| `([\w ]+):` \|", page, re.MULTILINE))


def test_every_link_between_pages_leads_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_map_of_the_code_has_every_module_in_the_order_of_its_layers() -> None:
    page = (ROOT / "docs/contributing/architecture.md").read_text(encoding="utf-8")
    lines, _, rooms = page.partition("```\n")[2].partition("```\n")
    drawn = re.findall(r"^(\w+)(?:/|\.py) ", lines, re.MULTILINE)
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ][0]
    assert drawn == [room for layer in contract["layers"] for room in layer.split(" | ")]
    source = ROOT / "src" / "pulse_trio"
    modules = {path.relative_to(source) for path in source.rglob("*.py") if not path.stem.startswith("__")}
    assert {path.stem for path in modules if path.parent == Path()} <= set(drawn)
    elsewhere = {path.stem for path in modules if path.parent != Path()}
    named = set(re.findall(r"`(\w+)`", rooms.partition("## Package by package")[2].partition("\n## ")[0]))
    assert elsewhere - named == set()
    assert named - elsewhere == {"enqueue_many"}
