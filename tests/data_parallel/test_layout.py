"""Tests of layouts: batches along another dim, the user's split and join, and losses not averaged by
samples.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import flowdp
from flowdp import CadenceOptions, DataParallel, FlowdpError, OptionError
from tests.loops import assert_equal, gradients, mlp, numbers


@pytest.fixture
def setup() -> Iterator[Any]:
    """`flowdp.setup` on two devices with shares of 2 to 1, closed at the end."""
    made: list[DataParallel] = []

    def setup(model: nn.Module, **options: Any) -> DataParallel:
        options = {
            "devices": ["cpu"] * 2,
            "cadence": CadenceOptions(max_anchor=0, speed_hint=(0, 2.0)),
        } | options
        made.append(flowdp.setup(model, SGD(model.parameters(), 0.1), **options))
        return made[-1]

    yield setup
    for dp in made:
        dp.close()


def seeded(make: Any, *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(1)
    return make(*args, **kwargs).double()


# ---------------------------------------------------------------- dim
def test_an_lstm_whose_batch_is_dim_1(setup: Any) -> None:
    model = seeded(nn.LSTM, 3, 5, num_layers=2)
    twin = copy.deepcopy(model)
    dp = setup(model, dim=1)
    results = []
    for call in (dp, twin):
        x, h = numbers(4, 6, 3).requires_grad_(), numbers(2, 6, 5, seed=1).requires_grad_()
        out, state = call(x, (h, h * 2))
        (out.sin().sum() + state[0].sum() + state[1].cos().sum()).backward()
        results.append([out, *state, x.grad, h.grad])
    assert dp.shard_sizes == (2, 4)
    assert_equal(*results)
    assert_equal(gradients(model), gradients(twin))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_a_transformer_whose_masks_have_the_batch_elsewhere(setup: Any) -> None:
    model = seeded(nn.Transformer, 8, 2, 1, 1, 16, dropout=0.0)
    twin = copy.deepcopy(model)
    # As many steps as samples: only the mapping tells the dims apart.
    dp = setup(model, dim={"src": 1, "tgt": 1, "tgt_mask": None, "memory_key_padding_mask": 0})
    padding = torch.arange(6) >= torch.tensor([6, 6, 4, 3, 5, 2])[:, None]
    results = []
    for call in (dp, twin):
        src, tgt = numbers(6, 6, 8).requires_grad_(), numbers(6, 6, 8, seed=2)
        masks = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
        ahead = torch.triu(torch.ones(6, 6, dtype=torch.bool), 1)
        out = call(src, tgt, tgt_mask=ahead, **masks)
        out.square().mean().backward()
        results.append([out, src.grad])
    assert dp.shard_sizes == (2, 4)
    assert_equal(*results)
    assert_equal(gradients(model), gradients(twin))


def test_positions_and_methods(setup: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor, *more: Tensor, **named: Tensor) -> Tensor:
            out: Tensor = self.inner(x.t()).t() + more[0].sum(1)
            return out + named["scale"]

        def rows(self, x: Tensor) -> Tensor:
            return self.inner(x.t()).t()

    model = Model()
    dp = setup(model, dim={0: 1, 1: 0, "scale": 1, "return": 1})
    x, more, scale = numbers(6, 9), numbers(9, 2), numbers(1, 9)
    assert_equal([dp(x, more, scale=scale)], [model(x, more, scale=scale)])
    assert dp.shard_sizes == (3, 6)
    assert_equal([dp.call("rows", x)], [model.rows(x)])
    assert_equal([dp.call(lambda module, given: module.rows(given), x)], [model.rows(x)])


# ---------------------------------------------------------------- outputs that are not parts of the batch
class Scores(nn.Module):
    """Scores of queries against candidates; the candidates are no part of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor, candidates: Any = None) -> Tensor:
        if isinstance(candidates, dict):
            candidates = candidates["rows"]
        if isinstance(candidates, list):
            candidates = torch.tensor([[float(text)] * 6 for text in candidates], dtype=x.dtype)
        if candidates is None:
            return self.inner(x)
        return (self.inner(x) @ self.inner(candidates).T).logsumexp(1)


