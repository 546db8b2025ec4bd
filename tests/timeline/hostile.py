"""Names that break pages and files that do not expect them."""

from __future__ import annotations

__all__ = ["HOSTILE"]

HOSTILE = (
    "</script><script>throw 1</script>",
    "<img src=x onerror=throw(1)>",
    'a "quote" and \\ and \'',
    "new\nline\tand\u2028others",
    "$x_1$ & <b> &amp; ]]>",
    "__DATA__",
    "ünïcode 漢字 🙂",
)
