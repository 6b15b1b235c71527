"""Drawn handlers as people write them, a saga with a compensation each, played with a fault or two, and what their ledger must
say.

A program is JSON: a list of statements. `["step", a]` does `a`, and is undone by the compensation; `["fails", a, then]` is a
step that always fails, and `then` is what answers it; `["sleep"]`; `["event"]`, which is sent; `["plain", p]`: an await and no
durable call; `["scope", how, body, then]`: a deadline that strikes, because its body ends with a wait that lasts longer;
`["passes", body]`: one that does not; `["children", n, body]`: a durable nursery; `["broken", body, then]`: one whose child
fails; `["inner", body]`: a function with a compensation of its own; `["branch", body, own]`: a durable child that is such a
program itself, beside what the block's body does meanwhile.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import trio
import trio.lowlevel

from pulse_trio import ChildFailed, Discard, InvalidTransition, Job, RetryAfter, StepFailed, SyncClient
from pulse_trio.jobs import CancelRequest
from pulse_trio.states import FINISHED, State
from pulse_trio.store import family

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from support.trees import Trees

Node = list[Any]
ENDS = ("same", "discard", "afresh")
FAULTS = ("cancelled", "timeout", "fails", "lost before", "lost after")
LONG, SHORT, NEVER = 600.0, 0.2, 1e6
"""Seconds of a deadline of a handler that is suspended, which the play lets pass, of one that keeps its slot, and of one that
passes."""
EACH_TIME = "which its history keeps: each attempt ends so"


class Saga(NamedTuple):
    """One program: its statements, how its compensation ends (`ENDS`), and whether its waits suspend it."""

    body: list[Node]
    ends: str
    suspends: bool


class Fault(NamedTuple):
    """What happens once, as this is done for the first time."""

    kind: str
    at: str


class Wrong(Exception):
    """What plain code raises in a program."""


def draw(random: Random) -> Saga:
    """A program."""
    suspends = random.random() < 0.6
    names = iter("abcdefghijklmnopqrstuvwxyz")
    body: list[Node] = [["step", next(names)]]
    body += _body(random, names, suspends=suspends, depth=0)
    return Saga(body, random.choice(ENDS), suspends)


def _body(random: Random, names: Any, *, suspends: bool, depth: int) -> list[Node]:
    return [_node(random, names, suspends=suspends, depth=depth) for _ in range(random.randint(1, 3 - depth))]


def _node(random: Random, names: Any, *, suspends: bool, depth: int) -> Node:
    kinds = ["step", "step", "plain", "fails"]
    if suspends:
        kinds += ["sleep", "event"]
    if depth < 2:
        kinds += ["scope", "scope", "passes", "children", "children", "broken", "inner", "branch"]
    kind = random.choice(kinds)
    match kind:
        case "step":
            return [kind, next(names)]
        case "plain":
            return [kind, f"plain {next(names)}"]
        case "fails":
            return [kind, f"failing {next(names)}", _then(random, names)]
        case "sleep" | "event":
            return [kind]
        case "scope":
            inside = [["step", next(names)]] if random.random() < 0.5 else []
            waits = random.choice(["wait", "never", "children"] if suspends else ["step", "never", "children"])
            how = random.choice(["move_on", "move_on", "fail"])
            return [kind, how, [*inside, [f"long {waits}"]], _then(random, names)]
        case "broken":
            return [kind, [["step", next(names)]] if random.random() < 0.5 else [], _then(random, names)]
        case "inner":
            return [kind, [["step", next(names)], *_body(random, names, suspends=suspends, depth=depth + 1)]]
        case "branch":
            inside = _body(random, names, suspends=suspends, depth=depth + 1)
            own = _body(random, names, suspends=suspends, depth=2) if random.random() < 0.5 else []
            return [kind, [["step", next(names)], *inside], own]
        case "children":
            return [kind, random.randint(1, 3), _body(random, names, suspends=suspends, depth=2)]
        case _:
            return [kind, _body(random, names, suspends=suspends, depth=depth + 1)]


def _then(random: Random, names: Any) -> Node:
    """What answers a failure or a deadline that has struck."""
    match random.choice(["raise", "discard", "from", "step", "nothing"]):
        case "step":
            return ["step", next(names)]
        case other:
            return [other]


def places(saga: Saga) -> list[str]:
    """What is done in it, and undone, in words: where faults may strike."""
    found: list[str] = []

    def look(nodes: list[Node]) -> None:
        for node in nodes:
            if node[0] in ("step", "plain"):
                found.append(node[1])
            for part in node[1:]:
                if isinstance(part, list):
                    look([part] if part and isinstance(part[0], str) else part)

    look(saga.body)
    return [*found, *(f"undo {name}" for name in found if not name.startswith("plain"))]


class Play:
    """A program as a handler, whose ledger is `book`."""

    def __init__(self, trees: Trees, saga: Saga, faults: Sequence[Fault], number: int) -> None:
        self.saga = saga
        self.book: list[str] = []
        self.left = list(faults)
        """Those that have not struck yet."""
        self.gives_up = False
        """Whether the compensation of a job that nobody has cancelled has failed: what is left of it is a person's."""
        self._trees = trees
        self._client = SyncClient(trees.dsn)

        # A parent that keeps its slot waits for a child's next attempt, which these tests put off for an hour.
        suspend_after = 0 if saga.suspends or "'branch'" in str(saga.body) else 60

        @trees.handlers.job(name=f"saga {number}", durable=True, max_attempts=6, suspend_after=suspend_after)
        async def handler(job: Job) -> str:
            await self._saga(job, saga.body, ends=saga.ends)
            return "done"

        @trees.handlers.job(name=f"branch {number}", durable=True, max_attempts=6, suspend_after=suspend_after)
        async def branch(job: Job, body: list[Any]) -> list[str]:
            return await self._saga(job, body, ends=saga.ends)

        @trees.handlers.job(name=f"child {number}")
        async def child() -> None: ...

        @trees.handlers.job(name=f"never {number}", queue="unserved")
        async def never() -> None: ...

        @trees.handlers.job(name=f"bad {number}", max_attempts=1)
        async def bad() -> None:
            raise OSError("refused")

        self.handler, self._branch = handler, branch
        self._child, self._never, self._bad = child, never, bad

    async def act(self, job: Job, what: str) -> None:
        """Does something, with the faults that are left."""
        await self._strike(job, what, "cancelled", "timeout", "fails", "lost before")
        if not what.startswith("plain"):
            self.book.append(what)
        await self._strike(job, what, "lost after")

    async def _strike(self, job: Job, what: str, *kinds: str) -> None:
        for fault in sorted(self.left, key=lambda fault: FAULTS.index(fault.kind)):
            if fault.at != what or fault.kind not in kinds:
                continue
            self.left.remove(fault)
            if fault.kind == "fails":
                self.gives_up = self.gives_up or (what.startswith("undo") and job.cancel_reason is None)
                raise Wrong(f"{what} fails once")
            if fault.kind == "timeout":
                running: Any = job._runtime
                running.cancel("timeout")
            elif fault.kind == "cancelled":
                root = self._client.job(job.id).root_id or job.id
                await trio.to_thread.run_sync(self._client.cancel, root)
                if root == job.id:
                    running = job._runtime
                    running.ask(CancelRequest("user", None))
            else:
                await self._trees.lose(job.id)
                await trio.sleep_forever()

    async def _saga(self, job: Job, body: list[Node], *, ends: str) -> list[str]:
        """Returns what is left to be undone if something fails later."""
        undo: list[str] = []
        try:
            await self._run(job, body, undo)
        except BaseException as error:
            with job.cleanup():
                for what in reversed(undo):
                    await job.step(self.act, job, f"undo {what}")  # noqa: ASYNC102 -- job.cleanup() is the shield
            if job.cancel_reason is None and ends != "same":
                again = ends == "afresh" and job.attempt < 5
                word = RetryAfter(0, afresh=True) if again else Discard("undone")
                raise word from error  # noqa: ASYNC104 -- what a handler raises is its word on the job
            raise
        return undo

    async def _run(self, job: Job, body: list[Node], undo: list[str]) -> None:
        for node in body:
            match node[0]:
                case "step":
                    undo.append(node[1])
                    await job.step(self.act, job, node[1])
                case "plain":
                    await self.act(job, node[1])
                    await trio.lowlevel.checkpoint()
                case "fails":
                    await self._fails(job, node, undo)
                case "sleep":
                    await job.sleep(3600)
                case "event":
                    await job.wait_for_event("go")
                case "scope":
                    await self._scope(job, node, undo)
                case "passes":
                    with job.move_on_after(NEVER):
                        await self._run(job, node[1], undo)
                case "children":
                    async with job.durable_nursery() as nursery:
                        for _ in range(node[1]):
                            nursery.start_soon(self._child)
                        await self._run(job, node[2], undo)
                case "branch":
                    await self._branches(job, node, undo)
                case "inner":
                    undo += await self._saga(job, node[1], ends="same")
                case "broken":
                    await self._broken(job, node, undo)
                case _:
                    await self._long(job, node[0])

    async def _long(self, job: Job, what: str) -> None:
        if what == "long wait":
            await job.sleep(7200)
        elif what == "long step":
            await job.step(trio.sleep, 60)
        elif what == "long never":
            await job.wait_for_event("never")
        else:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(self._never)

    async def _branches(self, job: Job, node: Node, undo: list[str]) -> None:
        child: Any = None
        try:
            async with job.durable_nursery() as nursery:
                child = nursery.start_soon(self._branch, node[1])
                await self._run(job, node[2], undo)
        finally:
            # What has not completed has undone what it did.
            if child is not None and child.state == "completed":
                undo += child.result

    async def _broken(self, job: Job, node: Node, undo: list[str]) -> None:
        failed: Exception | None = None
        try:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(self._bad)
                await self._run(job, node[1], undo)
        except* ChildFailed as errors:
            failed = errors
            if node[2] == ["from"]:
                raise Wrong("not done") from errors
            if node[2] == ["nothing"]:
                raise
        assert failed is not None
        await self._then(job, node[2], undo)

    async def _fails(self, job: Job, node: Node, undo: list[str]) -> None:
        async def fails() -> None:
            raise OSError("refused")

        failed: StepFailed | None = None
        try:
            await job.step(fails)
        except StepFailed as error:
            failed = error
            if node[2] == ["from"]:
                raise Wrong("not done") from error
            if node[2] == ["discard"]:
                raise Discard("not done") from None
        assert failed is not None
        await self._then(job, node[2], undo)

    async def _scope(self, job: Job, node: Node, undo: list[str]) -> None:
        _, how, body, then = node
        seconds = LONG if self.saga.suspends else SHORT
        if how == "fail":
            try:
                with job.fail_after(seconds):
                    await self._run(job, body, undo)
            except trio.TooSlowError as error:
                if then == ["from"]:
                    raise Wrong("too late") from error
                if then == ["nothing"]:
                    raise
            await self._then(job, then, undo)
            return
        with job.move_on_after(seconds) as scope:
            await self._run(job, body, undo)
        assert scope.cancelled_caught
        await self._then(job, then, undo)

    async def _then(self, job: Job, then: Node, undo: list[str]) -> None:
        match then[0]:
            case "raise" | "from":
                raise Wrong("it has to be so")
            case "discard":
                raise Discard("it has to be so")
            case "step":
                await self._run(job, [then], undo)
            case _:
                pass


