"""What the web page costs on a large database: p50 and p95 of every page and of its JSON twin, and the part of a core that
PostgreSQL spends while a page is open.

    python benchmarks/pages.py                                   # 5 million live jobs and 5 million finished ones
    python benchmarks/pages.py --live 200000 --finished 200000   # smaller
    python benchmarks/pages.py --browser                         # in Chromium too: first byte, first paint, complaints
    python benchmarks/pages.py --json

The rows are written straight into the tables; `pulse-trio web` is a process of its own. The requests come one after the other
over one connection, as a browser's do. Every row names the pages' part of PostgreSQL's CPU, from /proc (Linux). With
`--browser` (it needs playwright and chromium), every page is opened in Chromium too; the exit status is 1 if its console, a
script or the Content-Security-Policy complains of anything.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import psycopg

from common import Report, open_server, parser, percentile, progress, table
from page_browser import COLUMNS, visits

if TYPE_CHECKING:
    from collections.abc import Generator

    from common import Row

QUESTION = "What do the pages of `pulse-trio web` cost on a large database?"
TICKS = os.sysconf("SC_CLK_TCK")
QUEUES, KINDS, DAYS = 20, 50, 7
LIVE = """
INSERT INTO pulse.job (kind, queue, priority, run_at, created_at, args, state, attempt, key)
SELECT 'kind-' || n %% %(kinds)s, 'queue-' || n %% %(queues)s, n %% 3, now() + (n %% 7200 - 3600) * interval '1 s',
       now() - interval '2 h', json_build_object('user_id', n, 'text', 'a text of some length'),
       CASE WHEN n %% 50 = 0 THEN 3 ELSE 1 END, CASE WHEN n %% 50 = 0 THEN 1 ELSE 0 END,
       CASE WHEN n %% 20 = 1 THEN 'tenant-' || n %% 97 END
FROM generate_series(%(first)s::bigint, %(last)s::bigint) n"""
FINISHED = """
INSERT INTO pulse.job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures, max_attempts,
                               priority, state, queue, kind, args, result, error)
SELECT n, at, at - interval '1 s', at - interval '2 s', at - interval '3 s', 7, 1, 0, 20, 0,
       CASE WHEN n %% 100 = 0 THEN 5 WHEN n %% 101 = 0 THEN 6 ELSE 4 END,
       'queue-' || n %% %(queues)s, 'kind-' || n %% %(kinds)s,
       json_build_object('user_id', n), CASE WHEN n %% 100 <> 0 AND n %% 101 <> 0 THEN '"done"'::json END,
       CASE WHEN n %% 100 = 0 THEN 'ValueError: no luck' END
FROM generate_series(%(first)s::bigint, %(last)s::bigint) n,
     LATERAL (SELECT now() - (%(end)s::bigint - n) * (%(days)s * 86400.0 / %(count)s) * interval '1 s' AS at) t"""
FAILED = """
INSERT INTO pulse.attempt (job_id, attempt, session, started_at, ended_at, outcome, error)
SELECT d.id, 1, 7, d.started_at, d.finished_at, 'failed', d.error FROM pulse.job_archive d WHERE d.state = 5"""
PAGES = {
    "/": "/api/overview",
    "/jobs": "/api/jobs",
    "/jobs?state=dead": "/api/jobs?state=dead",
    "/jobs?state=available&queue=queue-3": "/api/jobs?state=available&queue=queue-3",
    "/jobs/{live}": "/api/jobs/{live}",
    "/jobs/{finished}": "/api/jobs/{finished}",
    "/queues": "/api/queues",
    "/workers": "/api/workers",
    "/schedules": "/api/schedules",
    "/batches": "/api/batches",
    "/doctor": "/api/doctor",
}
CHUNK = 500_000


def fill(dsn: str, live: int, finished: int) -> tuple[int, int]:
    """Writes the rows, analyzed and vacuumed. Returns the id of a live job and of a finished one."""
    common = {"queues": QUEUES, "kinds": KINDS, "days": DAYS, "count": max(finished, 1), "end": finished}
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SELECT pulse.upkeep(%s)", [f"{DAYS + 1} days"])
        # Days that have passed have no partitions on a new database.
        for back in range(DAYS, 0, -1):
            for parent in ("job_archive", "attempt"):
                connection.execute(
                    f"""DO $$ DECLARE day date := (now() AT TIME ZONE 'UTC')::date - {back}; BEGIN
                    EXECUTE format('CREATE TABLE IF NOT EXISTS pulse.%I PARTITION OF pulse.{parent}'
                      ' FOR VALUES FROM (%L) TO (%L)',
                      '{parent}_' || to_char(day, 'YYYYMMDD'), day::timestamp AT TIME ZONE 'UTC',
                      (day + 1)::timestamp AT TIME ZONE 'UTC'); END $$""".encode()
                )
        for text, count in ((FINISHED, finished), (LIVE, live)):
            for first in range(1, count + 1, CHUNK):
                last = min(first + CHUNK - 1, count)
                # The ids of finished jobs come first, as they do in life.
                connection.execute(text.encode(), common | {"first": first, "last": last})
                progress(f"{last:,} of {count:,} {'finished' if text is FINISHED else 'live'} jobs")
            connection.execute("SELECT setval(pg_get_serial_sequence('pulse.job', 'id'), greatest(%s, 1))", [count])
        connection.execute(FAILED)
        connection.execute("VACUUM ANALYZE pulse.job")
        connection.execute("ANALYZE pulse.job_archive, pulse.attempt")
        row = connection.execute("SELECT max(id) FROM pulse.job").fetchone()
        assert row is not None
        return row[0] - 3, max(finished - 3, 1)


@contextmanager
def serving(dsn: str) -> Generator[int]:
    """`pulse-trio web` on a free port, which is yielded."""
    program = str(Path(sysconfig.get_path("scripts")) / "pulse-trio")
    command = [program, "web", "--port", "0", f"--dsn={dsn}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if found := re.search(r"the web page is at http://[^:]+:(\d+)/", line):
                    break
            else:
                raise SystemExit("pulse-trio web did not start")
            yield int(found[1])
        finally:
            process.terminate()


def ask(connection: http.client.HTTPConnection, path: str) -> tuple[int, float, int]:
    """The status, the milliseconds, and the bytes of one request."""
    began = time.perf_counter()
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read()
    return answer.status, (time.perf_counter() - began) * 1000, len(body)


def measure(port: int, path: str, times: int) -> Row:
    """One page: the first answer apart, because it warms the caches."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    status, first, size = ask(connection, path)
    if status != 200:
        return {"page": path, "status": status}
    took = [ask(connection, path)[1] for _ in range(times)]
    connection.close()
    return {
        "page": path,
        "status": status,
        "first_ms": round(first, 1),
        "p50_ms": round(percentile(took, 0.5), 1),
        "p95_ms": round(percentile(took, 0.95), 1),
        "kB": round(size / 1000, 1),
    }


