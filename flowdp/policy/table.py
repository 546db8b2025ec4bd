"""A small table, as aligned text and as HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Table"]


@dataclass(frozen=True)
class Table:
    """Cells of text in rows.

    ::

        print(Table(("policy", "loss"), [("sync", "0.41"), ("exact", "0.39")]))

    Attributes:
        header: Names of the columns. Shape (columns,).
        rows: Shape (rows, columns).
        texts: Columns that are aligned left; the others hold numbers.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: Sequence[int] = (0,)

    def __str__(self) -> str:
        """Columns two blanks apart; a cell is one line."""
        lines = [[" ".join(cell.split()) for cell in row] for row in (self.header, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if at in self.texts else cell.rjust(width)
                for at, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )

    def _repr_html_(self) -> str:
        return self.html()

    def html(self, before: Mapping[int, Sequence[str]] | None = None) -> str:
        """HTML for a page; cells are text, whatever is in them.

        Args:
            before: HTML in front of the cells of a column. Shape (columns, rows).
        """
        columns = {at: iter(marks) for at, marks in (before or {}).items()}
        head = "".join(f"<th>{escape(cell)}</th>" for cell in self.header)
        body = "".join(
            "<tr>"
            + "".join(
                f"<td>{next(columns[at]) if at in columns else ''}{escape(cell)}</td>"
                for at, cell in enumerate(row)
            )
            + "</tr>"
            for row in self.rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
