"""Tests of the advice for a call that gives another result when it is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowdp import FlowdpError
from tests.data_parallel.test_layout import Tagger, WordModel, padded
from tests.loops import assert_equal, gradients, mlp, numbers


def refused(call: Any, *args: Any, **kwargs: Any) -> str:
    """The message by which a call is refused."""
    with pytest.raises(FlowdpError, match="gives another result when the batch is cut") as told:
        call(*args, **kwargs)
    return str(told.value)


# ---------------------------------------------------------------- the batch along another dim
@pytest.mark.parametrize("samples", [4, 6])
def test_an_lstm_whose_dim_0_is_time(setup: Any, samples: int) -> None:
    model = nn.LSTM(3, 5, 2).double()  # for float32 oneDNN rounds by the size of the batch
    # Of four steps: the states of two layers would be joined, of more would not.
    x = torch.randn(4, samples, 3, dtype=torch.float64)
    message = refused(setup(model), x)
    assert "LSTM.forward" in message
    assert f"4 samples as 2 + 2, along dim 0 of 'input' of shape (4, {samples}, 3)" in message
    assert "Cut along dim 1 it gives the same: say dim=1 in setup(), or batch_first=True" in message
    assert_equal([setup(model, dim=1)(x)[0]], [model(x)[0]])


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_a_transformer_whose_dim_0_is_time(setup: Any) -> None:
    model = nn.Transformer(8, 2, 1, 1, 16)
    source, target = torch.randn(4, 6, 8), torch.randn(4, 6, 8)
    assert "say dim=1 in setup(), or batch_first=True" in refused(setup(model), source, target)


def test_states_of_a_recurrent_layer(setup: Any) -> None:
    model = nn.LSTM(3, 5, 2, batch_first=True).double()
    x, states = numbers(8, 7, 3), (numbers(2, 8, 5), numbers(2, 8, 5, seed=1))
    assert "another one: dim={'return'" in refused(setup(model), x)
    for inner in ({"1.0": 1, "1.1": 1}, {"1": 1}, {0: 0, 1: 1}):
        out, (h, c) = setup(model, dim={"hx": 1, "return": inner})(x, states)
        twin, (twin_h, twin_c) = model(x, states)
        assert_equal([out, h, c], [twin, twin_h, twin_c])


def test_an_output_that_needs_a_join(setup: Any) -> None:
    data, hidden = torch.arange(24).reshape(4, 6) % 11, (torch.zeros(2, 6, 5), torch.zeros(2, 6, 5))
    for options in ({}, {"dim": 1}):
        with pytest.raises(FlowdpError, match=r"output\[0\] cannot be gathered|gives another result"):
            setup(WordModel(), **options)(data, hidden)

    def wrong(outputs: Any, sizes: Any) -> Any:
        return torch.cat([out for out, _ in outputs]), outputs[0][1]

    # With a join of the user's no other layout is tried.
    message = refused(setup(WordModel(), dim=1, join=wrong), data, hidden)
    assert "output[0] differs" in message
    assert "it gives the same" not in message


# ---------------------------------------------------------------- means that are not over samples
@pytest.mark.parametrize("kind", ["float64", "float32", "bfloat16", "autocast"])
def test_a_padded_language_model_with_its_loss_inside(setup: Any, kind: str) -> None:
    torch.manual_seed(1)
    model = Tagger()
    if kind != "autocast":
        model.to(getattr(torch, kind))
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        message = refused(setup(model), **padded())
        assert "output['loss'] is " in message
        assert "6 samples as 3 + 3" in message
        assert "With reduce=lambda labels: (labels[:, 1:] != -100).sum() in setup() it gives the" in message
        setup(model, reduce=lambda labels: (labels[:, 1:] != -100).sum())(**padded())


def test_sums(setup: Any) -> None:
    assert "With reduce='sum' in setup() it gives the same." in refused(setup(Tagger("sum")), **padded())
    assert "With reduce='sum' in setup()" in refused(setup(Tagger()), **padded(), num_items_in_batch=20)
    setup(Tagger("sum"), reduce="sum")(**padded())


class Counting(nn.Module):
    """Returns its layer's outputs, and a count of those that are positive."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Any:
        out = self.inner(x)
        return out, (out > 0).sum()


def test_a_count(setup: Any) -> None:
    assert "With reduce='sum' in setup() it gives the same." in refused(setup(Counting()), numbers(8, 6))
    model = Counting()
    assert setup(model, reduce="sum")(numbers(8, 6))[1] == model(numbers(8, 6))[1]


def test_a_batch_without_padding_tells_nothing_and_a_later_one_does(setup: Any) -> None:
    model = Tagger()
    dp = setup(model)
    full = padded()
    full["labels"] = full["input_ids"]
    dp(**full)["loss"].backward()
    before = gradients(model)
    assert "With reduce=lambda labels" in refused(dp, **padded())
    assert_equal(gradients(model), before)


def test_a_loss_that_training_mode_alone_returns(setup: Any) -> None:
    class Trained(Tagger):
        def forward(self, **inputs: Any) -> Any:
            outputs = super().forward(**inputs)
            return outputs["loss"] if self.training else outputs["logits"]

    model = Trained()
    assert "With reduce=lambda labels" in refused(setup(model), **padded())
    dp = setup(model)
    dp.eval()
    dp(**padded())
    dp.train()  # outputs of another form are compared, too
    assert "With reduce=lambda labels" in refused(dp, **padded())


# ---------------------------------------------------------------- all else
class Centred(nn.Module):
    """Depends on the whole batch, by a weight that is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.weight = nn.Parameter(torch.tensor(0.0).double())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out + self.weight * (out - out.mean(0))


def test_an_option_helps_the_gradients_too(setup: Any) -> None:
    # The outputs are the same with any option.
    message = refused(setup(Centred()), numbers(8, 6))
    assert "the gradient of weight " in message
    assert "A module that looks across the batch returns a row for each sample" in message
