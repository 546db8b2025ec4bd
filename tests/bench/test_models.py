from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench.models import Gpt, classify_bytes, photos, predict_next, resnet18, texts


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_resnet18_has_its_parameters_and_learns() -> None:
    assert sum(p.numel() for p in resnet18().parameters()) == 11_689_512  # as published
    torch.manual_seed(0)
    model, batch = resnet18(4, classes=10), photos(8, 32, classes=10)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = classify_bytes(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_gpt_sees_the_past_alone_and_learns() -> None:
    torch.manual_seed(0)
    model, (text,) = Gpt(layers=2, width=16, heads=2, length=8, tokens=32), texts(4, 8, 32)
    before = model(text[:, :-1])
    changed = text[:, :-1].clone()
    changed[:, 5] = (changed[:, 5] + 1) % 32
    after = model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert (before[:, 5] - after[:, 5]).abs().max() > 1e-3

    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = predict_next(model, (text,))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_photos_and_texts_have_their_shapes() -> None:
    x, y = photos(300, 8)
    assert (x.shape, x.dtype, y.shape) == ((300, 3, 8, 8), torch.uint8, (300,))
    assert torch.equal(x[256:], x[:44])
    assert texts(3, 5, 7)[0].shape == (3, 6)
