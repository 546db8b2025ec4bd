"""Tests of hostile files with right checksums: refused before torch reads them, and before they use
memory.
"""

from __future__ import annotations

import io
import os
import struct
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flowdp.checkpoint.archive import NESTED, check_archive
from flowdp.checkpoint.file import plain, read, write
from flowdp.errors import CheckpointError
from tests.checkpoint.test_file import archive, checkpoint, refusal, with_pickle

HUGE = 2**31
KINDS = [
    kind
    for kind in vars(torch).values()
    if isinstance(kind, torch.dtype) and not kind.is_complex and "q" not in str(kind)
]


def check(data: bytes) -> None:
    check_archive(io.BufferedReader(io.BytesIO(data)))  # type: ignore[arg-type]


class Call:
    """An object whose pickle calls a function."""

    def __init__(self, function: Callable[..., object], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def storage(*values: float) -> Any:
    return torch.tensor(values)._typed_storage()


def rebuilt(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> Call:
    """A tensor over a storage of 16 bytes."""
    of = storage(1.0, 2.0, 3.0, 4.0)
    return Call(torch._utils._rebuild_tensor_v2, of, offset, shape, strides, False, OrderedDict())


def repacked(data: bytes, change: Callable[[str, bytes], bytes], compression: int = 0) -> bytes:
    buffer = io.BytesIO()
    source = zipfile.ZipFile(io.BytesIO(data))
    with zipfile.ZipFile(buffer, "w", compression) as made:
        for name in source.namelist():
            made.writestr(name, change(name, source.read(name)))
    return buffer.getvalue()


def doubled(levels: int) -> bytes:
    """A list holding a list twice, which holds a list twice, and so on: 2 ** levels items when walked."""
    pickled = b"\x80\x02]q\x00"
    for level in range(levels):
        pickled += b"](" + bytes([ord("h"), level, ord("h"), level]) + b"eq" + bytes([level + 1])
    return pickled + b"."


def two_faced() -> bytes:
    """An archive that is a bomb for torch, which reads offsets from the start, but not for zipfile."""
    bomb = repacked(archive({"a": torch.zeros(1 << 22)}), lambda _, data: data, zipfile.ZIP_DEFLATED)
    harmless = repacked(archive({"a": torch.zeros(1 << 16)}), lambda _, data: data)
    entries, start = struct.unpack("<II", bomb[-10:-2])
    records = harmless[: -entries - 22]
    hidden = bomb[:start].ljust(len(records), b"\0") + bomb[start:-22]
    return hidden + harmless[:-6] + struct.pack("<I", len(records)) + b"\0\0"


def marked_as_folder() -> bytes:
    whole = bytearray(archive({"a": torch.ones(2)}))
    whole[whole.rindex(b"PK\x01\x02") + 38] |= 0x10
    return bytes(whole)


def named_twice() -> bytes:
    buffer = io.BytesIO(archive({"a": torch.ones(2)}))
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "a") as made:
        warnings.simplefilter("ignore")
        made.writestr(next(name for name in made.namelist() if name.endswith("/data/0")), bytes(8))
    return buffer.getvalue()


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "a bomb of zeros": (
        lambda: repacked(archive({"a": torch.zeros(1 << 20)}), lambda _, data: data, zipfile.ZIP_DEFLATED),
        "larger than the file",
    ),
    "a bomb for torch alone": (two_faced, "another archive for torch|before its first record"),
    "a record that is a folder": (marked_as_folder, "marked as a folder"),
    "a record twice": (named_twice, "two of its records have one name"),
    "a short record": (
        lambda: repacked(
            archive({"a": torch.zeros(99)}), lambda name, data: data[:4] if "/data/0" in name else data
        ),
        "a storage of 396 bytes is not as long as its record",
    ),
    "a tensor longer than its storage": (
        lambda: archive({"a": rebuilt((HUGE,), (1,))}),
        rf"a tensor of shape \({HUGE},\) has 16 bytes",
    ),
    "an expanded tensor": (
        lambda: archive({"a": torch.ones(1).expand(HUGE)}),
        rf"a tensor of shape \({HUGE},\) has 4 bytes",
    ),
    "a tensor beyond its storage": (
        lambda: archive({"a": rebuilt((4,), (3,))}),
        r"shape \(4,\) has 16",
    ),
    "an offset": (lambda: archive({"a": rebuilt((4,), (1,), offset=HUGE)}), "described in another way"),
    "a negative length": (lambda: archive({"a": rebuilt((-4, -1), (1, 1))}), "described in another way"),
    "bytes out of nothing": (
        lambda: archive({"a": Call(bytearray, HUGE)}),
        r"its pickle names __builtin__\.bytearray",
    ),
    "a parameter out of nothing": (
        lambda: archive({"a": Call(nn.Parameter, HUGE)}),
        r"its pickle names torch\.nn\.parameter\.Parameter",
    ),
    "a sparse tensor": (lambda: archive({"a": torch.eye(2).to_sparse()}), "its pickle names torch"),
    "a list within itself": (
        lambda: with_pickle(b"\x80\x02]q\x00h\x00a."),
        "a container occurs in it twice",
    ),
    "lists that double": (lambda: with_pickle(doubled(60)), "a container occurs in it twice"),
    "deep tuples": (
        lambda: with_pickle(b"\x80\x02)" + b"\x85" * 2_000_000 + b"."),
        "more than 100 containers lie within each other",
    ),
    "a deep key": (
        lambda: with_pickle(b"\x80\x02})" + b"\x85" * 2_000_000 + b"K\x01s."),
        "more than 100 containers lie within each other",
    ),
    "a key that is a tuple": (lambda: with_pickle(b"\x80\x02})K\x01s."), "a key of a dict is neither"),
    "deep lists": (
        lambda: with_pickle(b"\x80\x02" + b"](" * 300_000 + b"e" * 300_000 + b"."),
        "more than 100 containers lie within each other",
    ),
    "an item of nothing": (lambda: with_pickle(b"\x80\x02K\x01K\x02a."), "into a value that is not a list"),
    "an opcode of another protocol": (lambda: with_pickle(b"\x80\x04\x8f."), "the opcode EMPTY_SET"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_before_torch_reads_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, said = HOSTILE[name]
    path = tmp_path / "a.pt"
    path.write_bytes(make())
    assert path.stat().st_size < 5_000_000

    def load(*_: object, **__: object) -> None:
        pytest.fail("torch was given the file")

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(CheckpointError, match=said):
        read(path)


def test_what_flowdp_writes_passes() -> None:
    tensors: dict[str, Any] = {}
    for kind in KINDS:
        one = torch.empty(3, dtype=torch.uint8).new_empty(3, dtype=kind)
        try:
            archive(one)
        except KeyError:  # torch cannot save it
            continue
        tensors[str(kind)] = one
    assert len(tensors) > 15
    state = {
        "kinds": tensors,
        "turned": torch.arange(6.0).view(2, 3).t(),
        "number": torch.tensor(1.0),
        "none": torch.ones(0, 3),
        "nowhere": torch.ones(3, 0, 2).permute(2, 0, 1),
        "complex": torch.ones(2, dtype=torch.complex64),
        "counted": Counter([3, 3]),
        "numbers": [
            1,
            2**40,
            -(2**70),
            0.5,
            True,
            None,
            "a" * 300,
            (),
            (1,),
            (1, 2),
            (1, 2, 3),
            (1, 2, 3, 4),
        ],
        "betas": [(0.9, 0.99)] * 3,
        "many": {str(number): torch.ones(1) for number in range(300)},
    }
    check(archive(plain(state)))


def test_a_state_as_deep_as_may_be() -> None:
    state: Any = 1
    for _ in range(NESTED):
        state = [state]
    check(archive(plain(state)))
    with pytest.raises(CheckpointError, match="more than 100 containers deep"):
        plain([state])


# ---------------------------------------------------------------- files that are not plain
@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "a.pt", checkpoint())
    return tmp_path / "a.pt"


@pytest.mark.posix
def test_a_link_is_not_read(path: Path) -> None:
    link = path.with_name("link.pt")
    link.symlink_to(path)
    assert "symbolic link" in refusal(link)


@pytest.mark.posix
def test_a_folder_may_be_a_link(path: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").symlink_to(path.parent)
    assert read(tmp_path / "folder" / "a.pt")["version"] == 1
    write(tmp_path / "folder" / "b.pt", checkpoint())


@pytest.mark.posix
def test_a_pipe_is_not_waited_for(path: Path) -> None:
    os.mkfifo(path.with_name("pipe.pt"))
    assert "no plain file" in refusal(path.with_name("pipe.pt"))


@pytest.mark.posix
@pytest.mark.parametrize("name", ["a.pt", "a.pt.tmp", "best.pt", "best.pt.tmp"])
@pytest.mark.parametrize("links", [True, False])
def test_what_a_link_points_to_is_not_written_to(
    path: Path, name: str, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object) -> None:
        raise OSError("no links here")

    if not links:
        monkeypatch.setattr(os, "link", link)
    mine = path.with_name("mine.txt")
    mine.write_text("mine")
    path.with_name(name).unlink(missing_ok=True)
    path.with_name(name).symlink_to(mine)
    write(path, checkpoint(), also=path.with_name("best.pt"))
    assert mine.read_text() == "mine"
    assert sorted(os.listdir(path.parent)) == ["a.pt", "best.pt", "mine.txt"]
    assert not path.is_symlink()
    assert read(path)["version"] == 1


@pytest.mark.posix
def test_a_pipe_where_the_file_is_written(path: Path) -> None:
    os.mkfifo(path.with_name("a.pt.tmp"))
    write(path, checkpoint())
    assert os.listdir(path.parent) == ["a.pt"]
