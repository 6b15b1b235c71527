"""Draws small durable programs. A program is JSON, the argument of the handler that interprets it (playing.py).

What a program does in the end is certain, whatever happens to its attempts: deadlines are far away, or struck from the first
moment on, or stand around a wait that nothing else ends; a step that fails once, and a `Snooze`, stand where no durable call
answers them. What may or may not be done (a child whose sibling fails, say) is marked: its effects are not `sure`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

from .crossings import draw_crossing

Node = dict[str, Any]
Ends = Literal["goes on", "raises", "waits"]
"""How a sequence ends in each attempt that nothing disturbs, at last."""
FAR = 3600.0
CROSSINGS = float(os.environ.get("PULSE_TRIO_CROSSINGS", "0.12"))
"""How many of them stand before the nodes of a sequence."""
SAYING = 0.7
"""How many of the steps that fail say something of their job: `Discard`, `RetryAfter`, `Snooze`."""


@dataclass(frozen=True)
class Around:
    """What stands around the place where a node is drawn."""

    levels: int
    """Levels of children that may be started here."""
    sure: bool = True
    """Whether what is here is done in each play."""
    once: bool = True
    """Whether the attempt may fail here and the next one not: no durable call answers the failure."""
    undoes: bool = True
    """Whether what undoes something is done in no play or in each: the job is not cancelled in some."""
    task: bool = False
    """Whether a second task makes the calls."""


class Drawing:
    """One program. `names` of jobs and `labels` of nodes are unique in it."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.crossing = Random(f"{seed} crossing")
        """For what is drawn by crossings.py."""
        self.saying = Random(f"{seed} saying")
        """For what steps say of their job."""
        self._count = 0
        self.left = self.random.choice((6, 10, 16, 24))
        """Nodes to draw."""

    def number(self) -> int:
        """The next."""
        self._count += 1
        return self._count

    def chance(self, probability: float) -> bool:
        """Whether something is drawn."""
        return self.random.random() < probability

    # Jobs

    def program(self, around: Around, name: str) -> Node:
        """The program of one durable job."""
        body, ends = self.sequence(around, self.random.randint(2, 5))
        if ends == "goes on" and self.chance(0.15):
            body.insert(self.random.randint(0, len(body)), self.background(around))
        return {"name": name, "kind": "program", "body": body, "ends": ends, "attempts": 4}

    def child(self, around: Around, ends: Ends) -> Node:
        """The program of a child that ends so."""
        name = f"c{self.number()}"
        if around.levels <= 0 or self.left < 3 or self.chance(0.35):
            how = {"goes on": "once" if self.chance(0.2) else "ok", "raises": "dead", "waits": "forever"}[ends]
            return {"name": name, "kind": "leaf", "how": how, "sure": around.sure, "attempts": 4}
        once = self.chance(0.5)
        program = self.program(replace(around, levels=around.levels - 1, once=once, task=False), name)
        if program["ends"] == "goes on" and ends != "goes on":
            if ends == "waits":
                wait = [self.wait(around)]
                program["body"].append(self.saga(replace(around, undoes=False), wait) if self.chance(0.5) else wait[0])
            else:
                # Whose tasks beside it may be cut short by that.
                program["body"] = [node for node in program["body"] if node["do"] != "background"]
                program["body"].append({"do": "end", "how": self.random.choice(("discard", "error"))})
            program["ends"] = ends
        elif program["ends"] == "raises" and ends != "raises" and once:
            return {
                "name": name,
                "kind": "leaf",
                "how": "ok" if ends == "goes on" else "forever",
                "sure": around.sure,
                "attempts": 4,
            }
        elif program["ends"] == "raises" and ends != "raises":
            program["body"] = [{"do": "catch", "body": program["body"], "then": [self.step(around)], "tag": self.tag()}]
            if ends == "waits":
                program["body"].append(self.wait(around))
            program["ends"] = ends
        return program

    # Sequences

    def sequence(self, around: Around, length: int) -> tuple[list[Node], Ends]:
        """Nodes, up to the first that always raises."""
        nodes: list[Node] = []
        for _ in range(length):
            if self.left <= 0:
                break
            self.left -= 1
            if self.crossing.random() < CROSSINGS:
                nodes.append(self.crosses(around))
            node, ends = self.node(around)
            nodes.append(node)
            if ends != "goes on":
                return nodes, ends
        return nodes or [self.step(around)], "goes on"

    def crosses(self, around: Around) -> Node:
        """What stands among the others."""
        mine, left = self.random, self.left
        self.random, self.left = self.crossing, 2
        try:
            return draw_crossing(self, around)
        finally:
            self.random, self.left = mine, left

    def node(self, around: Around) -> tuple[Node, Ends]:
        """One, and how it ends."""
        draws: list[tuple[int, Any]] = [
            (8, lambda: (self.step(around), "goes on")),
            (3, lambda: (self.sleep(around), "goes on")),
            (3, lambda: (self.plain(around), "goes on")),
            (4, lambda: (self.event(around), "goes on")),
            (4, lambda: self.catch(around)),
            (3, lambda: self.sagas(around)),
            (2, lambda: self.last(around)),
            (4, lambda: self.scope(around)),
            (3, lambda: (self.struck(around), "goes on")),
        ]
        if around.levels > 0:
            draws.append((9, lambda: self.block(around)))
        if not around.task:
            draws += [(1, lambda: self.raises(around)), (2, lambda: (self.tasks(around), "goes on"))]
            if around.once:
                draws.append((3, lambda: (self.once(around), "goes on")))
        (chosen,) = self.random.choices([draw for _, draw in draws], [weight for weight, _ in draws])
        return chosen()

    def tag(self) -> str:
        """Of a node that makes no call of its own."""
        return f"t{self.number()}"

    def called(self, around: Around, do: str, **more: Any) -> Node:
        """A node that makes a durable call: those of second tasks have a key, and some others."""
        label = f"{do}{self.number()}"
        key = f"k{label}" if around.task or self.chance(0.08) else None
        return {"do": do, "label": label, "key": key, "sure": around.sure, **more}

    def step(self, around: Around, fail: str = "") -> Node:
        """A step; some run in a thread, some write in their line's transaction."""
        kind = self.random.choices(("async", "thread", "transaction"), (6, 1, 1))[0]
        if fail and self.saying.random() < SAYING:
            fail = self.saying.choice(("snooze once", "retry once") if fail == "once" else ("discard", "retry"))
        return self.called(around, "step", fail=fail, kind=kind)

    def plain(self, around: Around) -> Node:
        """Something plain that is awaited, and a value that later steps use."""
        seconds, number = self.random.choice((0.0, 0.01)), self.number()
        return {"do": "plain", "tag": self.tag(), "seconds": seconds, "number": number, "sure": around.sure}

    def sleep(self, around: Around) -> Node:
        return self.called(around, "sleep", seconds=self.random.choice((0.0, 0.0, 0.02)))

    def event(self, around: Around) -> Node:
        """One that comes: before the wait, or a little later."""
        when, limit = self.random.choice(("before", "later")), self.random.choice((None, FAR))
        return self.called(around, "event", when=when, timeout=limit)

    def finds(self, around: Around) -> Node:
        """A plain await, and a value that it brings."""
        return {"do": "finds", "tag": self.tag(), "seconds": self.random.choice((0.0, 0.01)), "sure": around.sure}

    def wait(self, around: Around) -> Node:
        """What nothing ends."""
        if self.chance(0.5):
            return self.called(around, "event", when="never", timeout=self.random.choice((None, FAR)))
        return self.called(around, "sleep", seconds=FAR)

    def once(self, around: Around) -> Node:
        """What ends an attempt, and the next one comes beyond it."""
        if self.chance(0.5):
            return self.step(around, "once")
        return {"do": "end", "how": self.random.choice(("snooze", "retry")), "tag": self.tag()}

    def raises(self, around: Around) -> tuple[Node, Ends]:
        """What ends each attempt."""
        match self.random.randrange(4):
            case 0:
                return {"do": "end", "how": self.random.choice(("discard", "error"))}, "raises"
            case 1:
                limit = self.random.choice((0.0, 0.03))
                return self.called(around, "event", when="never", timeout=limit), "raises"
            case 2:
                body, _ = self.sequence(replace(around, sure=False), 2)
                return self.called(around, "scope", seconds=0.0, fail=True, body=[self.step(around), *body]), "raises"
            case _:
                return self.step(around, "always"), "raises"

    def catch(self, around: Around) -> tuple[Node, Ends]:
        """A failure that the handler answers."""
        inner = replace(around, once=False)
        body, ends = self.sequence(inner, self.random.randint(0, 2)) if self.chance(0.6) else ([], "goes on")
        if ends == "goes on":
            body.append(self.raises(inner)[0] if not around.task or self.chance(0.5) else self.step(inner, "always"))
            if body[-1]["do"] == "step" and self.saying.random() < SAYING:
                # Which ends no job: each attempt would be put off.
                body[-1]["fail"] = "snooze"
        then, ends = self.sequence(inner, 1)
        node = {"do": "catch", "body": body, "then": then, "tag": self.tag(), "sure": around.sure}
        return node, ends

    def saga(self, around: Around, body: list[Node]) -> Node:
        """What is charged is refunded, unless all goes well."""
        refund = self.step(replace(around, sure=around.sure and around.undoes))
        return {"do": "saga", "charge": self.step(around), "body": body, "refund": refund}

    def sagas(self, around: Around) -> tuple[Node, Ends]:
        body, ends = self.sequence(replace(around, once=False), self.random.randint(1, 2))
        return self.saga(around, body), ends

    def last(self, around: Around) -> tuple[Node, Ends]:
        """`finally` with a step."""
        body, ends = self.sequence(replace(around, once=False), self.random.randint(1, 2))
        last = [self.step(replace(around, sure=around.sure and around.undoes))]
        return {"do": "finally", "body": body, "last": last}, ends

    def scope(self, around: Around) -> tuple[Node, Ends]:
        """A deadline that is far away."""
        body, ends = self.sequence(around, self.random.randint(1, 3))
        return self.called(around, "scope", seconds=FAR, fail=self.chance(0.3), body=body), ends

    def struck(self, around: Around) -> Node:
        """A scope that cuts its body short in each play."""
        inner = replace(around, once=False)
        unsure = replace(inner, sure=False, undoes=False)
        match self.random.randrange(4):
            case 0:  # from the first moment on
                body, seconds = [self.step(unsure), *self.sequence(unsure, 1)[0]], 0.0
            case 1:  # by the handler itself
                body, ends = self.sequence(inner, 1)
                if ends == "raises":
                    body = [{"do": "catch", "body": body, "then": [self.step(inner)], "tag": self.tag()}]
                cut = [self.finds(inner), {"do": "cut"}, self.wait(unsure) if self.chance(0.3) else self.step(unsure)]
                body, seconds = [*body, self.saga(inner, cut)] if self.chance(0.3) else [*body, *cut], FAR
            case 2 if around.levels > 0:  # around a block that does not end
                children = [{**self.child(unsure, self.random.choice(("waits", "goes on"))), "at": 0} for _ in range(2)]
                children.append({**self.child(unsure, "waits"), "at": 0})
                body = [self.step(inner)] if self.chance(0.3) else []
                for child in children:
                    child["key"] = f"child-{child['name']}" if around.task else None
                cut = self.chance(0.5)
                body += [{"do": "cut"}, self.wait(inner)] if cut else []
                block = self.called(inner, "block", collect=self.chance(0.3), children=children, body=body, reads=False)
                body, seconds = [block], FAR if cut else 0.15
            case _:
                body, seconds = [self.wait(inner)], 0.1
                if self.chance(0.3):
                    body = [self.saga(inner, body)]
        if seconds == 0.1 and body[0]["do"] == "saga":
            seconds = 0.4  # the charge is made in time
            body[0]["charge"]["sure"] = body[0]["refund"]["sure"] = False
        elif seconds == 0.15 and block["body"]:
            block["body"][0]["sure"] = False
        return self.called(around, "scope", seconds=seconds, fail=False, body=body)

    def block(self, around: Around) -> tuple[Node, Ends]:
        """A durable nursery with children."""
        collect, number = self.chance(0.3), self.random.randint(0, 3)
        fails = [self.chance(0.25) for _ in range(number)]
        cut = any(fails) and not collect
        inner = replace(around, sure=around.sure and not cut, undoes=around.undoes and not cut)
        if cut:
            inner = replace(inner, once=False)
        body, ends = self.sequence(inner, self.random.choice((0, 0, 1, 2))) if self.chance(0.6) else ([], "goes on")
        if cut and self.chance(0.2):
            body, ends = [*body, self.wait(inner)] if ends == "goes on" else body, "waits"
        again = "once" in str(body) or "snooze" in str(body) or "retry" in str(body)
        of_children = replace(
            inner,
            sure=inner.sure and ends == "goes on",
            undoes=inner.undoes and ends == "goes on" and not again,
        )
        last = len(body) - (ends == "waits")
        # All are started by then.
        if ends == "goes on" and not cut and number and self.chance(0.4):
            for index in self.random.sample(range(number), self.random.randint(1, number)):
                how = self.random.choice(("plain", "durable"))
                body += [self.called(inner, "poll", index=index, how=how), self.step(inner)]
        children = [
            {**self.child(of_children, "raises" if failing else "goes on"), "at": self.random.randint(0, last)}
            for failing in fails
        ]
        if cut and self.chance(0.3):
            children.append({**self.child(of_children, "waits"), "at": 0})
        for child in children:
            child["key"] = f"child-{child['name']}" if around.task or self.chance(0.2) else None
        children.sort(key=lambda child: child["at"])
        node = self.called(
            around, "block", collect=collect, children=children, body=body, reads=ends == "goes on" and not cut
        )
        return node, "raises" if cut or ends == "raises" else "goes on"

    def tasks(self, around: Around) -> Node:
        """Two tasks side by side, in a nursery that the handler waits for."""
        inner = replace(around, once=False, task=True)
        return {"do": "tasks", "tag": self.tag(), "tasks": [self.task(inner) for _ in range(2)]}

    def task(self, inner: Around) -> list[Node]:
        """Calls of a second task, which does not fail."""
        body, ends = self.sequence(inner, self.random.randint(1, 2))
        if ends == "raises":
            body = [{"do": "catch", "body": body, "then": [self.step(inner)], "tag": self.tag()}]
        return body

    def background(self, around: Around) -> Node:
        """Two tasks in `job.nursery`, beside what comes after."""
        inner = replace(around, levels=0, once=False, task=True)
        tasks = [[self.step(inner), self.sleep(inner), self.step(inner)] for _ in range(2)]
        return {"do": "background", "tag": self.tag(), "tasks": tasks}


def draw(seed: int) -> Node:
    """The program of a seed."""
    return Drawing(seed).program(Around(levels=2), "root")