async def play(trees: Trees, play: Play) -> list[str]:
    """Plays it to its end, and retries behind that where it owes its clean-up. Returns what is wrong."""
    client = SyncClient(trees.dsn)
    root = trees.enqueue(play.handler.kind)
    settings: dict[str, Any] = {"queues": ["default"], "log": False, "watchdog": 5, "lease": 3, "heartbeat": 0.3}
    for _ in range(60):
        await trees.burst(**settings)
        members = trees.window.run(
            "SELECT id, state, events FROM jobs LEFT JOIN durable_job ON job_id = id"
            " WHERE (id = %s OR durable_job.root_id = %s) AND queue = 'default'",
            root,
            root,
        )
        live = [member for member in members if State(member["state"]) not in FINISHED]
        if not live:
            if not _pay_off(trees, client, [member["id"] for member in members]):
                break
        elif all(member["state"] == "suspended" for member in live):
            _go_on(trees, client, live)
        else:
            trees.again()
    else:
        return [f"it does not end: {members}, {play.book}"]
    return _judged(play, trees.job(root))


def _pay_off(trees: Trees, client: SyncClient, ids: list[int]) -> bool:
    """Retries the jobs that owe their clean-up. Returns whether one goes on."""
    goes_on = False
    for owing in trees.window.do(family.unfinished_clean_ups(ids)):
        if EACH_TIME in _last_error(trees, owing):
            continue
        with suppress(InvalidTransition):
            client.retry(owing)
            goes_on = True
    return goes_on


