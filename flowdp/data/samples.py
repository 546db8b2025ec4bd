"""The samples of a map-style dataset, one by one, so that an error names the one that cannot be read.

A worker process sends its error as text alone, so the sample is named by a note, which is in that text, too.
"""

from __future__ import annotations

import re
from itertools import takewhile
from typing import Any

from torch.utils.data import Dataset, Subset

from flowdp.policy.formats import format_error, format_text

__all__ = ["Samples", "described"]

NOTE = re.compile(r"\n?while reading sample (\d+)$", re.MULTILINE)
"""Note on an error of a dataset."""


class Samples(Dataset[Any]):
    """A dataset as torch reads it, list by list.

    One with a `__getitems__` of its own gets the whole list, and its errors name no sample.

    Args:
        dataset: Map-style.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset
        inner: Any = dataset
        while type(inner) is Subset:  # its own `__getitems__` only passes the list on
            inner = inner.dataset
        self._is_listed = callable(getattr(inner, "__getitems__", None))

    def __getitems__(self, indices: list[int]) -> Any:
        """Samples of a list of indices, with a note on the error of one."""
        if self._is_listed:
            return self.dataset.__getitems__(indices)  # type: ignore[attr-defined]
        samples = []
        try:
            for index in indices:
                samples.append(self.dataset[index])
        except BaseException as error:
            error.add_note(f"while reading sample {index}")
            raise
        return samples


def described(error: BaseException) -> tuple[int | None, str]:
    """The sample that an error's note names, if any, and the text of the error.

    Of an error in a worker process, whose text has its whole traceback, these are the last lines.
    """
    notes = NOTE.search("\n".join([format_text(error), *getattr(error, "__notes__", ())]))
    text = format_error(error)
    if "\nOriginal Traceback" in text:
        own = takewhile(lambda line: not line.startswith(" "), reversed(text.rstrip().splitlines()))
        text = NOTE.sub("", "\n".join(reversed(list(own))))
    return (None if notes is None else int(notes[1])), text
