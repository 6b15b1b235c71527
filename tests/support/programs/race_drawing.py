"""Draws the programs of races.py."""

from __future__ import annotations

from random import Random
from typing import Any

Node = dict[str, Any]
TIMES = (0, 0, 1, 3, 5, 10, 10, 20, 20, 30, 50)
"""Milliseconds."""
LIMITERS = 2
ENDS = (
    *("step", "nap", "event", "first", "limit", "saga", "hedge", "catch", "block", "late", "pick"),
    *("gather", "patient", "rival"),
)
"""What ends in a durable call."""
BARS = ("bar", "reports")
"""What ends as its body does."""


class Drawing:
    """One program. Each node has a label of its own."""

    def __init__(self, seed: int) -> None:
        self.random = Random(f"races {seed}")
        self.left = self.random.choice((8, 14, 22, 30))
        self._count = 0

    def node(self, depth: int, *, holds: bool = False) -> Node:
        """One. `holds`: it stands behind a limiter, and what is in it asks for none."""
        self.left -= 1
        kinds = self.kinds(depth, holds=holds)
        (kind,) = self.random.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])
        return self.of(kind, depth, holds=holds)

    def kinds(self, depth: int, *, holds: bool) -> list[tuple[int, str]]:
        """What there may be, each with its weight."""
        kinds: list[tuple[int, str]] = [(6, "step"), (3, "plain"), (2, "nap"), (2, "event"), (1, "fails")]
        if depth > 0 and self.left > 0:
            kinds += [
                (5, "first"),
                (4, "all"),
                (5, "limit"),
                (4, "saga"),
                (2, "hedge"),
                (2, "relay"),
                (2, "bar"),
                (2, "catch"),
                (4, "block"),
                (2, "late"),
                (2, "pick"),
            ]
            if not holds:
                kinds.append((3, "turn"))
        return kinds

    def of(self, kind: str, depth: int, *, holds: bool) -> Node:
        """One of a kind."""
        random = self.random
        self._count += 1
        node: Node = {"do": kind, "label": f"{kind}{self._count}", "ms": random.choice(TIMES)}
        match kind:
            case "first" | "all":
                tasks = self.way if kind == "first" else self.nodes
                node["tasks"] = [tasks(depth - 1, holds=holds) for _ in range(random.choice((2, 2, 3, 4)))]
            case "limit":
                node["ms"] = random.choice((0, 5, 10, 20, 30, 50, 5000))
                node["fail"] = random.random() < 0.3
            case "hedge":
                node["tasks"] = [self.way(depth - 1, holds=holds) for _ in range(2)]
            case "relay":
                node["items"], node["size"] = random.choice((2, 3)), random.choice((0, 1))
            case "turn":
                node["limiter"] = random.randrange(LIMITERS)
            case "fails":
                node["ms"] = random.choice(TIMES)
            case "block" | "late" | "pick":
                node["ms"] = random.choice((5, 10, 20, 30, 50, 100))
                node["children"] = [
                    [random.choice(TIMES), random.choice(TIMES)] for _ in range(random.choice((1, 1, 2, 3)))
                ]
                node["fail"], node["collect"] = random.random() < 0.2, random.random() < 0.3
            case _:
                pass
        if kind in ("limit", "saga", "bar", "turn", "catch", "block"):
            node["body"] = self.nodes(depth - 1, holds=holds or kind == "turn")
        return node

    def way(self, depth: int, *, holds: bool) -> list[Node]:
        """One of a race: it ends in a durable call, for no history says which of two plain awaits ended first."""
        nodes = self.nodes(depth, holds=holds)
        last = nodes[-1]
        while last["do"] in BARS:
            last = last["body"][-1]
        if last["do"] not in ENDS:
            nodes.append(self.of("step", 0, holds=holds))
        return nodes

    def nodes(self, depth: int, *, holds: bool = False, most: int = 3) -> list[Node]:
        """Some, one after the other."""
        return [self.node(depth, holds=holds) for _ in range(self.random.randint(1, most))]


