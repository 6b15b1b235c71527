"""The keeper: the one process that owns a shared embedded PostgreSQL, from `initdb` to its fast shutdown.

This package is run as a program of its own, and imports the standard library only (and itself, relatively): importing
`pulse_trio` would cost a third of the second in which the server is to be up.

**Theory.** Users and keeper meet in file locks, which the kernel lets go of however a process dies:

- `users`: every user holds it shared. The keeper blocks on it exclusively, so "the last one left" is a lock granted
  and needs no message from anybody. While the keeper has it, newcomers block on it: nobody joins a server that stops.
- `gate`: held while a user joins or leaves. The starting user's gate is inherited by the keeper, which lets go of it
  only when the server is ready: a user killed while the server starts leaves nothing half-started to the next one.
- `present`: held shared by every user too, but wanted by no keeper; a leaving user tells by it whether it is the last.
- `keeper`: held exclusively for the keeper's life, so "is there a keeper?" and "wait until it has gone" are locks too.

The server's stderr is a pipe read by the keeper: readiness is a line in it, and end-of-file means that *every* server
process has gone, which is the moment from which a crashed server can be started again.

**Who runs it.** PostgreSQL refuses uid 0. Started by root, the keeper moves itself into a user namespace in which root
appears as another uid: no file changes hands, no user is made, and a folder under a 0700 home works. Where namespaces
are refused (most containers), the server alone runs as `nobody`; what `nobody` cannot reach (the binaries in root's
home, the project folder) is copied to, or kept in, a private folder in the temporary directory, and the user is told.

**Trade-offs.** PostgreSQL is the keeper's child rather than `pg_ctl start`'s orphan: that is what makes its end
visible, at the price of the log passing through Python. Locks rather than a socket with a count of connections: no
newcomer can meet a keeper that has just decided to go.

**Known flaws.** A keeper killed with SIGKILL leaves its server running until the next user comes or the last one
leaves. A person's own `pg_ctl stop` is respected: the server comes back with the next user, not by itself.
"""
