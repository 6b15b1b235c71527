"""A database whose tables are published, all of them: nothing of ours fails for want of a key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.stores import Window

if TYPE_CHECKING:
    from support.databases import Databases


def test_every_table_can_be_published_also_those_of_coming_days(databases: Databases) -> None:
    with databases.migrated() as dsn, Window(dsn) as window:
        window.run("CREATE PUBLICATION everything FOR ALL TABLES")
        window.run("SELECT maintain('7 days')")
        for row in window.run("SELECT relname FROM pg_class WHERE relname ~ '^(job_archive|attempt)_[0-9]{8}$'"):
            window.run(f"DROP TABLE {row['relname']}")
        assert window.run("SELECT FROM maintain('7 days')")
        assert not window.run(
            "SELECT c.oid::regclass FROM pg_class c WHERE c.relnamespace = 'pulse'::regnamespace AND c.relkind IN ('r', 'p')"
            " AND c.relreplident = 'd' AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary)"
        )


def test_under_a_publication_jobs_are_retried_deleted_and_maintained(databases: Databases) -> None:
    with databases.migrated() as dsn, Window(dsn) as window:
        window.run("CREATE PUBLICATION everything FOR ALL TABLES")
        retried, deleted, old = (window.enqueue() for _ in range(3))
        window.run("SELECT cancel_jobs(%s)", [retried, deleted, old])
        assert window.value("SELECT moved FROM retry_jobs(%s)", [retried])
        assert window.value("SELECT deleted FROM delete_jobs(%s)", [deleted])
        window.run("UPDATE job_archive SET finished_at = finished_at - interval '30 days' WHERE id = %s", old)
        assert window.run("SELECT FROM job_archive_default")
        window.run("UPDATE maintenance SET maintained_at = '-infinity'")
        window.run("SELECT upkeep('7 days')")
        assert not window.run("SELECT FROM job_archive_default")
        window.run("INSERT INTO queue (name, retention) VALUES ('default', '1 s')")
        window.run("SELECT prune('7 days')")
        assert window.value("SELECT maintained_at > now() - interval '1 minute' FROM maintenance")