class MoreDrawing(Drawing):
    """One of the programs of races_more.py. Its members are durable children, with programs of their own.

    `may` has how often there may be what takes long, or uses up an attempt.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.random = random = Random(f"more races {seed}")
        self.left = random.choice((8, 14, 22))
        self.begins_anew = random.random() < 0.4
        self.may = {
            "flaky": random.choice((0, 0, 1, 2)),
            "gives": random.choice((1, 1, 2)) if self.begins_anew else 0,
            "gather": 2,
            "family": 3,
        }
        self.within = 0
        """How many families are around."""

    def kinds(self, depth: int, *, holds: bool) -> list[tuple[int, str]]:
        """Those of all programs, and more."""
        kinds = super().kinds(depth, holds=holds)
        kinds += [(2, "tells"), (3, "patient"), (3, "flaky"), (3, "gives")]
        if depth > 0 and self.left > 0:
            kinds += [(3, "reports"), (3, "answer"), (4, "gather"), (6, "family"), (4, "rival")]
        return [(weight, kind) for weight, kind in kinds if self.may.get(kind, 1) > 0 and self.fits(kind)]

    def fits(self, kind: str) -> bool:
        """Whether a program of a member may have this one: it neither fails of plain code, nor gives up."""
        return not self.within or (kind not in ("flaky", "gives") and (self.within < 2 or kind != "family"))

    def of(self, kind: str, depth: int, *, holds: bool) -> Node:
        """One of a kind."""
        random = self.random
        node = super().of(kind, depth, holds=holds)
        if kind in self.may:
            self.may[kind] -= 1
        match kind:
            case "flaky":
                node["attempt"] = random.choice((1, 2, 2, 2, 3, 3, 4))
            case "patient" | "rival":
                node["ms"], node["sent"] = random.choice((5, 10, 20, 30, 50)), random.choice((*TIMES, None, None))
                node["step"] = random.choice(TIMES)
            case "gather":
                node["children"] = [[random.choice(TIMES), random.choice(TIMES)] for _ in range(random.choice((2, 3)))]
                node["fails"] = [random.random() < 0.5 for _ in node["children"]]
                node["by"] = random.choice(("trio", "trio", "job"))
            case "family":
                self.within += 1
                node["how"] = random.choice(("block", "block", "late", "pick"))
                node["ms"], node["collect"] = random.choice((5, 10, 30, 50, 100, 300)), random.random() < 0.4
                node["members"] = [
                    {
                        "program": [self.whole(min(depth, 2), 1)],
                        "fails": random.random() < 0.2,
                        "quick": random.random() < 0.5,
                    }
                    for _ in range(random.choice((1, 1, 2, 2, 3)))
                ]
                self.within -= 1
                node["body"] = self.nodes(depth - 1, holds=holds) if random.random() < 0.7 else []
            case _:
                pass
        if kind in ("reports", "answer"):
            node["body"] = self.nodes(depth - 1, holds=holds)
        return node

    def whole(self, depth: int, parts: int) -> Node:
        """The program of one job."""
        self._count += 1
        node: Node = {"do": "whole", "label": f"whole{self._count}"}
        node["afresh"] = self.begins_anew and not self.within
        node["body"] = [self.of("catch", depth, holds=False) for _ in range(parts)]
        if not self.within and self.random.random() < 0.3:
            # A failure there is the attempt's, which is not undone then.
            self.may["gives"] = 0
            node["apart"] = [self.of("catch", 2, holds=False)]
        return node


MORE = 100_000
"""The first seed of these."""


def draw(seed: int) -> list[Node]:
    """The program of this seed. A failure that nobody catches would end it, so that all of it is caught."""
    if seed >= MORE:
        return [MoreDrawing(seed).whole(5, 3)]
    drawing = Drawing(seed)
    return [drawing.of("catch", 5, holds=False) for _ in range(3)]
