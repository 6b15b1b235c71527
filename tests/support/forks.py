"""The process that forks (forking.py): it imports what commands need, and then forks for each request.

It is started as `python -m support.forks PROGRAM ...`: one of `PROGRAMS`, the numbers of its two sockets, and the address of
the second.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import io
import json
import os
import runpy
import select
import socket
import sys
import sysconfig
import tempfile
import threading
import types
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import trio

from support.forked_children import opens_forks
from support.forking import LONGEST, NUMBER, variables_of_start
from support.prepared import import_tests
from support.stand_ins import become_asked, stand_behind, take

if TYPE_CHECKING:
    from collections.abc import Mapping


def serve() -> tuple[str, list[str]]:
    """Forks for each request. Returns in the forks alone, with the program and its arguments."""
    gc.collect()
    gc.freeze()
    control, listener = (socket.socket(fileno=int(number)) for number in sys.argv[2:4])
    while True:
        for asking in select.select([control, listener], [], [])[0]:
            asked = taken(control, listener) if asking is control else accepted(control, listener)
            if asked is not None:
                return asked
        while reaped():
            pass


def taken(control: socket.socket, listener: socket.socket) -> tuple[str, list[str]] | None:
    """A request of the tests' own process. In the fork alone it is given."""
    asked, ends, _, _ = socket.recv_fds(control, LONGEST, 3)
    if not asked:
        os._exit(0)
    if os.fork() == 0:
        control.close()
        listener.close()
        program, arguments, environment, folder = json.loads(asked)
        if watch(*ends):
            become(environment, folder, *ends)
            return program, arguments
    for end in ends:
        os.close(end)
    return None


def accepted(control: socket.socket, listener: socket.socket) -> tuple[str, list[str]] | None:
    """A request of a program that stands in for another. In the fork alone it is given."""
    line, _ = listener.accept()
    with line:
        if os.fork() > 0:
            return None
        control.close()
        listener.close()
        try:
            asked = take(line)
        except (OSError, ValueError):
            os._exit(1)
        if (pid := os.fork()) > 0:
            for end in asked.descriptors.values():
                os.close(end)
            stand_behind(pid, line, bound=asked.bound)
    become_asked(asked)
    replace_environment(asked.environment)
    return asked.command[0], asked.command[1:]


def watch(status: int, out: int, err: int) -> bool:
    """Forks once more, and tells of the fork's number and its end. Returns in the fork alone: True."""
    pid = os.fork()
    if pid == 0:
        return True
    os.close(out)
    os.close(err)
    try:
        os.write(status, NUMBER.pack(pid))
        os.write(status, NUMBER.pack(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
    except BrokenPipeError:
        pass  # The test has ended without it.
    os._exit(0)


def become(environment: dict[str, str], folder: str, status: int, out: int, err: int) -> None:
    """What a new process has of its own."""
    os.setsid()
    os.dup2(out, 1)
    os.dup2(err, 2)
    for end in (status, out, err):
        os.close(end)
    os.chdir(folder)
    replace_environment(environment)


def replace_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # TMPDIR may be the fork's own


def reaped() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] > 0
    except ChildProcessError:
        return False


def run_commands() -> NoReturn:
    # As the installed program has it.
    scripts = sysconfig.get_path("scripts")
    sys.path[0] = scripts
    import rich.table  # noqa: F401 -- by the commands that make tables

    import pulse_trio.worker.jobs.kinds.child  # noqa: F401 -- by the processes of handlers
    from pulse_trio.cli import main

    started_with = variables_of_start(os.environ)
    program, arguments = serve()
    trio.lowlevel.open_process = opens_forks(sys.argv[4], started_with)
    if program != "pulse-trio":
        run_python(program, *arguments)
    sys.argv = [str(Path(scripts) / "pulse-trio"), *arguments]
    # With which a worker begins anew.
    sys.orig_argv = [sys.executable, *sys.argv]
    try:
        main()
    except SystemExit as end:
        if arguments[:1] != ["run"] and isinstance(end.code, int):
            leave(end.code)
        raise


def run_python(how: str, what: str, *arguments: str) -> NoReturn:
    """`python SCRIPT`, `python -c CODE` or `python -m MODULE`: what it imports is imported in the fork, but for pulse-trio."""
    main = types.ModuleType("__main__")
    vars(main).update(__builtins__=builtins)
    sys.modules["__main__"] = main
    sys.orig_argv = [sys.executable, *([] if how == "python" else [how]), what, *arguments]
    if how == "-m":
        sys.path[0] = str(Path.cwd())
        sys.argv = [what, *arguments]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *arguments]
        exec(compile(what, "<string>", "exec", dont_inherit=True), vars(main))  # noqa: S102 -- as Python does
    else:
        sys.path[0] = str(Path(what).resolve().parent)
        sys.argv = [what, *arguments]
        vars(main).update(__file__=str(Path(what).absolute()))
        exec(compile(Path(what).read_bytes(), what, "exec", dont_inherit=True), vars(main))  # noqa: S102 -- as Python does
    leave(0)
    sys.exit(0)


def run_tests() -> NoReturn:
    """`python -m pytest`, after a run without tests: that imports the plugins as pytest does, with assertions rewritten."""
    import psycopg  # noqa: F401 -- by pulse-trio
    import pytest

    with tempfile.TemporaryDirectory() as empty, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(empty)
        pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", empty, "-c", os.devnull])
        os.chdir("/")
    assert "pulse_trio" not in sys.modules
    _, arguments = serve()
    sys.path[0] = str(Path.cwd())
    sys.argv = [pytest.__file__.replace("__init__", "__main__"), *arguments]
    sys.orig_argv = [sys.executable, "-m", "pytest", *arguments]
    code = int(pytest.console_main())
    leave(code)
    sys.exit(code)


def run_goes_on() -> NoReturn:
    """`python goes_on.py`, which imports a page's modules only once it runs."""
    from support import goes_on

    _, arguments = serve()
    # What stands beside that script is no page's.
    sys.path[0] = "."
    sys.argv = [goes_on.__file__, *arguments]
    sys.orig_argv = [sys.executable, *sys.argv]
    goes_on.run(arguments)
    leave(0)
    sys.exit(0)


def run_worker() -> NoReturn:
    """What xdist starts its workers with: `python -u -c CODE`."""
    imported = import_tests()
    _, arguments = serve()
    if not imported:
        os.execv(sys.executable, [sys.executable, *arguments])  # noqa: S606 -- as xdist does
    run_python("-c", arguments[-1])


PROGRAMS = {"pulse-trio": run_commands, "pytest": run_tests, "goes-on": run_goes_on, "xdist": run_worker}


def leave(code: int) -> None:
    """Ends as Python does, but takes no module apart: that would copy every page that this process shares with the others."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    # What nobody refers to any more warns of what was left open or was not awaited.
    gc.collect()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return  # Python's own end says so.
    os._exit(code)


if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
