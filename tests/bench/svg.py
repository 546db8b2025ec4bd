"""Texts of figures."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["texts"]


def texts(picture: Path) -> list[str]:
    """Texts of an SVG of matplotlib, which stand as comments beside their outlines."""
    return re.findall(r"<!--(.*?)-->", picture.read_text(encoding="utf-8"))