@pytest.mark.parametrize("kind", ["tensor", "list", "in a dict"])
def test_what_has_gone_whole_is_not_cut_in_a_batch_of_its_length(setup: Any, kind: str) -> None:
    rows = numbers(6, 6, seed=3)
    candidates = {"tensor": rows, "list": ["0.5"] * 6, "in a dict": {"rows": rows}}[kind]
    model = Scores()
    dp = setup(model)
    x = numbers(8, 6)
    assert_equal([dp(x, candidates)], [model(x, candidates)])
    for _ in range(2):
        with pytest.raises(FlowdpError, match=r"no part of the batch, say dim=\{its name: None\}"):
            dp(x[:6], candidates)
    sparing = setup(model, dim={"candidates": None})
    for samples in (8, 6):
        assert_equal([sparing(x[:samples], candidates)], [model(x[:samples], candidates)])


def test_what_is_as_long_as_the_batch_at_times(setup: Any) -> None:
    model = Scores()
    x = numbers(8, 6)
    alone = torch.tensor([2.0], dtype=x.dtype)

    def weighted(module: nn.Module, x: Tensor, scale: Tensor) -> Tensor:
        return module(x).sum(1) * (scale if len(scale) in (1, len(x)) else scale.sum())

    dp = setup(model)
    for scale in (alone, x[:, 0], alone, x[:, 0]):  # an output that fits any batch proves nothing
        assert_equal([dp.call(weighted, x, scale)], [weighted(model, x, scale)])

    def pair(module: nn.Module, x: Tensor, other: Tensor) -> Tensor:
        return module(x).sum(1) + (module(other).sum(1) if len(other) == len(x) else module(other).sum())

    for other in (x * 2, x[:6], x * 2):  # part of the batch at first, and so later too
        assert_equal([dp.call(pair, x, other)], [pair(model, x, other)])
    own = setup(model, dim={"scale": 0})
    for scale in (x[:4, 0], x[:, 0]):
        assert_equal([own.call(weighted, x, scale)], [weighted(model, x, scale)])


# ---------------------------------------------------------------- lists of samples
class Detector(nn.Module):
    """A detection model: images of different sizes, and a record of boxes for each."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 4)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        out = self.head(torch.stack([self.inner(image).mean((1, 2)) for image in images]))
        if targets is None:
            return out
        pairs = zip(out, targets, strict=True)
        return {
            "loss": torch.stack([(row - one["boxes"].mean(0)).square().sum() for row, one in pairs]).mean()
        }


def test_a_detection_model(setup: Any) -> None:
    model = seeded(Detector)
    twin = copy.deepcopy(model)
    dp = setup(model)
    for samples, boxes in ((6, (1, 2, 3, 4, 5, 6)), (3, (3, 3, 3)), (1, (3,))):
        images = [numbers(3, 8 + k, 9, seed=k) for k in range(samples)]
        targets = [{"boxes": numbers(count, 4), "labels": torch.arange(count)} for count in boxes]
        for call in (dp, twin):
            call(images, targets)["loss"].backward()
        assert_equal(gradients(model), gradients(twin))
        assert sum(dp.shard_sizes) == samples
        assert_equal([dp(images)], [twin(images)])


# ---------------------------------------------------------------- options
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": -1}, "dim must be an int of at least 0, not -1"),
        ({"dim": {"input": "1"}}, r"dim\['input'\]"),
        ({"split": 3}, "split must be a function"),
        ({"join": "cat"}, "join must be a function"),
        ({"reduce": "tokens"}, "reduce must be one of 'mean', 'sum', not 'tokens'"),
        ({"reduce": {"loss": 3}}, r"reduce\['loss'\]"),
    ],
)
def test_options_are_checked(setup: Any, options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        setup(nn.Linear(2, 2), **options)


# ---------------------------------------------------------------- split and join
class WordModel(nn.Module):
    """Rows of all words, time-major, and the hidden state, as word language models return them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(11, 4), nn.LSTM(4, 5, 2), nn.Linear(5, 11)

    def forward(self, data: Tensor, hidden: Any) -> Any:
        out, hidden = self.rnn(self.embed(data), hidden)
        return F.log_softmax(self.head(out).view(-1, 11), dim=1), hidden


def test_a_join_of_the_users_own(setup: Any) -> None:
    def join(outputs: list[Any], sizes: tuple[int, ...]) -> Any:
        rows = [out.view(-1, size, 11) for (out, _), size in zip(outputs, sizes, strict=True)]
        hidden = tuple(torch.cat(states, 1) for states in zip(*(h for _, h in outputs), strict=True))
        return torch.cat(rows, 1).flatten(0, 1), hidden

    model = seeded(WordModel)
    twin = copy.deepcopy(model)
    dp = setup(model, dim=1, join=join)
    data, targets = torch.arange(24).reshape(4, 6) % 11, torch.arange(24) % 7
    results = []
    for call in (dp, twin):
        start = numbers(2, 6, 5).requires_grad_()
        hidden: Any = (start, start)
        for _ in range(2):
            out, hidden = call(data, hidden)
        F.nll_loss(out, targets).backward()
        results.append([out, *hidden, start.grad])
    assert_equal(*results)
    assert_equal(gradients(model), gradients(twin))
    with torch.no_grad():
        assert_equal([dp(data, hidden)[0]], [twin(data, hidden)[0]])