def _last_error(trees: Trees, job_id: int) -> str:
    """Of its last attempt: a cancelled job has none of its own."""
    last = trees.window.run("SELECT error FROM attempts WHERE job_id = %s ORDER BY attempt DESC LIMIT 1", job_id)
    return str(last[0]["error"]) if last else ""


def _go_on(trees: Trees, client: SyncClient, waiting: list[dict[str, Any]]) -> None:
    """What the suspended jobs wait for comes: their event, else time."""
    for_events = [member["id"] for member in waiting if "go" in (member["events"] or [])]
    for job_id in for_events:
        client.send_event(job_id, "go", None)
    if not for_events:
        for member in waiting:
            trees.time_passes(member["id"], NEVER / 2)


def _judged(play: Play, found: dict[str, Any]) -> list[str]:
    book, error = play.book, str(found["error"])
    last: dict[str, bool] = {}
    for what in book:
        last[what.removeprefix("undo ")] = not what.startswith("undo ")
    wrong: list[str] = []
    if "had begun to undo" in error and "has returned" in error:
        return []  # plain code behind the last durable call had failed: a person decides, as the pages say
    if "failed of plain code" in error and "made durable calls because of it" in error and "'inner'" in str(play.saga):
        return []  # so it is where a function inside of the handler has undone its part, and its worker was lost then
    if "ReplayMismatch" in error or "FailedBefore" in error.partition("\n")[0]:
        wrong.append(error[:400])
    if found["state"] == "completed":
        wrong += [f"{what} is undone, and the job completed" for what, done in last.items() if not done]
    elif not play.gives_up:
        wrong += [f"{what} is not undone" for what, done in last.items() if done]
    first = next((place for place, what in enumerate(book) if what.startswith("undo ")), len(book))
    one_job = "branch" not in str(play.saga.body)
    if (
        one_job
        and play.saga.ends != "afresh"
        and (late := [what for what in book[first:] if not what.startswith("undo ")])
    ):
        wrong.append(f"done after what was undone: {late}")
    return [f"{found['state']}, {book}: {one}" for one in wrong]


