"""The page that the demo writes: the picture, the table, and how they were made."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from html import escape

from picture import STYLE

__all__ = ["page"]

_PAGE = """\
<!DOCTYPE html>
<html xmlns="http://www.w3.org/1999/xhtml" lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width"/>
<meta name="color-scheme" content="light dark"/>
<title>stampede demo</title>
<style>{style}
body{{margin:2rem auto;max-width:80rem;padding:0 1rem;background:var(--paper);color:var(--ink);line-height:1.5}}
svg{{width:100%;height:auto}}table{{border-collapse:collapse;margin:1.5rem}}
th,td{{padding:.35rem .9rem;text-align:right;border-bottom:1px solid var(--line)}}
th:first-child,td:first-child{{text-align:left;padding-left:0}}p{{color:var(--dim);margin:.5rem 1.5rem}}
</style>
</head>
<body class="stampede">
{picture}
<table>
<thead><tr>{columns}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
<p>Point at a row to read what its caller did. Where a reader under load has a gap, the machine was busy.</p>
<p>One real run of <code>make demo</code> on the disk engine: Python {python}, {cores} cores, {system}.</p>
</body>
</html>
"""


def page(picture: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a page that needs no other files."""
    return _PAGE.format(
        style=STYLE,
        picture=picture,
        columns="".join(f"<th>{escape(column)}</th>" for column in columns),
        rows="\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows),
        python=platform.python_version(),
        cores=os.cpu_count(),
        system=escape(platform.system()),
    )
