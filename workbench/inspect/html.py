"""HTML: tables and lines with their style inline, no script, no class, nothing fetched.

Colours are chosen to be read on light and on dark pages: text keeps the page's own colour, marks are translucent.
"""

from __future__ import annotations

import html as _html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from workbench.runs.condition import ENDED, state_of

_FONT = "font-family:ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace"
_CELL = "padding:3px 10px 3px 0;text-align:left;vertical-align:top;border:none"
_WHOLE = re.compile(r"\|\w+\|")  # a browser breaks a line behind each bar
_PROSE_CH = 24
_RIGHT = "padding:3px 10px 3px 0;text-align:right;vertical-align:top;border:none;font-variant-numeric:tabular-nums"


@dataclass(frozen=True)
class Cell:
    """A cell of its own look: `text` is escaped; `strong` is bold, `muted` grey, `right` a number; `under` is a second,
    quieter line, where a column of its own would leave all of them narrow."""

    text: str
    under: str = field(default="", kw_only=True)
    strong: bool = False
    muted: bool = False
    right: bool = False


def escape(text: object) -> str:
    """Text made safe for HTML, quotes included."""
    return _html.escape(str(text), quote=True)


def line(text: str, *, muted: bool = False, strong: bool = False) -> str:
    """One paragraph of plain text."""
    style = "margin:4px 0;font-size:13px" + (";opacity:.7" if muted else "")
    body = _WHOLE.sub(r'<span style="white-space:nowrap">\g<0></span>', escape(text))
    body = f"<b>{body}</b>" if strong else body
    return f'<div style="{style}">{body}</div>'


def table(header: Sequence[str], rows: Iterable[Sequence[Cell | str]], *, mono: bool = False) -> str:
    """A table with a header; strings become plain cells. A head stands over its numbers on their side."""
    rows = [list(row) for row in rows]
    right = {at for row in rows for at, cell in enumerate(row) if isinstance(cell, Cell) and cell.right}
    head = "".join(_head(name, right=at in right) for at, name in enumerate(header))
    body = "".join(f"<tr>{''.join(_cell(cell) for cell in row)}</tr>" for row in rows)
    style = f"border-collapse:collapse;font-size:12.5px;line-height:1.45;margin:6px 0;{_FONT if mono else ''}"
    return f'<table style="{style}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def legend(meanings: Mapping[str, str]) -> str:
    """What the words of a table or a picture mean, under it: a word in bold, its meaning behind it."""
    said = " · ".join(f"<b>{escape(word)}</b>: {escape(meaning)}" for word, meaning in meanings.items())
    return f'<div style="margin:4px 0;font-size:12.5px;opacity:.8">{said}</div>'


def one_format(values: Iterable[float | None], spec: str) -> str:
    """`spec` (".4f") for the numbers of a column, or a scientific one for all of them where `spec` would leave one that
    is not 0 with less than two digits."""
    sizes = [abs(value) for value in values if value and isfinite(value)]
    return ".1e" if sizes and min(sizes) < 10.0 ** (1 - int(spec[1:-1])) else spec


def number(value: float, spec: str) -> str:
    """A number in its column's format; zero, a rounded one too, has no sign and no exponent."""
    text = format(value, spec) if value or spec[-1] != "e" else "0"
    return text.removeprefix("-") if not text.strip("-0.%") else text


def _head(name: str, *, right: bool) -> str:
    # A browser breaks a line behind each bar of |Δ|, and no-break spaces do not keep it from that.
    whole = ";white-space:nowrap" if "|" in name else ""
    style = _RIGHT if right else _CELL
    return f'<th style="{style};border-bottom:1px solid rgba(128,128,128,.5){whole}">{escape(name)}</th>'


def _breakable(text: str) -> str:
    """A long name may go on in a second line behind an underscore, where its column is narrow."""
    return escape(text).replace("_", "_<wbr>") if len(text) > _PROSE_CH and " " not in text else escape(text)


def _own_width(*lines: str) -> str:
    """On a narrow page a table scrolls; squeezed, its sentences would be a word a line, and names end at a hyphen."""
    if max(map(len, lines)) > _PROSE_CH and any(" " in line for line in lines):
        return f";min-width:min({_PROSE_CH}ch,30vw)"
    return ";white-space:nowrap" if any("-" in line[1:] and " " not in line for line in lines) else ""


def _cell(cell: Cell | str) -> str:
    if isinstance(cell, str):
        return f'<td style="{_CELL}{_own_width(cell)}">{_breakable(cell)}</td>'
    body = _breakable(cell.text)
    if cell.strong:
        body = f"<b>{body}</b>"
    if cell.under:
        body += f'<br><span style="opacity:.7">{escape(cell.under)}</span>'
    style = (_RIGHT if cell.right else _CELL) + _own_width(cell.text, cell.under)
    if cell.muted:
        style += ";opacity:.6"
    return f'<td style="{style}">{body}</td>'


def folded(summary: str, *parts: str) -> str:
    """Parts behind a line that opens them at a click, without a script."""
    head = f'<summary style="margin:4px 0;font-size:13px;cursor:pointer">{escape(summary)}</summary>'
    return f"<details>{head}{''.join(parts)}</details>"


def block(*parts: str) -> str:
    """Parts under one another, as one output."""
    return f'<div style="max-width:1000px;overflow-x:auto">{"".join(parts)}</div>'


def count(number: int, singular: str, plural: str | None = None) -> str:
    """ "1 call", "1,204 calls"."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def dash(value: float | None, spec: str = "d") -> str:
    """`value` as `spec` has it, or a dash where there is none."""
    return "–" if value is None else format(value, spec)


def cut(text: str, letters: int) -> str:
    """`text` in one line of at most `letters`; what does not fit ends between two words, with an ellipsis."""
    line = " ".join(text.split())
    if len(line) <= letters:
        return line
    kept = line[: letters - 1]
    whole = kept.rpartition(" ")[0]
    return f"{whole} …" if len(whole) > letters // 2 else f"{kept}…"


def yet(run: Any) -> str:
    """ " yet" of a run that may still come to it; nothing of one that has ended, by its own word or by its death."""
    status, path = getattr(run, "status", None) or {}, getattr(run, "path", None)
    ended = status.get("status") in ENDED or (bool(status) and path is not None and state_of(path)[0] != "running")
    return "" if ended else " yet"


def why_no_step(run: Any) -> str:
    """Why a run that has no optimiser step has none."""
    if getattr(run, "served", False):
        return "a served run trains nothing, so it has no optimiser steps"
    return f"no optimiser step{yet(run)}"


def steps(numbers: Sequence[int]) -> str:
    """ "step 3", "steps 1, 2", "steps 1, 2, 3, 4, 5, 6 and 8 more"."""
    shown = ", ".join(map(str, numbers[:6]))
    return f"step{'s' if len(numbers) > 1 else ''} {shown}" + (f" and {len(numbers) - 6} more" if numbers[6:] else "")