def test_a_split_of_the_users_own(setup: Any) -> None:
    class Pairs(nn.Module):
        """Takes the first of each pair from the front half, the second from the back half."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
            out: Tensor = self.inner(x * scale)
            return out.unflatten(0, (2, -1)).prod(0)

    def split(args: Any, kwargs: Any, sizes: tuple[int, ...]) -> Any:
        front, back = (half.split([size // 2 for size in sizes]) for half in args[0].chunk(2))
        return [((torch.cat(both),), kwargs) for both in zip(front, back, strict=True)]

    model = Pairs()
    twin = copy.deepcopy(model)
    dp = setup(model, split=split, join=lambda outputs, sizes: torch.cat(outputs), cadence=False)
    results = []
    for call in (dp, twin):
        x, scale = numbers(8, 6).requires_grad_(), numbers(6, seed=1).requires_grad_()
        out = call(x * 2, scale=scale)
        out.sin().sum().backward()
        results.append([out, x.grad, scale.grad])
    assert_equal(*results)
    assert_equal(gradients(model), gradients(twin))


# ---------------------------------------------------------------- reduce
class Tagger(nn.Module):
    """Returns a loss as Hugging Face's models do: the mean over the labels other than -100."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.embed, self.head, self.reduction = nn.Embedding(13, 6), nn.Linear(6, 13), reduction

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, num_items_in_batch: int | None = None
    ) -> dict[str, Tensor]:
        logits = self.head(self.embed(input_ids))
        if labels is None:
            return {"logits": logits}
        kind = self.reduction if num_items_in_batch is None else "sum"
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction=kind)
        return {"loss": loss / (num_items_in_batch or 1), "logits": logits}


def padded(samples: int = 6, length: int = 8, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 13, (samples, length), generator=generator)
    ends = torch.linspace(2, length, samples).long()
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(length) >= ends[:, None], -100)}


def same_losses(dp: Any, model: nn.Module, twin: nn.Module, *batches: Any) -> None:
    """Assert that losses and accumulated gradients are those of one device."""
    for batch in batches:
        mine, other = dp(**batch)["loss"], twin(**batch)["loss"]
        assert_equal([mine], [other])
        (mine / len(batches)).backward()
        (other / len(batches)).backward()
    assert_equal(gradients(model), gradients(twin))


@pytest.mark.parametrize(
    "reduce",
    [
        lambda labels: (labels[:, 1:] != -100).sum(),
        lambda labels, **_: int((labels[:, 1:] != -100).sum()),
        {"loss": lambda labels: (labels[:, 1:] != -100).sum()},
    ],
)
def test_a_loss_that_is_a_mean_over_tokens(setup: Any, reduce: Any) -> None:
    model = seeded(Tagger)
    twin = copy.deepcopy(model)
    dp = setup(model, reduce=reduce)
    same_losses(dp, model, twin, padded(), padded(5, 9, seed=2))
    assert dp(padded()["input_ids"]).keys() == {"logits"}  # no labels: no loss, no weight


@pytest.mark.parametrize("given", [None, 20])
def test_sums(setup: Any, given: int | None) -> None:
    model = seeded(Tagger, "sum")
    twin = copy.deepcopy(model)
    same_losses(setup(model, reduce="sum"), model, twin, {**padded(), "num_items_in_batch": given})


def test_a_part_without_anything_to_count_gives_nothing(setup: Any) -> None:
    class Masked(nn.Module):
        """Divides by the number of unmasked entries."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            out: Tensor = (self.inner(x).square().sum(1) * mask).sum() / mask.sum()
            return out

    model = Masked()
    twin = copy.deepcopy(model)
    dp = setup(model, reduce=lambda mask: mask.sum())
    x, mask = numbers(6, 6), torch.tensor([0, 0, 1, 0, 1, 1])  # the first device has two samples
    results = [dp(x, mask), twin(x, mask)]
    for loss in results:
        loss.backward()
    assert_equal(results[:1], results[1:])
    assert_equal(gradients(model), gradients(twin))
    assert dp(x, mask * 0).isnan() == twin(x, mask * 0).isnan()
