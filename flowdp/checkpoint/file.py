"""A checkpoint as a file: plain numbers, strings, lists, dicts and tensors, as `torch.save` writes them.

`torch.load(path, weights_only=True)` reads the file, and runs no code of it, but does not look at the CRC-32
that the archive has of each record: flipped bits come back as other numbers. So `read` compares it first.

A file is written beside its place, read back, and renamed: a process that is killed leaves the file from
before, and perhaps a file whose name says that it is not finished.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.serialization import config as serialization

from flowdp.errors import CheckpointError
from flowdp.policy.formats import format_text
from flowdp.protocol.position import decode, encode

__all__ = ["FORMAT", "UNFINISHED", "beside", "plain", "read", "remove", "write"]

FORMAT = 1
"""Version of the format; it grows when an older flowdp cannot read the file."""

FOLDER = 0x10
"""Attribute of a record that is a folder: torch reads nothing of it, and returns memory that nobody wrote."""

UNFINISHED = ".tmp"
"""Suffix of a file that is being written."""

KEYS = (str, int, float, bool, type(None))

ENCODED = ("position", "history")
"""Records in the file, as text."""
log = logging.getLogger("flowdp")


# ---------------------------------------------------------------- allowed contents
def plain(state: object, where: str = "") -> Any:
    """The state as numbers, strings, lists, tuples, dicts and dense tensors on the CPU.

    Numpy's numbers become Python's and mappings of all kinds dicts, but a Counter stays one. A tensor that
    is a view of more, or lies on a device, is copied; others share their memory with the one given.

    Args:
        state: Anything.
        where: Its path from the root, for the message.

    Raises:
        CheckpointError: Something in it is none of these; the message names its path.
    """
    if state is None or type(state) in (bool, int, float, str):
        return state
    if isinstance(state, np.generic):
        return plain(state.item(), where)
    if type(state) in (Tensor, nn.Parameter) and isinstance(state, Tensor) and state.layout is torch.strided:
        return _own(state)
    if isinstance(state, (list, tuple)):
        items = [plain(item, f"{where}[{number}]") for number, item in enumerate(state)]
        return items if isinstance(state, list) else tuple(items)
    if isinstance(state, Mapping):
        made: dict[Any, Any] = Counter() if isinstance(state, Counter) else {}
        for key, item in state.items():
            if type(key) not in KEYS:
                raise _not_plain(f"the key {key!r:.80} of {where or 'the state'}", key)
            made[key] = plain(item, f"{where}.{key}" if where else str(key))
        return made
    raise _not_plain(where or "the state", state)


def _own(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize:
        return tensor
    return tensor.clone()


def _not_plain(what: str, value: object) -> CheckpointError:
    return CheckpointError(
        f"{what} is a {type(value).__name__}: a checkpoint holds None, numbers, strings, lists, tuples, "
        "dicts and dense tensors; keep the rest out of the state_dict, and make it anew at the start"
    )


# ---------------------------------------------------------------- reading
def read(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint file: its tensors on the CPU, its position and history as objects.

    Raises:
        CheckpointError: The file is missing, torn, changed, foreign or of a later format; the message has
            the reason and a remedy.

    Threads: any.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if any(record.external_attr & FOLDER for record in archive.infolist()):
                raise ValueError("a record of it is marked as a folder")
            if (damaged := archive.testzip()) is not None:
                raise ValueError(f"the checksum of its record {damaged!r} is wrong")
        return _checked(torch.load(path, weights_only=True, map_location="cpu"))
    except OSError as error:
        reason = f"it cannot be read ({error.strerror or error})"
    except Exception as error:  # any error of the parsers of zipfile, torch and json about foreign bytes
        reason = f"it is damaged, cut off or no checkpoint of flowdp ({_said(error)}); use an older one"
    raise CheckpointError(f"checkpoint {path}: {reason}", path=str(path))


def _checked(state: Any) -> dict[str, Any]:
    """The state of a file, with its position and history as objects."""
    if (number := state["format"]) != FORMAT:
        raise ValueError(f"it has format {number}, and this flowdp reads {FORMAT}")
    return {**state, **{name: decode(json.loads(state[name])) for name in ENCODED}}


# ---------------------------------------------------------------- writing
def write(path: str | Path, state: Mapping[str, Any], *, also: Path | None = None) -> None:
    """Write a checkpoint and read it back; the path holds all of it, or the file from before.

    Args:
        path: Of the file; its folder is there.
        state: As `read` gives it; the format is filled in.
        also: A second name for the file, in the same folder; it has it before the first one.

    Raises:
        CheckpointError: Something in the state is not plain, the file cannot be written (`__cause__` says
            why), or the written file does not read.

    Threads: any; two at once need two folders.
    """
    path = Path(path)
    encoded = {name: json.dumps(encode(state[name]), allow_nan=False) for name in ENCODED}
    told = plain({**state, "format": FORMAT, **encoded})
    try:
        with beside(path) as unfinished:
            checksums = serialization.patch("save.compute_crc32", True)  # type: ignore[attr-defined]
            with unfinished.open("wb") as file, checksums:
                torch.save(told, file)
                file.flush()
                os.fsync(file.fileno())
            read(unfinished)
            if also is not None:
                _name_also(unfinished, also)
        _sync_folder(path.parent)
    except (OSError, RuntimeError, MemoryError) as error:
        # Torch's writer does not say itself that the disk is full.
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        raise CheckpointError(
            f"checkpoint {path}: it cannot be written ({_said(cause)}); those before it are untouched",
            path=str(path),
        ) from cause


def _name_also(unfinished: Path, also: Path) -> None:
    with beside(also) as second:
        remove(second)
        try:
            os.link(unfinished, second)
        except OSError:  # a file system without links
            shutil.copyfile(unfinished, second)
            with second.open("rb+") as file:
                os.fsync(file.fileno())


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Context with the path of an unfinished file, which takes the place of the other at the end.

    Where the block fails it is removed, and the other one stays as it was.
    """
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        remove(unfinished)


def _sync_folder(folder: Path) -> None:
    """Let the disk know of a new name; the file is whole without that, too."""
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        log.warning("the folder %s cannot be flushed to the disk: %s", folder, error.strerror)


def remove(path: Path) -> None:
    """Remove a file; a failure is logged and not raised."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be removed: %s", path, error.strerror)


def _said(error: BaseException) -> str:
    text = format_text(error).strip().partition("\n")[0][:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
