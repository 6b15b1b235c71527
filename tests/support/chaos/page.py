"""The report page of a run: one HTML file, with the figures, the violations and the timeline as a picture."""

from __future__ import annotations

from collections import defaultdict
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .history import Fault
    from .run import Result

COLOURS = {
    "completed": "#4c9f70", "failed": "#e0a030", "timeout": "#b8860b", "discarded": "#8a6d3b", "snoozed": "#7fa8d1",
    "released": "#5b7fc7", "cancelled": "#9aa0a6", "rescued": "#c0392b", "suspended": "#b9d8c4",
    "unknown": "#d0d0d0",
}  # fmt: skip
FAULT_COLOURS = {"kill": "#000000", "stop short": "#9467bd", "stop long": "#5e2d91", "terminate": "#444444"}
NETWORK = "#1f9bcf"
LEFT, RIGHT, TOP = 70, 20, 118
WIDTH = 1500
ROW = 6
LANE_GAP = 16
STYLE = """
:root { color-scheme: light; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 24px; color: #1d1d1f; background: #fff; }
h1 { font-size: 20px; margin: 0 0 4px; } h2 { font-size: 15px; margin: 20px 0 6px; }
.verdict { display: inline-block; padding: 3px 10px; border-radius: 4px; color: #fff; font-weight: 600; }
.good { background: #2e7d4f; } .bad { background: #b3261e; }
table { border-collapse: collapse; } td { padding: 2px 14px 2px 0; vertical-align: top; }
td:nth-child(2) { font-variant-numeric: tabular-nums; }
.columns { display: flex; gap: 48px; flex-wrap: wrap; }
.picture { overflow-x: auto; border: 1px solid #ddd; } pre { background: #f6f6f6; padding: 8px; overflow-x: auto; }
.key span { display: inline-block; margin-right: 14px; white-space: nowrap; }
.key i { display: inline-block; width: 12px; height: 10px; margin-right: 4px; }
svg text { font: 11px system-ui, sans-serif; fill: #333; }
"""


class Bar(NamedTuple):
    """One attempt at its worker. `end` is when its handler ended, was killed, or the run was over."""

    job: int
    attempt: int
    kind: str
    begin: float
    end: float
    outcome: str