def cpu_of(pid: int) -> float:
    """CPU seconds of a server and of all its processes, those that have ended included."""
    total = 0.0
    for each in (pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        # utime and stime; of the postmaster also cutime and cstime: its children's that have ended.
        total += sum(map(int, fields[11:15] if each == pid else fields[11:13])) / TICKS
    return total


def open_page(port: int, path: str, postmaster: int, seconds: float) -> Row | None:
    """PostgreSQL's part of a core while the live region of a page is open; None where the page has none."""
    page = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    page.request("GET", path)
    found = re.search(r'data-live="([^"]+)"', page.getresponse().read().decode())
    if found is None:
        return None
    stop, heard = Event(), [0]
    stream = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds + 30)
    stream.request("GET", found[1].replace("&amp;", "&"), headers={"Accept": "text/event-stream"})
    answer = stream.getresponse()

    def listen() -> None:
        # Closed under our hands at the end, http.client trips over itself.
        with suppress(OSError, ValueError, AttributeError):
            while not stop.is_set() and (line := answer.readline()):
                heard[0] += line.startswith(b"data:")

    thread = Thread(target=listen, daemon=True)
    thread.start()
    time.sleep(2)
    before, began, events = cpu_of(postmaster), time.perf_counter(), heard[0]
    time.sleep(seconds)
    used, took = cpu_of(postmaster) - before, time.perf_counter() - began
    stop.set()
    stream.close()
    return {"open page": path, "part of a core": round(used / took, 4), "lines": heard[0] - events}


def idle(postmaster: int, seconds: float) -> float:
    """PostgreSQL's part of a core with no page open."""
    before, began = cpu_of(postmaster), time.perf_counter()
    time.sleep(seconds)
    return round((cpu_of(postmaster) - before) / (time.perf_counter() - began), 4)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--live", type=int, help="live jobs; usually 5 million")
    options.add_argument("--finished", type=int, help="finished jobs; usually 5 million")
    options.add_argument("--times", type=int, default=50, help="requests of each page")
    options.add_argument("--seconds", type=float, default=20.0, help="how long a page is open")
    options.add_argument("--browser", action="store_true", help="open every page in Chromium too")
    options.add_argument("--visits", type=int, default=20, help="how often Chromium opens each page")
    options.add_argument("--json", action="store_true", help="print one JSON document")
    given = options.parse_args()
    usual = 50_000 if given.quick else 5_000_000
    rows = {
        "live": usual if given.live is None else given.live,
        "finished": usual if given.finished is None else given.finished,
    }
    with open_server() as server, server.database() as dsn:
        began = time.perf_counter()
        live, finished = fill(dsn, **rows)
        filled = round(time.perf_counter() - began, 1)
        postmaster = int((server.data_folder / "postmaster.pid").read_text().split()[0])
        with serving(dsn) as port:
            names = [each for pair in PAGES.items() for each in pair]
            pages = [measure(port, name.format(live=live, finished=finished), given.times) for name in names]
            opened = [
                row
                for path in ("/", "/queues", "/workers")
                if (row := open_page(port, path, postmaster, given.seconds))
            ]
            time.sleep(3)
            rest = idle(postmaster, given.seconds)
            paths = [path.format(live=live, finished=finished) for path in [*PAGES, "/enqueue"]]
            seen = visits(port, paths, given.visits) if given.browser else []
        found: dict[str, Any] = {
            **rows, "filled_s": filled, "load": os.getloadavg()[0],
            "pages": pages, "open": opened, "idle": rest, "browser": seen,
        }  # fmt: skip
        report = Report(
            "pages", QUESTION, f"{rows['live']:,} live and {rows['finished']:,} finished jobs", given, server
        )
        report.finish(found)
    if given.json:
        print(json.dumps(found, indent=2))
    else:
        print(table(pages, {name: name for name in ("page", "status", "first_ms", "p50_ms", "p95_ms", "kB")}))
        print()
        print(table(opened, {name: name for name in ("open page", "part of a core", "lines")}))
        print(f"\nno page open: {rest} of a core; load of the machine: {found['load']:.1f}")
        if seen:
            print(f"\n{table(seen, COLUMNS)}")
    return int(any(row["complaints"] for row in seen) or any(row["status"] != 200 for row in pages))


if __name__ == "__main__":
    sys.exit(main())
