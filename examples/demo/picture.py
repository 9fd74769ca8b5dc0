"""Timelines as SVG: one panel per scene, one row per caller. It has no script, and a light and a dark theme."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from timeline import VISIBLE, Span, Timeline

__all__ = ["Panel", "draw"]

WIDTH = 1240
MARGIN = 24
GUTTER = 32
HEAD = 92  # a panel's title and figures
AXIS = 26
ROW = 4.5
TALL = 290.0  # least height of all rows of a panel

STYLE = """
.stampede{--paper:#ffffff;--card:#f6f8fa;--ink:#1f2328;--dim:#59636e;--line:#d1d9e0;
--computing:#e5484d;--queued:#f7b0a6;--waiting:#7aa7e0;--blocked:#3b6fc4;--served:#a9dcb5;--kill:#1f2328;
font-family:system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif}
@media (prefers-color-scheme:dark){.stampede{--paper:#0d1117;--card:#161b22;--ink:#f0f6fc;--dim:#9198a1;--line:#3d444d;
--computing:#ff6369;--queued:#7d3a3a;--waiting:#3f6fb0;--blocked:#79b8ff;--served:#23633a;--kill:#f0f6fc}}
.paper{fill:var(--paper)}.card{fill:var(--card);stroke:var(--line)}
text{fill:var(--ink);font-size:16px}.head{font-size:26px;font-weight:650}.title{font-size:17px;font-weight:650}.figure{font-size:23px;font-weight:650}
.dim{fill:var(--dim)}.tick{font-size:14px;fill:var(--dim)}
.axis{stroke:var(--line)}.end{stroke:var(--dim);stroke-dasharray:2 4}.death{stroke:var(--kill);stroke-width:2}
.c{fill:var(--computing)}.q{fill:var(--queued)}.w{fill:var(--waiting)}.b{fill:var(--blocked)}.s{fill:var(--served)}
"""

CLASSES = {"computing": "c", "queued": "q", "waiting": "w", "blocked": "b", "served": "s"}
LEGEND = [
    ("computing", "computing"),
    ("queued", "computing, queued at the origin"),
    ("waiting", "waiting for the computation"),
    ("served", "served"),
]


class Panel(NamedTuple):
    """What to draw of one scene: its timeline, two lines of text, and the seconds on its axis."""

    timeline: Timeline
    figure: str  # the main figure, in a few words
    note: str
    seconds: float
    by_turn: bool = False  # sort the rows by the time at which callers were served, not by process


def draw(panels: Sequence[Panel], heading: str, note: str) -> str:
    """Return one SVG of all panels, in two columns."""
    width = (WIDTH - 2 * MARGIN - GUTTER) / 2
    tall = HEAD + max(TALL, ROW * panels[0].timeline.callers) + AXIS
    top = 112
    height = top + ((len(panels) + 1) // 2) * (tall + GUTTER) - GUTTER + MARGIN
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="stampede" viewBox="0 0 {WIDTH} {height:g}" '
        f'role="img" aria-label="{escape(heading)}">',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height:g}" rx="10"/>',
        f'<text class="head" x="{MARGIN}" y="44">{escape(heading)}</text>',
        f'<text class="dim" x="{MARGIN}" y="70">{escape(note)}</text>',
        *_legend(MARGIN, 88),
    ]
    for number, panel in enumerate(panels):
        x = MARGIN + (number % 2) * (width + GUTTER)
        y = top + (number // 2) * (tall + GUTTER)
        body += [f'<g transform="translate({x:g} {y:g})">', *_panel(panel, width, tall), "</g>"]
    return "\n".join([*body, "</svg>\n"])


def _legend(x: float, y: float) -> Iterator[str]:
    for what, words in LEGEND:
        yield f'<rect class="{CLASSES[what]}" x="{x:g}" y="{y:g}" width="22" height="12" rx="2"/>'
        yield f'<text class="dim" x="{x + 30:g}" y="{y + 11:g}">{words}</text>'
        x += 62 + 7.8 * len(words)
    yield f'<path class="death" d="M{x:g} {y + 1:g}l10 10m0 -10l-10 10"/>'
    yield f'<text class="dim" x="{x + 18:g}" y="{y + 11:g}">killed</text>'
    yield f'<path class="end" d="M{x + 90:g} {y - 1:g}v14"/>'
    yield f'<text class="dim" x="{x + 99:g}" y="{y + 11:g}">expiry, if not refreshed</text>'


def _panel(panel: Panel, width: float, tall: float) -> Iterator[str]:
    timeline, pad = panel.timeline, 14.0
    yield f'<rect class="card" width="{width:g}" height="{tall + 10:g}" rx="8"/>'
    yield f'<text class="title" x="{pad:g}" y="28">{escape(timeline.title)}</text>'
    yield f'<text class="figure" x="{pad:g}" y="56">{escape(panel.figure)}</text>'
    yield f'<text class="dim" x="{pad:g}" y="80">{escape(panel.note)}</text>'
    scale = (width - 2 * pad) / panel.seconds
    height = tall - HEAD - AXIS
    yield f'<g transform="translate({pad:g} {HEAD + 4})">'
    yield from _rows(panel, scale, height / timeline.callers, width - 2 * pad)
    for at in timeline.expiries:
        x = (at - timeline.begin) * scale
        yield f'<path class="end" d="M{x:.1f} 0v{height:g}"><title>the value would have expired</title></path>'
    if timeline.killed_at is not None:
        yield from _death(timeline, scale, height / timeline.callers)
    yield from _axis(panel.seconds, scale, height, width - 2 * pad)
    yield "</g>"


def _rows(panel: Panel, scale: float, row: float, width: float) -> Iterator[str]:
    timeline = panel.timeline
    rows = list(enumerate(timeline.rows()))
    if panel.by_turn:
        rows.sort(key=lambda each: [span.start for span in each[1]][-1:])  # the last span: served
    for place, (caller, spans) in enumerate(rows):
        yield f'<g transform="translate(0 {place * row:.2f})"><title>{escape(_story(timeline, caller, spans))}</title>'
        for span in spans:
            x, end = (span.start - timeline.begin) * scale, (span.end - timeline.begin) * scale
            if span.end - span.start >= VISIBLE and x < width:
                long = max(min(end, width) - x, 1.2 if span.what == "computing" else 0)
                high = row * (1.1 if span.what == "computing" else 0.8)
                yield f'<rect class="{CLASSES[span.what]}" x="{x:.1f}" width="{long:.1f}" height="{high:.1f}"/>'
        yield "</g>"


def _story(timeline: Timeline, caller: int, spans: Sequence[Span]) -> str:
    """Return what the caller did, as the tooltip of its row."""
    parts = [f"{span.what} {span.end - span.start:.3f} s" for span in spans if span.end - span.start >= VISIBLE]
    if caller in timeline.killed:
        parts.append("killed")
    return f"caller {caller + 1}: {', '.join(parts)}"


def _death(timeline: Timeline, scale: float, row: float) -> Iterator[str]:
    assert timeline.killed_at is not None
    x = (timeline.killed_at - timeline.begin) * scale
    top, bottom = timeline.killed.start * row, timeline.killed.stop * row
    yield f'<g><title>SIGKILL</title><path class="death" d="M{x:.1f} {top:.1f}V{bottom:.1f}"/>'
    middle = (top + bottom) / 2
    yield f'<path class="death" d="M{x + 10:.1f} {middle - 6:.1f}l12 12m0 -12l-12 12"/>'
    yield f'<text x="{x + 32:.1f}" y="{middle + 6:.1f}">kill -9</text></g>'


def _axis(seconds: float, scale: float, y: float, width: float) -> Iterator[str]:
    yield f'<path class="axis" d="M0 {y + 2:g}h{width:g}"/>'
    step = next((step for step in (0.05, 0.1, 0.2, 0.5, 1, 2, 5) if seconds / step <= 7), 10.0)
    for number in range(int(seconds / step) + 1):
        x = number * step * scale
        anchor = "start" if number == 0 else "middle" if x < width - 14 else "end"
        label = f"{number * step:g}" + (" s" if number == 0 else "")
        yield f'<text class="tick" x="{x:.1f}" y="{y + 19:g}" text-anchor="{anchor}">{label}</text>'
