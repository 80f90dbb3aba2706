"""Rows of text, cells below one another."""

from collections.abc import Sequence


def columns(rows: Sequence[tuple[str, ...]], indent: str = "  ") -> list[str]:
    """Lines of rows of as many cells each."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))] if rows else []
    return [
        indent + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
