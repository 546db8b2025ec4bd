"""Tests of checkpoint files: read whole or refused with a reason, written whole or not at all."""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowdp.checkpoint import file as checkpoint_file
from flowdp.checkpoint.file import FORMAT, plain, read, write
from flowdp.errors import CheckpointError
from flowdp.policy.tally import EpochMetrics, RankMetrics, Work
from flowdp.protocol.position import OpenEpoch, Position

RANK = RankMetrics(8, 2, 1.0, 0.0, 0.0, 0.0, 0.5, {"accuracy": 0.5}, 0.1)
HISTORY = (EpochMetrics(0, 3, 0.5, {}, (RANK,), 1.0, (8.0,), (1.0,), 0.1, 1, 0.0, 1, None, 1.0, 2),)
POSITION = Position(1, 1, (OpenEpoch(1, 3, ((1,),), (Work(1, 2, 8),)),), 4, versions=1)


def checkpoint(**changes: Any) -> dict[str, Any]:
    """A complete small state."""
    weight = torch.arange(6.0).view(2, 3)
    weight[0, 0] = math.nan
    return {
        "version": 1,
        "epoch": 1,
        "global_step": 4,
        "position": POSITION,
        "model": {"weight": weight, "half": torch.ones(2, dtype=torch.bfloat16)},
        "buffers": {"count": torch.tensor(3)},
        "ranks": [
            {"optimizers": [{"state": {0: {"step": torch.tensor(2.0)}}, "param_groups": [{"lr": 0.1}]}]}
        ],
        "history": HISTORY,
        "fingerprint": {"batch_size": 4, "shapes": (2, 3)},
        "best": None,
        **changes,
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "a.pt", checkpoint())
    return tmp_path / "a.pt"


def archive(state: object) -> bytes:
    """The bytes that torch.save makes of a state."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        read(path)
    assert error.value.path == str(path)
    assert str(path) in str(error.value)
    return str(error.value)


# ---------------------------------------------------------------- allowed contents
def test_plain_state_comes_back_as_it_was(path: Path) -> None:
    state = read(path)
    expected = checkpoint()
    assert torch.equal(
        state["model"]["weight"].view(torch.int32), expected["model"].pop("weight").view(torch.int32)
    )
    assert state["model"].pop("weight").dtype is torch.float32
    assert repr((state["position"], state["history"])) == repr((POSITION, HISTORY))  # with NaN
    assert state["fingerprint"] == {"batch_size": 4, "shapes": (2, 3)}  # still a tuple
    assert state["format"] == FORMAT
    assert torch.equal(state["model"]["half"], expected["model"]["half"])
    assert state["ranks"][0]["optimizers"][0]["state"][0]["step"].item() == 2.0


def test_torch_and_zipfile_read_it_too(path: Path) -> None:
    state = torch.load(path, weights_only=True)
    assert list(state["model"]) == ["weight", "half"]
    assert zipfile.ZipFile(path).testzip() is None


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"optimizers": [{"state": {3: {"hook": lambda: 0}}}]}, "optimizers[0].state.3.hook is a function"),
        ({"a": {(1, 2): 3}}, "the key (1, 2) of a is a tuple"),
        ([b"x"], "[0] is a bytes"),
        ({"a": (1, np.zeros(2))}, "a[1] is a ndarray"),
        ({"a": torch.eye(2).to_sparse()}, "a is a Tensor"),
        (object(), "the state is a object"),
        ({"a": 1j}, "a is a complex"),
    ],
)
def test_what_is_not_plain_is_named(state: object, said: str) -> None:
    with pytest.raises(CheckpointError) as error:
        plain(state)
    assert str(error.value).startswith(said + ":")


def test_what_is_not_plain_is_not_written(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match=r"ranks\[1\]\.learning_rate\.hook is a function"):
        write(path, checkpoint(ranks=[{}, {"learning_rate": {"hook": print_nothing}}]))
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["a.pt"]


def print_nothing() -> None: ...


# ---------------------------------------------------------------- refusals
def test_missing_empty_foreign_and_torn(path: Path) -> None:
    whole = path.read_bytes()
    assert "cannot be read" in refusal(path.with_name("b.pt"))
    assert "cannot be read" in refusal(path.parent)
    for content in (b"", b"x", b"hello" * 100, b"PK\x03\x04", whole[:-1], whole[: len(whole) // 2]):
        path.write_bytes(content)
        assert "damaged, cut off or no checkpoint" in refusal(path)
    for state in ({"a": 1}, [1], {**torch.load(io.BytesIO(whole), weights_only=True), "format": 7}):
        path.write_bytes(archive(state))
        assert "damaged, cut off or no checkpoint" in refusal(path)
    assert "format 7" in refusal(path)


def places(content: bytes, record: str) -> range:
    """The position of a record's bytes in an archive."""
    [info] = [one for one in zipfile.ZipFile(io.BytesIO(content)).infolist() if one.filename.endswith(record)]
    lengths = content[info.header_offset + 26 : info.header_offset + 30]
    start = info.header_offset + 30 + sum(int.from_bytes(lengths[at : at + 2], "little") for at in (0, 2))
    return range(start, start + info.file_size)


