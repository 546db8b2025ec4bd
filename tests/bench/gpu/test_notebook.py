"""Tests of the notebook part."""

from __future__ import annotations

import torch

from bench.gpu import notebook
from bench.gpu.part import Place


def test_cells_have_the_card_and_no_magic() -> None:
    text = "\n".join(notebook.cells(Place(torch.device("cuda", 0))))
    assert 'devices=["cuda:0", "cuda:0"]' in text
    assert "%" not in text.replace(".1%}", "")
    assert "state = run.join()" in text


def test_made_up_digits_have_the_form_of_the_real_ones() -> None:
    pixels, labels = notebook.made_up_digits(return_X_y=True)
    assert (pixels.shape, labels.shape) == ((1797, 64), (1797,))
    assert 0 <= pixels.min() < pixels.max() <= 16
    assert set(labels) == set(range(10))
