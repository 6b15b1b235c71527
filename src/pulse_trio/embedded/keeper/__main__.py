"""The keeper process: start the server, report, stay until the last user has left."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import quote

from .cluster import check_data, initialise, run_program, stop_orphan
from .identity import Identity, choose_identity
from .order import Order, StartError, description_file, lock_file, open_log
from .places import PORT, Places, choose_places
from .server import Server

if TYPE_CHECKING:
    from collections.abc import Mapping


def detach() -> None:
    """Detach from the user's process, so that it has no child to wait for and no zombie."""
    if os.fork() > 0:
        os._exit(0)


def describe(places: Places, identity: Identity) -> dict[str, Any]:
    """The server's description for users; written to server.json for those that join."""
    version = run_program("postgres", ["--version"], places, identity).split()[-1]
    dsn = f"postgresql://postgres@/postgres?host={quote(str(places.sockets))}&port={PORT}"
    return {"dsn": dsn, "version": version, "note": places.note, "keeper": os.getpid()}


def prepare(order: Order, at_end: contextlib.ExitStack) -> tuple[Places, Identity]:
    """Choose the identity and the place for the server, and prepare a data folder there."""
    identity = choose_identity(order)
    places = choose_places(order, identity)
    if order.remove is not None and not places.data.is_relative_to(order.remove):
        places.temporary.append(places.data.parent)
    for folder in places.temporary:
        at_end.callback(shutil.rmtree, folder, ignore_errors=True)  # at worst the next start reuses it
    initialise(places, identity)
    check_data(places)
    identity.take_over(places.data)
    stop_orphan(places, identity)
    return places, identity


def start(order: Order, at_end: contextlib.ExitStack) -> tuple[Server, dict[str, Any]]:
    """Start the server and write server.json; adds to `at_end` the clean-up for the keeper's end.

    Raises:
        StartError: with a message for the user.
    """
    try:
        places, identity = prepare(order, at_end)
        description = describe(places, identity)
        # No user reads it before the gate opens. Fallible steps come before the server starts, so that they leave none
        # behind.
        at_end.callback(description_file(order.folder).unlink, missing_ok=True)
        description_file(order.folder).write_text(json.dumps(description))
        server = Server(places, identity, order.settings, open_log(places.log))
        signal.signal(signal.SIGTERM, lambda _number, _frame: threading.Thread(target=server.stop).start())
        if not server.start():
            raise StartError("database", "The embedded PostgreSQL was told to stop while it started.")
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        advice = f"The disk is full: free some space at {order.folder}." if full else f"Look at {order.folder}."
        raise StartError("database" if full else "configuration", f"{advice} ({error})") from error
    return server, description


def tell(order: Order, report: Mapping[str, Any]) -> None:
    """Send the report to the starting user, and open the gate for the others."""
    try:
        with open(order.report, "w") as pipe:
            json.dump(report, pipe)
    except BrokenPipeError:
        pass  # that user died; the next one reads server.json
    os.close(order.gate)


def stop_when_alone(order: Order, server: Server) -> None:
    """Stop the server once no user is left. The lock is kept to the end, so that newcomers wait for a fresh one."""
    users = os.open(lock_file(order.folder, "users"), os.O_RDWR)
    fcntl.flock(users, fcntl.LOCK_EX)
    server.stop()


def remove(folder: Path) -> None:
    """Removes a folder. Under another name first: who waits for a lock in it finds that it is gone, and never a part of it."""
    gone = folder.with_name(f"{folder.name}-ended")
    with contextlib.suppress(OSError):  # its users may have removed it
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def keep(order: Order) -> None:
    """Start the server, report the result, and stay until the last user has left."""
    with contextlib.ExitStack() as at_end:
        if order.remove is not None:
            at_end.callback(remove, order.remove)
        try:
            server, description = start(order, at_end)
        except StartError as error:
            tell(order, {"fault": error.fault, "message": error.message})
            return
        tell(order, description)
        threading.Thread(target=stop_when_alone, args=(order, server), daemon=True).start()
        server.run()


def main() -> NoReturn:
    """Read the order (one JSON object, the last argument) and carry it out, detached."""
    fields: dict[str, Any] = json.loads(sys.argv[2])
    fields["folder"], fields["site"] = Path(fields["folder"]), Path(fields["site"])
    fields["remove"] = None if fields["remove"] is None else Path(fields["remove"])
    order = Order(**fields)
    detach()
    keep(order)
    sys.exit(0)


if __name__ == "__main__":
    main()
