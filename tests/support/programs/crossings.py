"""Draws what several tasks of a handler have to do with each other, and scopes that strike where nothing can be cut short.

These nodes stand among those of drawing.py, and are drawn by another sequence of random numbers: what is drawn there stays.
All of them go on. Which task of several is the first, and whether a scope strikes before its step begins or while it runs, is
not certain: what rests on it is not `sure`, and playing.py asks whether all attempts of a job decide it in one way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .drawing import Around, Drawing, Node

FAR = 3600.0


def draw_crossing(drawing: Drawing, around: Around) -> Node:
    """One of them."""
    kinds = (limited, channel, until, first, late, asked, cut_short)
    (kind,) = drawing.random.choices(kinds, (3, 1, 2, 2, 3, 2, 3))
    return kind(drawing, around)


def limited(drawing: Drawing, around: Around) -> Node:
    """Tasks whose calls stand behind a limiter, a semaphore or a lock, of which there are less than tasks."""
    inner = replace(around, once=False, task=True)
    how = drawing.random.choice(("limiter", "semaphore", "lock"))
    count = drawing.random.randint(2, 4)
    tokens = 1 if how == "lock" else drawing.random.randint(1, count - 1)
    tasks = [_turns(drawing, inner) for _ in range(count)]
    return {"do": "limited", "tag": drawing.tag(), "how": how, "tokens": tokens, "tasks": tasks}


def cut_short(drawing: Drawing, around: Around) -> Node:
    """Tasks whose calls stand behind a limiter, and what cuts them short half-way: a deadline, or the failure of one."""
    unsure = replace(around, once=False, sure=False, undoes=False, task=True)
    how = drawing.random.choice(("limiter", "semaphore", "lock"))
    # Under pytest-trio all orders of these come alike: of more tasks the one that was comes again too seldom.
    count = drawing.random.randint(2, 3)
    tokens = 1 if how == "lock" else drawing.random.randint(1, count - 1)
    kinds = (drawing.step, drawing.sleep, drawing.event)
    tasks = [
        [kind(unsure) for kind in drawing.random.choices(kinds, (6, 1, 1), k=drawing.random.choice((1, 1, 2)))]
        for _ in range(count)
    ]
    fails = drawing.chance(0.5)
    tasks[drawing.random.randrange(count)].append(drawing.step(unsure, "always") if fails else drawing.wait(unsure))
    seconds = FAR if fails else drawing.random.choice((0.05, 0.2))
    then = [drawing.step(replace(around, once=False))]
    return drawing.called(
        around, "cut_short", seconds=seconds, how=how, tokens=tokens, tasks=tasks, then=then, fails=fails
    )


def _turns(drawing: Drawing, inner: Around) -> list[Node]:
    """What one task does, and whether it holds the limiter meanwhile."""
    turns = [{"held": True, "body": _calls(drawing, inner)}]
    if drawing.chance(0.3):
        turns.insert(0, {"held": False, "body": _calls(drawing, inner)})
    if drawing.chance(0.3):
        turns.append({"held": drawing.chance(0.5), "body": _calls(drawing, inner)})
    return turns


def _calls(drawing: Drawing, inner: Around) -> list[Node]:
    """A few that do not fail."""
    if drawing.chance(0.2) and drawing.left > 0:
        return drawing.task(inner)
    return [_call(drawing, inner) for _ in range(drawing.random.choice((1, 1, 2)))]


def _call(drawing: Drawing, inner: Around) -> Node:
    kinds = (drawing.step, drawing.sleep, drawing.event, drawing.plain)
    (kind,) = drawing.random.choices(kinds, (5, 2, 2, 1))
    return kind(inner)


def channel(drawing: Drawing, around: Around) -> Node:
    """Makers and takers of things, with a bounded channel between them. A thing's calls have its own keys, whoever has it."""
    inner = replace(around, once=False, task=True)
    things = [
        {"made": _calls(drawing, inner), "used": _calls(drawing, inner)} for _ in range(drawing.random.randint(2, 4))
    ]
    makers = drawing.random.randint(1, 2)
    return {
        "do": "channel",
        "tag": drawing.tag(),
        "size": drawing.random.choice((0, 1, 2)),
        "makers": makers,
        # Several makers send in another order in each attempt. A taker that has the wrong thing first would wait for what has
        # no line, with the others behind it: that is not promised.
        "takers": drawing.random.randint(1, 3) if makers == 1 else len(things),
        "things": things,
    }


