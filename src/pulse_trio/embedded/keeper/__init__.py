"""The keeper: the one process that owns a shared embedded PostgreSQL, from `initdb` to its fast shutdown.

This package runs as a separate program, and imports only the standard library (and itself, relatively): importing
`pulse_trio` would take a third of the second in which the server has to start.

**Theory.** Users and keeper coordinate by file locks, which the kernel releases however a process dies:

- `users`: every user holds it shared. The keeper waits for it exclusively, so the lock itself says that the last user has
left,
  without any message. While the keeper has it, newcomers wait for it: no user joins a server that is stopping.
- `gate`: held while a user joins or leaves. The keeper inherits the starting user's gate and releases it only when the server
is
  ready: a user that is killed while the server starts leaves nothing half-started to the next one.
- `present`: also held shared by every user, but no keeper waits for it; a leaving user checks with it whether it is the last.
- `keeper`: held exclusively for the keeper's life, so "is there a keeper?" and "wait until it has ended" are lock operations
too.

The server's stderr is a pipe read by the keeper: readiness is a line in it, and end-of-file means that *every* server
process has gone, which is when a crashed server can be restarted.

**Which user runs it.** PostgreSQL refuses uid 0. Started by root, the keeper moves itself into a user namespace in which root
appears as another uid: no file changes owner, no user is created, and a folder under a 0700 home works. Where namespaces are
refused (most containers), only the server runs as `nobody`; files that `nobody` cannot reach (the binaries in root's home,
the project folder) are copied to, or kept in, a private folder in the temporary directory, and a notice says so.

**Trade-offs.** PostgreSQL is the keeper's child rather than `pg_ctl start`'s orphan: this makes its end visible, at the price
that the log passes through Python. Locks, rather than a socket with a count of connections, ensure that no newcomer meets a
keeper that has just decided to end.

**Known flaws.** A keeper killed with SIGKILL leaves its server running until the next user comes or the last one
leaves. A manual `pg_ctl stop` is respected: the server comes back with the next user, not by itself.
"""
