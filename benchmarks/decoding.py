"""What would the next factor bring: how much of a job is the way of a claim from PostgreSQL into Python?

    python benchmarks/decoding.py [--quick]

Rows as a claim answers them, 500 at a time, become `Claim`s in several ways, in turn; CPU of this process and of PostgreSQL
for each row, which a busy machine does not change much:

- text: as the worker does it, psycopg's C code and a list of Claims in Python;
- binary: the same rows in PostgreSQL's binary format;
- one document: PostgreSQL makes one JSON of all rows, msgspec's C code makes Claims of it (a decoder wholly in C);
- columns: PostgreSQL makes one array a column, Python puts rows together again;
- not decoded: the answer is received and dropped, which is what the best decoder could not undercut.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import psycopg

from common import Report, Row, Server, in_turn, medians, open_server, parser, rounds
from metering import cpu_of
from pulse_trio.jobs import Claim
from pulse_trio.store.claimed import claims_of

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 500
NAMES = "id, attempt, max_attempts, failures, priority, run_at, queue, kind, args, options"
MADE = f"""
CREATE UNLOGGED TABLE answer AS
SELECT n::bigint AS id, 1 AS attempt, 20 AS max_attempts, 0 AS failures, 0::smallint AS priority,
       (now() + n * interval '1 us')::text AS run_at, 'default'::text AS queue, 'noop'::text AS kind,
       '{{}}'::text AS args, NULL::text AS options
FROM generate_series(1, {SIZE}) AS n
"""
COLUMNS = {
    "way": "way",
    "client_us": "client CPU us/row",
    "postgres_us": "PostgreSQL CPU us/row",
    "rounds": "rounds",
}
_document = msgspec.json.Decoder(list[Claim])
Connection = psycopg.Connection[tuple[object, ...]]


def rows(connection: Connection, *, binary: bool) -> list[Claim]:
    return claims_of(
        connection.execute(f"SELECT {NAMES} FROM answer".encode(), prepare=True, binary=binary).fetchall(), 1
    )


def one_document(connection: Connection) -> list[Claim]:
    query = "SELECT json_agg(a)::text FROM (SELECT *, 1 AS session FROM answer) AS a"
    found = connection.execute(query.encode(), prepare=True).fetchone()
    assert found is not None
    return _document.decode(str(found[0]))


def columns(connection: Connection) -> list[Claim]:
    arrays = ", ".join(f"array_agg({name.strip()})" for name in NAMES.split(","))
    found = connection.execute(f"SELECT {arrays} FROM answer".encode(), prepare=True, binary=True).fetchone()
    assert found is not None
    return claims_of(list(zip(*found, strict=True)), 1)  # type: ignore[arg-type]


def not_decoded(connection: Connection) -> list[Claim]:
    connection.execute(f"SELECT {NAMES} FROM answer".encode(), prepare=True)
    return []


WAYS: dict[str, Callable[[Connection], list[Claim]]] = {
    "text": partial(rows, binary=False),
    "binary": partial(rows, binary=True),
    "one document": one_document,
    "columns, binary": columns,
    "not decoded": not_decoded,
}


def run(server: Server, times: int, way: Callable[[Connection], list[Claim]]) -> Row:
    with server.database(migrated=False) as dsn, psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(MADE.encode())
        expected = rows(connection, binary=False)
        for _ in range(20):
            way(connection)
        found = way(connection)
        assert not found or [claim.id for claim in found] == [claim.id for claim in expected]
        pid = connection.info.backend_pid
        postgres, client = cpu_of(pid), time.process_time()
        for _ in range(times):
            way(connection)
        used = time.process_time() - client, cpu_of(pid) - postgres
    per = times * SIZE
    return {"client_us": used[0] / per * 1e6, "postgres_us": used[1] / per * 1e6}


def main() -> None:
    options = parser(__doc__).parse_args()
    with open_server() as server:
        ways = {name: partial(run, server, 200 if options.quick else 1_500, way) for name, way in WAYS.items()}
        results = in_turn(ways, rounds(options), show=lambda r: f"{r['client_us']:.2f} + {r['postgres_us']:.2f} us")
        found = medians(results, ["client_us", "postgres_us"])
        report = Report("decoding", "What does it cost to bring a claim into Python?", f"{SIZE} rows", options, server)
        report.say(found, COLUMNS)
        report.finish({"medians": found, "runs": results})


if __name__ == "__main__":
    main()