def until(drawing: Drawing, around: Around) -> Node:
    """Tasks that go on beside the main one, until that has done its part and cancels them: reminders, say."""
    inner = replace(around, once=False)
    beside = replace(inner, sure=False, undoes=False, task=True)
    others = [_reminders(drawing, beside) for _ in range(drawing.random.randint(1, 2))]
    body = _calls(drawing, inner)
    return {"do": "until", "tag": drawing.tag(), "body": body, "others": others}


def _reminders(drawing: Drawing, beside: Around) -> list[Node]:
    """Which do not end."""
    nodes: list[Node] = []
    for _ in range(drawing.random.randint(0, 2)):
        nodes += [drawing.sleep(beside), drawing.step(beside)]
    wait = [drawing.wait(beside)]
    return [*nodes, drawing.saga(beside, wait) if drawing.chance(0.25) else wait[0]]


def first(drawing: Drawing, around: Around) -> Node:
    """Two waits side by side: the first that ends cancels the other, and decides what comes then."""
    unsure = replace(around, once=False, sure=False, undoes=False)
    beside = replace(unsure, task=True)
    ways = [[_wait(drawing, beside)] for _ in range(drawing.random.randint(2, 3))]
    if drawing.chance(0.3):
        ways[0].append(drawing.step(beside))
    if drawing.chance(0.3):
        ways.append([drawing.wait(beside)])
    then = [_calls(drawing, unsure) if drawing.chance(0.7) else [] for _ in ways]
    return {"do": "first", "tag": drawing.tag(), "ways": ways, "then": then}


def _wait(drawing: Drawing, beside: Around) -> Node:
    kinds = (drawing.step, drawing.sleep, drawing.event)
    (kind,) = drawing.random.choices(kinds, (1, 2, 3))
    return kind(beside)


def late(drawing: Drawing, around: Around) -> Node:
    """A scope whose deadline passes while a step runs that cannot be interrupted; what comes then rests on how it struck."""
    unsure = replace(around, once=False, sure=False, undoes=False)
    long = {**drawing.step(unsure), "kind": drawing.random.choice(("shielded", "long thread"))}
    body = [drawing.step(unsure)] if drawing.chance(0.2) else []
    if drawing.chance(0.25):
        # Both strike.
        inside = drawing.called(unsure, "late", seconds=drawing.random.choice((0.04, FAR)), fail=False, body=[long])
        inside["then"] = [[], [drawing.step(unsure)]]
        body.append(inside)
    else:
        body.append(long)
    if drawing.chance(0.3):
        body.append(drawing.called(unsure, "reads", then=[[], [drawing.step(unsure)]]))
    elif drawing.chance(0.3):
        body.append(drawing.plain(unsure) if drawing.chance(0.5) else drawing.step(unsure))
    then = [[drawing.step(unsure)] if drawing.chance(0.5) else [] for _ in range(2)]
    fail = drawing.chance(0.3)
    return drawing.called(around, "late", seconds=0.05, fail=fail, body=body, then=then)


def asked(drawing: Drawing, around: Around) -> Node:
    """A scope whose own task ends it as the last thing in it, or before something plain."""
    inner = replace(around, once=False)
    unsure = replace(inner, sure=False, undoes=False)
    body = [_call(drawing, inner), {"do": "cut"}]
    match drawing.random.randrange(3):
        case 0:
            body.append(drawing.called(inner, "reads", then=[[], []]))
        case 1:
            body.append(drawing.finds(unsure))
        case _:
            pass
    return drawing.called(around, "scope", seconds=FAR, fail=False, body=body)
