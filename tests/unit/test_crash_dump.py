"""Reading what `faulthandler` wrote; that it is written is tried on real processes (tests/acceptance/test_supervisor.py)."""

from __future__ import annotations

import json
import os

import pytest

from pulse_trio.worker.processes.crash_dump import CrashDump, Words, read_dump

PLACES = {("/srv/app.py", "crunch"): "numbers.crunch", ("/srv/app.py", "outer"): "outer"}
LOOP = """\
Current thread 0x00007ff18349cb80 (most recent call first):
  File "/lib/trio/_core/_io_epoll.py", line 230 in get_events
  File "/lib/trio/_core/_run.py", line 2600 in unrolled_run
"""
HANDLER = """\
Current thread 0x00007ff18349cb80 (most recent call first):
  File "/srv/lib.py", line 7 in sum
  File "/srv/app.py", line 12 in crunch
  File "/srv/app.py", line 20 in outer
  File "/srv/src/pulse_trio/worker/jobs/runner.py", line 99 in run
  File "/lib/trio/_core/_run.py", line 2600 in unrolled_run
"""


def thread(function: str) -> str:
    return f"""\
Thread 0x00007ff1829fa6c0 (most recent call first):
  File "/lib/wait.py", line ??? in wait
  File "/srv/app.py", line 5 in {function}

"""


def test_the_innermost_handler_on_the_loops_stack_is_named_and_the_stack_is_the_users() -> None:
    assert read_dump(f"Fatal Python error: Aborted\n\n{thread('outer')}{HANDLER}", PLACES) == Words(
        '  File "/srv/app.py", line 20, in outer\n'
        '  File "/srv/app.py", line 12, in crunch\n'
        '  File "/srv/lib.py", line 7, in sum',
        ("numbers.crunch",),
    )


def test_when_the_loop_only_waits_every_thread_with_a_handler_is_named() -> None:
    words = read_dump(thread("crunch") + thread("nobody") + thread("outer") + thread("crunch") + LOOP, PLACES)
    assert words.kinds == ("numbers.crunch", "outer")
    assert words.stack.count("line ???, in wait") == 3


def test_without_a_handler_the_loops_own_stack_is_given() -> None:
    words = read_dump(thread("nobody") + LOOP, PLACES)
    assert words.kinds == ()
    assert words.stack.splitlines()[-1] == '  File "/lib/trio/_core/_io_epoll.py", line 230, in get_events'


@pytest.mark.parametrize("text", ["", "\n", "{", "[]\n", '{"a": 1}\n', "null\n", '{"a": ["f"]}\n' + HANDLER])
def test_what_nobody_understands_is_nothing(text: str) -> None:
    words = CrashDump()
    os.write(words.fileno(), text.encode())
    assert words.read() == Words()
    words.close()


def test_the_file_has_the_places_and_then_the_frames() -> None:
    words = CrashDump()
    os.write(words.fileno(), json.dumps({"numbers.crunch": ["/srv/app.py", "crunch"]}).encode() + b"\n")
    assert words.read() == Words()
    os.write(words.fileno(), HANDLER.encode())
    assert words.read().kinds == ("numbers.crunch",)
    words.close()
