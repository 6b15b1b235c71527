"""A worker that kills itself at one await of its handler: the n-th time the handler's task stops or goes on.

Run as a program with a DSN it forks a worker for each place in turn, until one outlives its job, and prints how many died.
"""

import os
import signal
import sys

import trio

from pulse_trio import Handlers, Job, Worker

handlers = Handlers()
place: int | None = None


class Killer(trio.abc.Instrument):
    """Counts the stops and steps of one task."""

    def __init__(self, task: trio.lowlevel.Task, place: int) -> None:
        self._task = task
        self._left = place

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._count(task)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self._count(task)

    def _count(self, task: trio.lowlevel.Task) -> None:
        if task is self._task:
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1


@handlers.job
async def pay(job: Job) -> None:
    if place is not None:
        trio.lowlevel.add_instrument(Killer(trio.lowlevel.current_task(), place))
    await trio.lowlevel.checkpoint()
    async with job.transaction() as tx:
        await tx.execute("INSERT INTO public.ledger VALUES (%s, %s)", [job.id, 0])
        await trio.sleep(0.001)
        async with tx.transaction():
            await tx.execute("UPDATE public.ledger SET attempt = %s WHERE job = %s", [job.attempt, job.id])
        tx.result = job.attempt
    await trio.lowlevel.checkpoint()


def main(dsn: str) -> None:
    global place
    for number in range(1000):
        pid = os.fork()
        if pid == 0:
            place = number
            trio.run(Worker(handlers, dsn, burst=True, watch=False, queues=[f"q{number}"]).run)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            print(number)  # noqa: T201 -- what the test reads
            return


if __name__ == "__main__":
    main(sys.argv[1])