def faults_of(saga: Saga, random: Random) -> list[Sequence[Fault]]:
    """None, a few that are drawn, and pairs. Plain code that fails once, and whose compensation does not say that all is over,
    is left out: a job that does not fail again is at odds with its history, as the pages say."""
    may = [
        Fault(kind, at)
        for at in places(saga)
        for kind in FAULTS
        if kind != "timeout"
        if kind != "fails" or saga.ends != "same" or not at.startswith("plain")
    ]
    pairs = [random.sample(may, 2), [random.choice(may), random.choice(may)]]
    # A clean-up that fails half-way, of what was just done as often as not.
    done = [at for at in places(saga) if not at.startswith("undo")]
    then = random.randrange(len(done))
    before = [at for at in done[: then + 1] if not at.startswith("plain")]
    fails = before[-1] if random.random() < 0.6 else random.choice(before)
    pairs.append([Fault("cancelled", done[then]), Fault("fails", f"undo {fails}")])
    drawn: list[Sequence[Fault]] = [(), *([fault] for fault in random.sample(may, 2)), *pairs]
    # The time of an attempt is over, and its clean-up fails half-way, or somebody cancels the job, or its worker is lost.
    late = random.randrange(len(done))
    before = [at for at in done[: late + 1] if not at.startswith("plain")]
    undone = f"undo {random.choice(before)}"
    kind = random.choice(["fails", "fails", "cancelled", "lost before", "lost after"])
    return [*drawn, [Fault("timeout", done[late])], [Fault("timeout", done[late]), Fault(kind, undone)]]
