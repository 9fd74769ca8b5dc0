"""A hook of mkdocs: the README's pictures, which other sites show by an address, come from the site itself."""

from __future__ import annotations

from typing import Any

PICTURES = "https://raw.githubusercontent.com/stampede-guard/stampede/main/docs/"
"""Where a package index finds the README's pictures."""


def on_page_content(html: str, **_: Any) -> str:
    """Return the page with its pictures beside it, so that a reader needs no other server."""
    return html.replace(f'src="{PICTURES}', 'src="')
