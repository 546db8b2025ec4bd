"""Tests of the real model's data and network."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.gpu import fashion
from bench.gpu.part import Skipped


def write(folder: Path, name: str, values: np.ndarray) -> None:
    header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">i4").tobytes()
    with gzip.open(folder / f"{name}-ubyte.gz", "wb") as file:
        file.write(header + values.astype(np.uint8).tobytes())


@pytest.fixture
def files(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    for name, count in (("train", 6), ("t10k", 3)):
        write(tmp_path, f"{name}-images-idx3", draw.integers(1, 256, (count, 28, 28)))
        write(tmp_path, f"{name}-labels-idx1", np.arange(count) % 10)
    return tmp_path


def test_pictures_have_a_border(files: Path) -> None:
    (x, y), (test, labels) = fashion.load(fashion.folder({"FLOWDP_FASHION_MNIST": str(files)}))
    assert (x.shape, test.shape, x.dtype) == ((6, 1, 32, 32), (3, 1, 32, 32), torch.uint8)
    assert bool((x[:, :, 2:30, 2:30] > 0).all())
    assert int(x[:, :, :2].max()) == int(x[..., 30:].max()) == 0
    assert (y.tolist(), labels.tolist()) == ([0, 1, 2, 3, 4, 5], [0, 1, 2])


def test_without_the_files_it_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(Skipped, match="FLOWDP_FASHION_MNIST"):
        fashion.folder({"FLOWDP_FASHION_MNIST": str(tmp_path)})


def test_they_are_looked_for_beside_the_project_and_in_it(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fashion, "PLACES", (tmp_path / "none", files))
    assert fashion.folder({}) == files


def test_the_network_keeps_small_pictures_large() -> None:
    network = fashion.network(8).eval()
    sizes = []
    network[3].register_forward_pre_hook(lambda _, inputs: sizes.append(tuple(inputs[0].shape[1:])))
    assert network(torch.zeros(2, 1, 32, 32)).shape == (2, 10)
    assert sizes == [(8, 32, 32)]
    parameters = sum(parameter.numel() for parameter in fashion.network(64).parameters())
    assert 11.1e6 < parameters < 11.2e6