@pytest.mark.parametrize("record", ["data/0", "data/1", "data.pkl", "/version"])
def test_every_changed_byte_of_a_record_is_noticed_before_torch_reads_it(
    path: Path, record: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(*_: object, **__: object) -> None:
        pytest.fail("a damaged file was parsed")

    monkeypatch.setattr(torch, "load", parse)
    whole = path.read_bytes()
    of_record = places(whole, record)
    for at in of_record[:: -(-len(of_record) // 8)]:
        content = bytearray(whole)
        content[at] ^= 1
        path.write_bytes(content)
        assert "the checksum of its record" in refusal(path)


def test_a_record_that_is_marked_as_a_folder_is_refused(path: Path) -> None:
    """Its checksum is right, and torch would return memory that nobody has written."""
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\x01\x02")
    content[entry + 38] |= 0x10
    path.write_bytes(content)
    assert zipfile.ZipFile(path).testzip() is None
    assert "marked as a folder" in refusal(path)


def test_a_process_that_writes_without_checksums_gets_them_here(path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        write(path, checkpoint())
        assert not torch.utils.serialization.config.save.compute_crc32
    finally:
        torch.serialization.set_crc32_options(True)
    assert zipfile.ZipFile(path).testzip() is None


def touch(target: Path) -> list[tuple[Callable[..., object], tuple[Any, ...]]]:
    return [(os.system, (f"touch {target}",)), (eval, (f"__import__('os').mkdir({str(target)!r})",))]


def test_code_in_a_pickle_is_not_run(path: Path) -> None:
    target = path.with_name("touched")

    class Payload:
        def __init__(self, call: object) -> None:
            self.call = call

        def __reduce__(self) -> Any:
            return self.call

    for call in touch(target):
        state = {**torch.load(path, weights_only=True), "fingerprint": {"x": Payload(call)}}
        path.with_name("evil.pt").write_bytes(archive(state))
        assert "no checkpoint" in refusal(path.with_name("evil.pt"))
        assert not target.exists()
    torch.load(path.with_name("evil.pt"), weights_only=False)
    assert target.exists()  # the payload works


# ---------------------------------------------------------------- failing writes
@pytest.mark.posix
@pytest.mark.parametrize("room", [200_000, 1_200_500])
def test_a_full_disk_leaves_what_was_there(path: Path, room: int) -> None:
    import resource  # not on Windows

    before = path.read_bytes()
    big = checkpoint(model={"weight": torch.zeros(300_000)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(CheckpointError, match="cannot be written") as error:
            write(path, big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(error.value.__cause__, OSError)
    assert error.value.path == str(path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["a.pt"]
    write(path, big)
    assert len(read(path)["model"]["weight"]) == 300_000


def test_what_does_not_read_back_is_not_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()
    save = torch.save

    def cut_off(state: object, file: Any) -> None:
        save(state, file)
        file.truncate(file.tell() - 1)

    monkeypatch.setattr(torch, "save", cut_off)
    with pytest.raises(CheckpointError, match="cut off"):
        write(path, checkpoint())
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["a.pt"]


def test_the_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def watch(module: Any, name: str) -> None:
        whole = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            done.append(name)
            return whole(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    watch(os, "fsync")
    watch(os, "link")
    watch(checkpoint_file, "read")
    watch(Path, "replace")
    write(tmp_path / "a.pt", checkpoint(), also=tmp_path / "best.pt")
    assert done == ["fsync", "read", "link", "replace", "replace", "fsync"]
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "best.pt"]


def test_a_second_name_is_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "best.pt.tmp").write_text("what a killed process left")
    write(tmp_path / "a.pt", checkpoint(), also=tmp_path / "best.pt")
    assert (tmp_path / "a.pt").samefile(tmp_path / "best.pt")
