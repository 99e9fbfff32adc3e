"""Small pieces of HTML. Every text is escaped here, so that names of devices and jobs cannot become markup."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hetero_mpi.report.drawing import Drawing, svg


def section(title: str, body: str, note: str = "", emulated: bool = False) -> str:
    """A section with its heading; nothing where it has no body. ``emulated``: its times are imitated ones."""
    if not body:
        return ""
    label = ' <span class="tag">emulated</span>' if emulated else ""
    said = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}{label}</h2>{said}{body}</section>"


def picture(drawing: Drawing | None, wide: bool = False) -> str:
    """A drawing in the page's colours. ``wide``: it keeps its size, and scrolls where the page is narrower."""
    if drawing is None:
        return ""
    kind = "wide" if wide else "chart"
    return f'<div class="{kind}" {"tabindex=0" if wide else ""}>{svg(drawing, variables=True)}</div>'


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table; columns that are empty in all rows are left out. ``numbers``: columns set to the right."""
    kept = [column for column in range(len(headers)) if any(row[column] for row in rows)]
    if not rows or not kept:
        return ""

    def cells(row: Sequence[str], tag: str) -> str:
        ways = {column: ' class="n"' if column in numbers else "" for column in kept}
        return "".join(f"<{tag}{ways[column]}>{escape(row[column])}</{tag}>" for column in kept)

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<div class="wide" tabindex=0><table><thead><tr>{cells(headers, "th")}</tr></thead><tbody>{body}</tbody></table></div>'


def listing(texts: Sequence[str]) -> str:
    """Sentences, one below the other."""
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>" if texts else ""


def tiles(facts: Sequence[tuple[str, str, str]]) -> str:
    """Key figures: (what, figure, remark)."""
    parts = [
        f'<div class="tile"><div class="what">{escape(what)}</div><div class="figure">{escape(figure)}</div>'
        f'<div class="remark">{escape(remark)}</div></div>'
        for what, figure, remark in facts
    ]
    return f'<div class="tiles">{"".join(parts)}</div>'


def share_bar(parts: Sequence[tuple[str, float, str]], title: str) -> str:
    """A bar of shares of 1: (name, share, colour)."""
    spans = "".join(
        f'<span style="width:{min(max(share, 0.0), 1.0) * 100:.2f}%;background:var(--{colour})" '
        f'title="{escape(name)} {share * 100:.1f} %"></span>'
        for name, share, colour in parts
        if share > 0.0005
    )
    return f'<div class="bar" role="img" aria-label="{escape(title)}">{spans}</div>'
