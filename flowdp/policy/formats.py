"""Numbers, errors and small tables as text, for records, progress lines and messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Table", "format_duration", "format_error", "format_indices", "format_metric", "format_text"]


def format_duration(ms: float) -> str:
    """A duration in the two units that matter: "420ms", "1.2s", "4m 32s", "3h 12m"."""
    # Each limit is where the unit below would round up to a whole one of the unit above.
    if ms < 999.5:
        return f"{ms:.0f}ms"
    if ms < 59_950.0:
        return f"{ms / 1000.0:.1f}s"
    seconds = int(ms / 1000.0 + 0.5)
    if seconds < 3600:
        return f"{seconds // 60}m {seconds % 60:02d}s"
    return f"{seconds // 3600}h {seconds % 3600 // 60:02d}m"


def format_metric(value: float) -> str:
    """A metric: "0", scientific below 0.001, four decimals below 100, else two."""
    if value == 0.0:
        return "0"
    if abs(value) < 0.001:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.4f}" if abs(value) < 100.0 else f"{value:.2f}"


def format_epochs(count: int) -> str:
    """A number of epochs: "1 epoch", "2 epochs"."""
    return f"{count} epoch{'s' * (count != 1)}"


def format_indices(indices: Sequence[int]) -> str:
    """The first eight of some indices, and whether there are more: "3, 7, 1, ..."."""
    return ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")


def format_error(error: BaseException) -> str:
    """The class of an error and its text, if it has one: "ValueError: boom"."""
    text = format_text(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def format_text(error: BaseException) -> str:
    """The text of an error. One whose `__str__` raises does not end the thread that reports it."""
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as other:
        return f"(no text: its __str__ raised {type(other).__name__})"


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