def page(result: Result) -> str:
    """The whole file."""
    verdict = (
        ("good", "no invariant broken") if not result.violations else ("bad", f"{len(result.violations)} violations")
    )
    broken = "".join(f"<pre>{escape(str(v))}</pre>" for v in result.violations[:50])
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<title>pulse-trio chaos, seed {result.seed}</title><style>{STYLE}</style></head><body>
<h1>pulse-trio under faults: seed {result.seed}, {result.seconds:g} s, {result.workers} workers</h1>
<p><span class="verdict {verdict[0]}">{verdict[1]}</span></p>
{broken}
<div class="columns">{tables(result)}</div>
<h2>Timeline</h2>
<p class="key">{key()}</p>
<div class="picture">{picture(result)}</div>
<p>One lane a worker slot; a bar is an attempt, stacked when several run at once. Bars end where the handler ended, or with the
process. Hover for the job. Red marks below a lane's bars: rescues of attempts that this slot had held.</p>
<h2>Faults, in order</h2>
<table>{"".join(fault_row(f, result.began) for f in sorted(result.history.faults, key=lambda f: f.begin))}</table>
</body></html>
"""


def tables(result: Result) -> str:
    """The figures: plain ones, then a table for each that has parts."""
    plain = [(k, v) for k, v in result.counts.items() if not isinstance(v, dict)]
    made = [f"<div><h2>Figures</h2><table>{rows(plain)}</table></div>"]
    for name, parts in result.counts.items():
        if isinstance(parts, dict):
            made.append(f"<div><h2>{escape(name.capitalize())}</h2><table>{rows(list(parts.items()))}</table></div>")
    return "".join(made)


def rows(pairs: list[tuple[str, Any]]) -> str:
    return "".join(f"<tr><td>{escape(str(k))}</td><td>{escape(f'{v:,}')}</td></tr>" for k, v in pairs)


def fault_row(fault: Fault, began: float) -> str:
    who = fault.who or ""
    return (
        f"<tr><td>{fault.begin - began:.1f} s</td><td>{fault.end - fault.begin:.1f} s</td><td>{escape(fault.kind)}</td>"
        f"<td>{who}</td><td>{escape(fault.detail)}</td></tr>"
    )


def key() -> str:
    """What the colours mean."""
    bars = [f'<span><i style="background:{colour}"></i>{name}</span>' for name, colour in COLOURS.items()]
    bands = [("stopped", "#5e2d91"), ("network", NETWORK), ("server or lock", "#c08080"), ("no process", "#222")]
    shades = [f'<span><i style="background:{c};opacity:.35"></i>{n}</span>' for n, c in bands]
    return "".join(bars) + "<br>" + "".join(shades)


def bars_of(result: Result) -> dict[str, list[Bar]]:
    """The attempts of each slot."""
    deaths = {(who, pid): end for who, pid, _, end, _ in result.lives}
    started: dict[tuple[str, int, int, int], tuple[float, str]] = {}
    ended: dict[tuple[str, int, int, int], tuple[float, str]] = {}
    for line in result.history.lines:
        if line["event"] in ("started", "ended"):
            attempt = (line["who"], line["pid"], line["job"], line["attempt"])
            if line["event"] == "started":
                started[attempt] = (line["t"], line["kind"])
            else:
                ended[attempt] = (line["t"], line["outcome"])
    outcomes = {(f[0], f[1]): s[-1].outcome for f, s in result.history.releases.items()}
    bars: dict[str, list[Bar]] = defaultdict(list)
    for attempt, (begin, kind) in started.items():
        who, pid, job, number = attempt
        end = ended[attempt][0] if attempt in ended else deaths.get((who, pid), result.ended)
        bars[who].append(Bar(job, number, kind, begin, end, outcomes.get((job, number)) or "unknown"))
    return bars


def stacked(bars: list[Bar]) -> list[tuple[int, Bar]]:
    """Each bar with the first row that is free."""
    rows_end: list[float] = []
    placed: list[tuple[int, Bar]] = []
    for bar in sorted(bars, key=lambda b: b.begin):
        row = next((i for i, end in enumerate(rows_end) if end <= bar.begin), len(rows_end))
        if row == len(rows_end):
            rows_end.append(0.0)
        rows_end[row] = bar.end
        placed.append((row, bar))
    return placed


def picture(result: Result) -> str:
    """The timeline as SVG."""
    begin, end = result.began - 1, result.ended + 0.5
    scale = (WIDTH - LEFT - RIGHT) / (end - begin)

    def x(t: float) -> float:
        return round(LEFT + (min(max(t, begin), end) - begin) * scale, 1)

    bars = bars_of(result)
    slots = [f"w{n}" for n in range(result.workers)]
    lanes = {who: stacked(bars.get(who, [])) for who in slots}
    heights = {who: max([row for row, _ in lane], default=0) * ROW + ROW + 12 for who, lane in lanes.items()}
    total = TOP + sum(h + LANE_GAP for h in heights.values()) + 10
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{total}" viewBox="0 0 {WIDTH} {total}">']
    out += seconds_axis(begin, end, result.began, total, x)
    out += server_faults(result, total, x)
    healed = result.history.healed_at or end
    out.append(
        f'<line x1="{x(healed)}" x2="{x(healed)}" y1="{TOP - 14}" y2="{total}" stroke="#2e7d4f" stroke-width="1.5"/>'
    )
    out.append(f'<text x="{x(healed) + 3}" y="{TOP - 6}" style="fill:#2e7d4f">healed</text>')
    y = TOP
    rescues = rescues_of(result)
    for who in slots:
        out += lane_of(result, who, lanes[who], y, heights[who], rescues.get(who, []), x)
        y += heights[who] + LANE_GAP
    out.append("</svg>")
    return "\n".join(out)


def seconds_axis(begin: float, end: float, zero: float, total: int, x: Any) -> list[str]:
    """A line every five seconds."""
    out: list[str] = []
    for second in range(0, int(end - zero) + 1, 5):
        at = x(zero + second)
        out.append(f'<line x1="{at}" x2="{at}" y1="18" y2="{total}" stroke="#eee"/>')
        out.append(f'<text x="{at}" y="13" text-anchor="middle">{second} s</text>')
    return out


def box(x: float, y: float, width: float, height: float, colour: str, title: str = "", opacity: float = 1.0) -> str:
    """A filled rectangle that says `title` under the mouse."""
    said = f"<title>{escape(title)}</title>" if title else ""
    place = f'x="{x}" y="{y}" width="{width:.1f}" height="{height}"'
    return f'<rect {place} fill="{colour}" fill-opacity="{opacity}">{said}</rect>'


def note(x: float, y: float, text: str, colour: str = "#333") -> str:
    """Small text beside a mark."""
    return f'<text x="{x}" y="{y}" style="font-size:10px;fill:{colour}">{escape(text)}</text>'


def server_faults(result: Result, total: int, x: Any) -> list[str]:
    """Faults of no single worker: marked above the lanes on rows that do not overlap; a band where nobody could go on."""
    out: list[str] = []
    for window in result.history.hindrances:
        if window.who is None:
            width = max(x(window.end) - x(window.begin), 1)
            out.append(box(x(window.begin), TOP - 14, width, total, "#c08080", opacity=0.18))
    free = [0.0] * 6
    for fault in sorted((f for f in result.history.faults if f.who is None), key=lambda f: f.begin):
        at = x(fault.begin)
        label = fault.kind + (f" ({fault.detail.split(':')[0]})" if fault.kind == "backend terminated" else "")
        row = next((i for i, until in enumerate(free) if until <= at), 5)
        free[row] = max(x(fault.end), at + len(label) * 5.6 + 8)
        y = 22 + row * 13
        title = f"{fault.kind} {fault.detail}"
        out.append(box(at, y, max(x(fault.end) - at, 2), 11, "#c08080", title, 0.45))
        out.append(note(at + 2, y + 9, label))
    return out


def lane_of(
    result: Result, who: str, lane: list[tuple[int, Bar]], y: int, height: int, rescues: list[tuple[float, int]], x: Any
) -> list[str]:
    """One slot: when it had a process, its faults, its attempts, its rescues."""
    out = [f'<text x="8" y="{y + 12}" style="font-weight:600">{who}</text>']
    out.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{height}" fill="none" stroke="#ddd"/>')
    last = result.began - 1
    for begin, end in sorted((begin, end) for slot, _, begin, end, _ in result.lives if slot == who):
        if begin > last:
            out.append(box(x(last), y, max(x(begin) - x(last), 1.5), height, "#222", "no process", 0.4))
        last = end
    for fault in result.history.faults:
        if fault.who == who:
            colour = FAULT_COLOURS.get(fault.kind, NETWORK)
            text = f"{fault.kind} {fault.detail}"
            out.append(box(x(fault.begin), y, max(x(fault.end) - x(fault.begin), 2), height, colour, text, 0.2))
            out.append(note(x(fault.begin) + 2, y + height - 2, text, colour))
    for row, bar in lane:
        width = max(x(bar.end) - x(bar.begin), 0.8)
        title = f"job {bar.job} attempt {bar.attempt}, {bar.kind}: {bar.outcome}, {bar.end - bar.begin:.2f} s"
        out.append(box(x(bar.begin), y + 2 + row * ROW, width, ROW - 1, COLOURS[bar.outcome], title))
    for at, job in rescues:
        triangle = f'd="M{x(at)} {y + height - 6} l4 7 h-8 z" fill="#c0392b"'
        out.append(f"<path {triangle}><title>rescue of job {job}</title></path>")
    return out


def rescues_of(result: Result) -> dict[str, list[tuple[float, int]]]:
    """When attempts of each slot were rescued, and which jobs."""
    holder = {f: o.who for o in result.history.operations for f in o.fences("claims")}
    found: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for fence, steps in result.history.releases.items():
        for step in steps:
            if step.outcome == "rescued" and fence in holder:
                found[holder[fence]].append((step.at - result.history.epoch, step.job))
    return found
