"""A checkpoint as a file: plain numbers, strings, lists, dicts and tensors, as `torch.save` writes them.

`torch.load(path, weights_only=True)` reads the file, but does not look at the CRC-32 that the archive has of
each record: flipped bits come back as other numbers. So `read` compares it first.

A file is written beside its place, read back, and renamed: a process that is killed leaves the file from
before, and perhaps a file whose name says that it is not finished. No symbolic link is followed to a file, so
a user who may write into the folder cannot have another file read or overwritten.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.serialization import config as serialization

from flowdp.checkpoint.archive import NESTED, check_archive
from flowdp.errors import CheckpointError
from flowdp.machine.event_log import decode, encode
from flowdp.policy.formats import format_text
from flowdp.policy.tally import EpochMetrics
from flowdp.protocol.position import Position, check_types

__all__ = ["FORMAT", "UNFINISHED", "plain", "read", "remove", "write"]

FORMAT = 1
"""Version of the format; it grows when an older flowdp cannot read the file."""

UNFINISHED = ".tmp"
"""Suffix of a file that is being written."""

BINARY = getattr(os, "O_BINARY", 0)  # of Windows
NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | BINARY
NO_WAIT = getattr(os, "O_NONBLOCK", 0)

TENSORS = (Tensor, nn.Parameter)
KEYS = (str, int, float, bool, type(None))
FIELDS: dict[str, tuple[type, ...]] = {
    "flowdp": (str,),
    "torch": (str,),
    "format": (int,),
    "version": (int,),
    "epoch": (int,),
    "global_step": (int,),
    "position": (str,),
    "model": (dict,),
    "buffers": (dict,),
    "ranks": (list,),
    "history": (str,),
    "fingerprint": (dict,),
    "orders": (dict, type(None)),
    "best": (float, type(None)),
    "top": (list,),
    "best_model": (dict,),
    "ema": (dict,),
    "best_ema": (dict,),
    "outer": (dict,),
}

log = logging.getLogger("flowdp")


# ---------------------------------------------------------------- allowed contents
def plain(state: object, where: str = "", depth: int = 0) -> Any:
    """The state as numbers, strings, lists, tuples, dicts and dense tensors on the CPU.

    Numpy's numbers become Python's and mappings of all kinds dicts, but a Counter stays one. A tensor that
    is a view of more, or lies on a device, is copied; others share their memory with the one given.

    Args:
        state: Anything.
        where: Its path from the root, for the message.
        depth: Containers around it.

    Raises:
        CheckpointError: Something in it is none of these, or lies too deep; the message names its path.
    """
    if depth > NESTED:
        raise CheckpointError(
            f"{where[:80]}... lies more than {NESTED} containers deep: does one contain itself? Keep it out "
            "of the state_dict"
        )
    if state is None or type(state) in (bool, int, float, str):
        return state
    if isinstance(state, np.generic):
        return plain(state.item(), where)
    if isinstance(state, Tensor) and type(state) in TENSORS and state.layout is torch.strided:
        return _own(state)
    if isinstance(state, (list, tuple)):
        items = [plain(item, f"{where}[{number}]", depth + 1) for number, item in enumerate(state)]
        return items if isinstance(state, list) else tuple(items)
    if isinstance(state, Mapping):
        made: dict[Any, Any] = Counter() if isinstance(state, Counter) else {}
        for key, item in state.items():
            if type(key) not in KEYS:
                raise _not_plain(f"the key {key!r:.80} of {where or 'the state'}", key)
            made[key] = plain(item, f"{where}.{key}" if where else str(key), depth + 1)
        return made
    raise _not_plain(where or "the state", state)


def _own(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize:
        return tensor
    return tensor.clone()


def _not_plain(what: str, value: object) -> CheckpointError:
    kind = type(value).__name__
    article = "an" if kind[0] in "aeiouAEIOU" else "a"
    return CheckpointError(
        f"{what} is {article} {kind}: a checkpoint holds None, numbers, strings, lists, tuples, dicts and "
        f"dense tensors; keep the rest out of the state_dict, and make it anew at the start"
    )


# ---------------------------------------------------------------- reading
class _UnusableError(Exception):
    """Reason why a file is no checkpoint, with a remedy."""


def read(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint file: its tensors on the CPU, its position and history as objects.

    No byte of it is ever run as code.

    Raises:
        CheckpointError: The file is missing, torn, changed, foreign or of a later format, no plain file, or
            it holds no checkpoint; the message has the reason and a remedy.

    Threads: any.
    """
    try:
        with _opened(Path(path)) as file:
            _check_begin(file)
            check_archive(file)
            file.seek(0)
            state = torch.load(file, weights_only=True, map_location="cpu")
        return _checked(state)
    except _UnusableError as error:
        reason = str(error)
    except FileNotFoundError:
        reason = "there is no such file; resume=True takes the newest one of the checkpoint folder"
    except OSError as error:
        if error.errno == errno.ELOOP:
            reason = "it is a symbolic link, and none is followed: give the path of the file itself"
        else:
            reason = f"it cannot be read ({error.strerror or error})"
    except Exception as error:  # any error of torch's and json's parsers about foreign bytes
        reason = f"it is damaged, cut off or no checkpoint of flowdp ({_said(error)}); use an older one"
    raise CheckpointError(f"checkpoint {path}: {reason}", path=str(path))


@contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    """A plain file, open for reading; a pipe would be waited for without end."""
    with os.fdopen(os.open(path, os.O_RDONLY | NO_LINK | NO_WAIT), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise _UnusableError("it is no plain file")
        yield file


def _check_begin(file: BufferedReader) -> None:
    """Refuse a file that is no archive, with a reason of its own."""
    begin = file.read(4)
    if not begin:
        raise _UnusableError("the file is empty; use an older one")
    if begin != b"PK\x03\x04":
        raise _UnusableError("it is no checkpoint of flowdp")


def _checked(state: object) -> dict[str, Any]:
    """The state of a file, if it is one of the schema."""
    state = plain(state)
    if not isinstance(state, dict):
        raise _UnusableError(f"it holds a {type(state).__name__}, not a checkpoint of flowdp")
    if type(number := state.get("format")) is int and number != FORMAT:
        raise _UnusableError(
            f"it has format {number}, and this flowdp reads {FORMAT}: use the one that wrote it"
        )
    for table in ("best_model", "ema", "best_ema", "outer"):
        state.setdefault(table, {})
    state.setdefault("orders", None)
    state.setdefault("top", [])
    for name, kinds in FIELDS.items():
        if name not in state:
            raise _UnusableError(f"it has no {name!r}: it is no checkpoint of flowdp")
        value = state[name]
        if type(value) not in kinds or (type(value) is int and value < 0):
            raise _UnusableError(f"its {name!r} is {value!r:.80}; use another file")
    for table in ("model", "buffers", "best_model", "ema", "best_ema", "outer"):
        for name, value in state[table].items():
            is_tensor = isinstance(value, Tensor) or str(name).endswith("_extra_state")
            if not isinstance(name, str) or not is_tensor:
                raise _UnusableError(f"{name!r:.80} of its {table!r} is no tensor; use another file")
    for epoch, checksum in (state["orders"] or {}).items():
        if type(epoch) is not int or type(checksum) is not int:
            raise _UnusableError(f"its 'orders' hold {epoch!r:.80}: {checksum!r:.80}; use another file")
    for one in state["top"]:
        if type(one) is not list or [*map(type, one)] != [float, str]:
            raise _UnusableError(f"its 'top' holds {one!r:.80}, not a value and a name; use another file")
    if not state["ranks"] or not all(isinstance(rank, dict) for rank in state["ranks"]):
        raise _UnusableError("its 'ranks' are not one dict for each; use another file")
    position, history = decode(json.loads(state["position"])), decode(json.loads(state["history"]))
    check_types(position, Position, "position")
    position.check()
    check_types(history, tuple[EpochMetrics, ...], "history")
    return {**state, "position": position, "history": history}


# ---------------------------------------------------------------- writing
def write(path: str | Path, state: Mapping[str, Any], *, also: Path | None = None) -> None:
    """Write a checkpoint and read it back; the path holds all of it, or the file from before.

    Args:
        path: Of the file; its folder is there.
        state: As `read` gives it. The versions of flowdp, of torch and of the format are filled in.
        also: A second name for the file, in the same folder; it has it before the first one.

    Raises:
        CheckpointError: Something in the state is not plain, the file cannot be written (`__cause__` says
            why), or the written file does not read.

    Threads: any; two at once need two folders.
    """
    path = Path(path)
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        told = plain({**state, **_versions(), **_encoded(state)})
        remove(unfinished)  # of a process that was killed; of a link, not the file that it points to
        checksums = serialization.patch("save.compute_crc32", True)  # type: ignore[attr-defined]
        with _created(unfinished) as file, checksums:
            torch.save(told, file)
            file.flush()
            os.fsync(file.fileno())
        read(unfinished)
        if also is not None:
            _name_also(unfinished, also)
        unfinished.replace(path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError, MemoryError) as error:
        # Torch's writer does not say itself that the disk is full.
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        raise CheckpointError(
            f"checkpoint {path}: it cannot be written ({_said(cause)}); those before it are untouched",
            path=str(path),
        ) from cause
    finally:
        remove(unfinished)


def _created(path: Path) -> BufferedWriter:
    """A new file, open for writing; an existing one is never written to."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, 0o666), "wb")


def _versions() -> dict[str, Any]:
    try:
        own = version("flowdp")
    except PackageNotFoundError:  # run from its folder
        own = "unknown"
    return {"flowdp": own, "torch": str(torch.__version__), "format": FORMAT}


def _encoded(state: Mapping[str, Any]) -> dict[str, str]:
    return {name: json.dumps(encode(state[name]), allow_nan=False) for name in ("position", "history")}


def _name_also(unfinished: Path, also: Path) -> None:
    second = also.with_name(also.name + UNFINISHED)
    remove(second)
    try:
        os.link(unfinished, second)
    except OSError:  # a file system without links
        with unfinished.open("rb") as source, _created(second) as file:
            shutil.copyfileobj(source, file)
            file.flush()
            os.fsync(file.fileno())
    second.replace(also)


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
