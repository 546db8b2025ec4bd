"""Tests of the check of calls: outputs for parts of a batch against those for all of it."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import flowdp
from flowdp import DataParallel, FlowdpError, OptionError
from flowdp.data_parallel import call_check
from flowdp.data_parallel.call_check import Call, check_call
from flowdp.data_parallel.layout import Callee, Layout
from tests.data_parallel.test_layout import Tagger, WordModel, padded
from tests.loops import CPU, assert_equal, gradients, mlp, numbers


@pytest.fixture
def setup() -> Iterator[Any]:
    """`flowdp.setup` on two devices, closed at the end."""
    made: list[DataParallel] = []

    def setup(model: nn.Module, **options: Any) -> DataParallel:
        options = {"devices": ["cpu"] * 2, "cadence": False} | options
        made.append(flowdp.setup(model, SGD(model.parameters(), 0.1), **options))
        return made[-1]

    yield setup
    for dp in made:
        dp.close()


# ---------------------------------------------------------------- time before the batch
@pytest.mark.parametrize("samples", [4, 6])
def test_an_lstm_whose_dim_0_is_time(setup: Any, samples: int) -> None:
    model = nn.LSTM(3, 5, 2).double()  # for float32 oneDNN rounds by the size of the batch
    # Of four steps: the states of two layers would be joined, of more would not.
    x = torch.randn(4, samples, 3, dtype=torch.float64)
    with pytest.raises(
        FlowdpError, match=r"LSTM.forward .* as 2 \+ 2, along dim 0 of 'input'.*say dim=1 in setup"
    ):
        setup(model)(x)
    assert_equal([setup(model, dim=1)(x)[0]], [model(x)[0]])


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_a_transformer_whose_dim_0_is_time(setup: Any) -> None:
    model = nn.Transformer(8, 2, 1, 1, 16)
    source, target = torch.randn(4, 6, 8), torch.randn(4, 6, 8)
    with pytest.raises(
        FlowdpError, match=r"output differs by up to .* say dim=1 in setup\(\), or batch_first=True"
    ):
        setup(model)(source, target)
    ahead = torch.triu(torch.ones(4, 4, dtype=torch.bool), 1)
    padding = torch.zeros(6, 4, dtype=torch.bool)
    with pytest.raises(
        FlowdpError, match=r"dim=\{'src': 1, 'tgt': 1, 'tgt_mask': None, 'src_key_padding_mask': 0,"
    ):
        setup(model)(source, target, tgt_mask=ahead, src_key_padding_mask=padding)


def test_outputs_of_unlike_dims_are_named(setup: Any) -> None:
    x = torch.randn(4, 6, 8)
    with pytest.raises(FlowdpError, match=r"'return': \{'0': 1, '1': 0\}"):
        setup(nn.MultiheadAttention(8, 2))(x, x, x)
    dims = {"query": 1, "key": 1, "value": 1, "return": {"0": 1, "1": 0}}
    setup(nn.MultiheadAttention(8, 2), dim=dims)(x, x, x)


@pytest.mark.parametrize(
    ("names", "advice"),
    [
        (("mask",), r"the whole of 'mask' .* dim=\{'mask': None\} in setup"),
        (("places",), r"dim=\{'places': None\} in setup"),
        (("mask", "places"), r"the whole of 'mask' and 'places' .* dim=\{'mask': None, 'places': None\} in"),
    ],
)
def test_masks_and_positions_as_long_as_the_batch_by_chance(
    setup: Any, names: tuple[str, ...], advice: str
) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(8, 2, batch_first=True)
            self.table = nn.Embedding(9, 8)

        def forward(self, x: Tensor, mask: Tensor | None = None, places: Tensor | None = None) -> Tensor:
            if places is not None:
                x = x + self.table(places)
            out: Tensor = self.inner(x, x, x, attn_mask=mask)[0]
            return out

    model = Attention()
    given = {"mask": torch.ones(6, 6).triu(1).bool(), "places": torch.arange(6)}
    kwargs = {name: given[name] for name in names}
    x = torch.randn(6, 6, 8)
    with pytest.raises(FlowdpError, match=advice):
        setup(model)(x, **kwargs)
    assert_equal([setup(model, dim=dict.fromkeys(names))(x, **kwargs)], [model(x, **kwargs)])


def test_an_output_that_needs_a_join(setup: Any) -> None:
    data, hidden = torch.arange(24).reshape(4, 6) % 11, (torch.zeros(2, 6, 5), torch.zeros(2, 6, 5))
    with pytest.raises(FlowdpError, match=r"output\[0\].*is joined by join="):
        setup(WordModel(), dim=1)(data, hidden)
    with pytest.raises(FlowdpError, match="Is dim 0 the batch"):
        setup(WordModel())(data, hidden)

    def wrong(outputs: Any, sizes: Any) -> Any:
        return torch.cat([out for out, _ in outputs]), outputs[0][1]

    with pytest.raises(FlowdpError, match=r"output\[0\] differs"):
        setup(WordModel(), dim=1, join=wrong)(data, hidden)


# ---------------------------------------------------------------- numbers
@pytest.mark.parametrize("kind", ["float64", "float32", "bfloat16", "autocast"])
def test_a_padded_language_model_with_its_loss_inside(setup: Any, kind: str) -> None:
    torch.manual_seed(1)
    model = Tagger()
    if kind != "autocast":
        model.to(getattr(torch, kind))
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        with pytest.raises(
            FlowdpError, match=r"output\['loss'\] is .* for the whole batch.*6 samples as 3 \+ 3"
        ) as told:
            setup(model)(**padded())
        assert "reduce=lambda labels: (labels[:, 1:] != -100).sum()" in str(told.value)
        setup(model, reduce=lambda labels: (labels[:, 1:] != -100).sum())(**padded())


def test_sums(setup: Any) -> None:
    with pytest.raises(FlowdpError, match=r"With reduce='sum' in setup\(\) it gives the same"):
        setup(Tagger("sum"))(**padded())
    with pytest.raises(FlowdpError, match="reduce='sum'"):
        setup(Tagger())(**padded(), num_items_in_batch=20)
    setup(Tagger("sum"), reduce="sum")(**padded())


def test_several_numbers_are_named(setup: Any) -> None:
    class Two(Tagger):
        def forward(self, **inputs: Any) -> Any:
            return {**super().forward(**inputs), "aux": self.head.weight.sum() * len(inputs["input_ids"])}

    with pytest.raises(FlowdpError, match=r"reduce=\{'loss': lambda labels: .*, 'aux': 'sum'\}"):
        setup(Two())(**padded())


def test_a_batch_without_padding_tells_nothing_and_a_later_one_does(setup: Any) -> None:
    model = Tagger()
    dp = setup(model)
    full = padded()
    full["labels"] = full["input_ids"]
    dp(**full)["loss"].backward()
    before = gradients(model)
    with pytest.raises(FlowdpError, match="reduce=lambda labels"):
        dp(**padded())
    assert_equal(gradients(model), before)


class Contrastive(nn.Module):
    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.inner, self.reduction = mlp(), reduction

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        likeness = self.inner(x) @ self.inner(y).t()
        return F.cross_entropy(likeness, torch.arange(len(x)), reduction=self.reduction)


@pytest.mark.parametrize(
    ("reduction", "message"), [("mean", "as a contrastive loss does"), ("none", "looks across")]
)
def test_what_looks_across_the_batch(setup: Any, reduction: str, message: str) -> None:
    with pytest.raises(FlowdpError, match=message):
        setup(Contrastive(reduction))(numbers(8, 6), numbers(8, 6, seed=1))


def test_a_loss_that_training_mode_alone_returns(setup: Any) -> None:
    class Trained(Tagger):
        def forward(self, **inputs: Any) -> Any:
            outputs = super().forward(**inputs)
            return outputs["loss"] if self.training else outputs["logits"]

    model = Trained()
    with pytest.raises(FlowdpError, match="reduce=lambda labels"):
        setup(model)(**padded())
    dp = setup(model)
    dp.eval()
    dp(**padded())
    dp.train()  # outputs of another form are checked, too
    with pytest.raises(FlowdpError, match="reduce=lambda labels"):
        dp(**padded())


class Centred(nn.Module):
    """Depends on the whole batch only in training mode, by a weight that is 0 at the start."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.inner = mlp()
        self.weight = nn.Parameter(torch.tensor(weight).double())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out + self.weight * (out - out.mean(0)) if self.training else out


def test_training_is_checked_behind_a_validation(setup: Any) -> None:
    dp = setup(Centred(1.0))
    dp.eval()
    dp(numbers(8, 6))
    dp.train()
    with pytest.raises(FlowdpError, match="looks across the batch"):
        dp(numbers(8, 6))


def test_a_branch_that_is_0_at_the_start_is_found_later(setup: Any) -> None:
    model = Centred(0.0)
    dp = setup(model)
    dp(numbers(8, 6)).square().mean().backward()
    dp.step()
    assert model.weight
    with pytest.raises(FlowdpError, match="looks across the batch"):
        dp(numbers(8, 6))


# ---------------------------------------------------------------- shapes
class Squeezed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).squeeze()


def test_a_squeeze_with_one_sample_a_device(setup: Any) -> None:
    with pytest.raises(
        FlowdpError, match=r"\(2,\) for the whole batch, and \(\) for its parts .*squeeze\(-1\)"
    ):
        setup(Squeezed())(numbers(2, 6))
    dp = setup(Squeezed())
    for samples in (8, 8, 6):
        assert dp(numbers(samples, 6)).shape == (samples,)
    with pytest.raises(FlowdpError, match=r"squeeze\(-1\)"):
        dp(numbers(2, 6))


def test_what_is_no_tensor(setup: Any) -> None:
    class Counting(nn.Linear):
        def forward(self, input: Tensor) -> Any:
            return super().forward(input), len(input)

    with pytest.raises(FlowdpError, match=r"output\[1\] is 8 for the whole batch, and 4 for its parts"):
        setup(Counting(6, 2))(torch.randn(8, 6))


def test_parts_that_raise_where_the_whole_batch_does_not(setup: Any) -> None:
    class Fixed(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            if len(input) < 8:
                raise ValueError("eight at a time")
            return super().forward(input)

    with pytest.raises(
        FlowdpError, match=r"part 1 raises ValueError: eight at a time .*8 samples as 4"
    ) as told:
        setup(Fixed(6, 2))(torch.randn(8, 6))
    assert isinstance(told.value.__cause__, ValueError)


class Giving(nn.Module):
    """Returns a function of its layer's outputs."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.inner, self.function = mlp(), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.inner(x))


@pytest.mark.parametrize(
    ("function", "ending"),
    [
        (lambda out: (out, (out > 0).sum()), r"reduce='sum' in setup\(\) \([^.]*\)\."),
        (lambda out: {"n": len(out)}, r"and 4 for its parts .* return an entry for each sample, or [^.]*\."),
        (lambda out: out.mean().reshape(1), r"return loss.mean\(\) or loss.squeeze\(\) \([^.]*\)\."),
        (list, r"\)\. Stack what is one tensor for each sample .* join= in setup\(\)\."),
        (lambda out: out - out.mean(0), r"\)\. If the module looks across the batch, [^.]*\."),
    ],
)
def test_advice_fits_the_difference(setup: Any, function: Any, ending: str) -> None:
    with pytest.raises(FlowdpError, match=rf"{ending} \(check=False"):
        setup(Giving(function))(numbers(8, 6))


def test_a_loss_of_one_entry_and_parts_of_one_sample(setup: Any) -> None:
    with pytest.raises(FlowdpError, match=r"\. A loss is one number, of no dim: return loss.mean\(\)"):
        setup(Giving(lambda out: out.mean().reshape(1)))(numbers(2, 6))


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.bag = nn.Linear(4, 3), nn.EmbeddingBag(10, 4)

    def forward(self, table: Tensor, places: Tensor) -> Tensor:
        if table.is_floating_point():
            return self.table(table[places])
        return self.bag(table, places)


def test_arguments_that_are_no_part_of_the_batch(setup: Any) -> None:
    table, places = torch.randn(10, 4), torch.arange(9, 1, -1)
    with pytest.raises(FlowdpError, match=r"With dim=\{'table': None\} in setup\(\) it gives the same"):
        setup(Bag())(table, places)
    assert setup(Bag(), dim={"table": None})(table, places).shape == (8, 3)
    with pytest.raises(FlowdpError, match=r"Is each of the arguments a part of the batch.* split="):
        setup(Bag())(torch.arange(10).repeat(2), torch.arange(0, 20, 4))


def test_states_of_a_recurrent_layer(setup: Any) -> None:
    model = nn.LSTM(3, 5, 2, batch_first=True).double()
    x, states = numbers(8, 7, 3), (numbers(2, 8, 5), numbers(2, 8, 5, seed=1))
    with pytest.raises(
        FlowdpError, match=r"With dim=\{'return': \{'1.0': 1, '1.1': 1\}\} in setup\(\) it gives the same"
    ):
        setup(model)(x)
    with pytest.raises(FlowdpError, match=r"With dim=\{'hx': 1, 'return': \{'1.0': 1, '1.1': 1\}\} in"):
        setup(model)(x, states)
    for inner in ({"1.0": 1, "1.1": 1}, {"1": 1}, {0: 0, 1: 1}):
        out, (h, c) = setup(model, dim={"hx": 1, "return": inner})(x, states)
        twin, (twin_h, twin_c) = model(x, states)
        assert_equal([out, h, c], [twin, twin_h, twin_c])
    with pytest.raises(
        FlowdpError, match=r"if its samples lie along dim 1, say dim=\{'return': \{'1.0': 1\}\}"
    ):
        setup(model, check=False)(x)


# ---------------------------------------------------------------- windows
def test_batches_that_are_cut_for_windows(setup: Any) -> None:
    def loss(context: Any) -> Tensor:
        labels = context.batch["labels"][:, 1:].flatten()
        return F.cross_entropy(context.output["logits"][:, :-1].flatten(0, 1), labels)

    full = padded()
    full["labels"] = full["input_ids"]
    dp = setup(Tagger(), loss_fn=loss, inputs="input_ids")
    windows = iter(dp.epoch([full, padded()]))
    dp.forward_batch(next(windows))
    message = r"the loss of a window gives another result .* compute it of result\.output"
    with pytest.raises(FlowdpError, match=message):
        dp.forward_batch(next(windows))
    dp = setup(Tagger(), inputs="input_ids")
    for window in dp.epoch([full, padded()]):
        dp.forward_batch(window)
    dp = setup(nn.LSTM(3, 5))
    for window in dp.epoch([torch.randn(4, 6, 3)]):
        with pytest.raises(FlowdpError, match="the module gives another result"):
            dp.forward_batch(window)


def test_whole_batches_in_windows_are_not_checked(setup: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flowdp.data_parallel.wrapper, "check_call", None)
    dp = setup(Squeezed(), cadence=True)
    for window in dp.epoch([numbers(4, 6)] * 2):
        dp.forward_batch(window)


# ---------------------------------------------------------------- calls that pass, without a trace
class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x: Tensor) -> Any:
        mean, log_variance = self.encode(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decode(z), mean, log_variance


class Everything(nn.Module):
    """Dropout, batch norm, a count of calls, and three kinds of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.ReLU(True), nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.loose = nn.BatchNorm1d(4, track_running_stats=False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out = self.loose(self.layers(x.clone()))
        return F.dropout(out, 0.2, self.training) * random.random()


@pytest.mark.parametrize("make", [Variational, Everything])
@pytest.mark.parametrize("casts", [False, True])
def test_modules_that_draw_pass(setup: Any, make: Any, casts: bool) -> None:
    dp = setup(make())
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        for _ in range(2):
            dp(torch.randn(8, 6))


@pytest.mark.parametrize("is_rows", [True, False])
def test_a_run_with_the_check_has_the_bits_of_one_without(setup: Any, is_rows: bool) -> None:
    class Counting(nn.Sequential):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            out = super().forward(x)
            return out if is_rows else out.mean()

    def state(check: bool) -> Any:
        torch.manual_seed(1)
        model = Counting(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
        dp = setup(model, check=check, partition_ratios=(1, 1))
        for _ in range(4):
            # The second call is checked before the backward of the first.
            (dp(torch.randn(8, 6)).mean() + dp(torch.randn(8, 6)).square().mean()).backward()
            dp.step()
        return [tensor.tolist() for tensor in model.state_dict().values()], model.calls

    checked = state(True)
    assert checked == state(False)
    assert checked[1] == 8


def test_generators_go_on_as_if_there_were_no_check(setup: Any) -> None:
    def states(check: bool) -> Any:
        torch.manual_seed(1)
        random.seed(1)
        dp = setup(Everything(), check=check)
        for _ in range(2):
            dp(torch.randn(8, 6))
        return torch.random.get_rng_state().tolist(), random.getstate()

    assert states(True) == states(False)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_the_check_runs_in_every_mode(setup: Any, mode: Any) -> None:
    model = Everything()
    with mode():
        dp = setup(model)
        for _ in range(2):
            dp(torch.randn(8, 6))
        with pytest.raises(FlowdpError, match="say dim=1"):
            setup(nn.LSTM(3, 5).bfloat16())(torch.randn(4, 6, 3).bfloat16())
    assert not any(tensor.is_inference() for tensor in model.state_dict().values())


def test_check_false_compares_nothing(setup: Any) -> None:
    assert setup(Squeezed(), check=False)(numbers(2, 6)).shape == ()
    with pytest.raises(OptionError, match="check must be True or False"):
        setup(mlp(), check=1)


def test_one_device_and_one_sample_are_not_checked(setup: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flowdp.data_parallel.wrapper, "check_call", None)
    setup(Squeezed(), devices=["cpu"])(numbers(2, 6))
    setup(Squeezed())(numbers(1, 6))


# ---------------------------------------------------------------- buffers
def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


class Queue(nn.Module):
    """Keeps its last outputs, as in momentum contrast, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("queue", torch.zeros(8, 3).double())
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        self.queue = torch.cat([out.detach(), self.queue])[:8]
        self.calls += 1
        return out


def test_buffers_that_hold_something_of_the_batch_are_named_once(
    setup: Any, caplog: pytest.LogCaptureFixture
) -> None:
    dp = setup(Queue())
    for _ in range(3):
        dp(numbers(8, 6))
    (told,) = warnings_of(caplog)
    assert "Queue.forward writes values of the batch to the buffers 'queue'" in told


class Noting(nn.Module):
    """Keeps an auxiliary loss, a list of features and a count, as in mixtures of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.features: list[Tensor] = []
        self.calls = 0
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        self.aux = out.square().mean()
        self.width = out.shape[1]
        self.features = [out.detach()]
        self.calls += 1
        self.seen += len(x)
        return out.sum() / len(x)


def test_attributes_that_hold_a_result_of_the_batch_are_named_once(
    setup: Any, caplog: pytest.LogCaptureFixture
) -> None:
    dp = setup(nn.Sequential(Noting()))
    for _ in range(4):
        dp(numbers(8, 6))
    (told,) = warnings_of(caplog)
    assert "keeps results of the batch in the attributes '0.features', '0.seen', '0.aux'" in told
    assert dp.module[0].calls == 4


# ---------------------------------------------------------------- calls that cannot be checked
def test_a_module_that_cannot_take_the_whole_batch_is_told_once(
    setup: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Small(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            assert len(input) <= 4, "four at most"
            return super().forward(input).sum()

    dp = setup(Small(6, 2))
    for _ in range(4):
        dp(torch.randn(8, 6))
    (told,) = warnings_of(caplog)
    assert "could not be checked" in told
    assert "with the whole batch it raises AssertionError: four at most" in told


class Rounding(nn.Module):
    """Amplifies a rounding that depends on the number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.kinds = nn.Linear(6, 3), set[torch.dtype]()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        self.kinds = self.kinds | {out.dtype}
        return out + (out / len(x) * len(x) - out) * 5e5


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_difference_by_rounding_is_none(setup: Any, kind: torch.dtype) -> None:
    torch.manual_seed(1)
    model = Rounding()
    x = torch.randn(48, 6)
    whole = model(x)
    assert not torch.allclose(whole, torch.cat([model(part) for part in x.split(16)]), rtol=1e-3, atol=1e-3)
    model.to(kind)
    before = [tensor.clone() for tensor in model.state_dict().values()]
    setup(model, devices=["cpu"] * 3)(x.to(kind))
    assert model.kinds == {torch.float32, kind}
    assert_equal(list(model.state_dict().values()), before)


def test_numbers_drawn_for_each_sample_in_python(setup: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Noisy(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(torch.stack([row * random.random() for row in input]))

    setup(Noisy(6, 2))(torch.randn(8, 6))
    (told,) = warnings_of(caplog)
    assert "random numbers" in told


@pytest.mark.parametrize(
    ("room", "tried"),
    [
        (9, [9, 5, 4]),
        (4, [9, 9, 4, 2, 2]),  # in wide floats, as it is, and one half with its parts
        (1, [9, 9, 4, 4, 2, 2]),
    ],
)
def test_a_device_without_room_for_the_whole_batch(
    caplog: pytest.LogCaptureFixture, room: int, tried: list[int]
) -> None:
    seen: list[int] = []

    class Large(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            seen.append(len(input))
            if len(input) > room:
                raise torch.OutOfMemoryError("no room")
            return super().forward(input)

    model = Large(6, 2)
    assert check_call(model, call(model, torch.randn(9, 6), (5, 4))) is (room > 1)
    assert seen == tried
    told = warnings_of(caplog)
    assert (not told) if room > 1 else ("no memory for two samples" in told[0])


def test_half_of_a_batch_of_lists() -> None:
    images = [numbers(3, 4, size) for size in range(6)]
    records = [{"boxes": numbers(count, 4)} for count in range(6)]
    callee, layout = Callee(lambda images, records: 0), Layout()
    args = (images, records)
    arguments = layout.arguments(callee, args, {})
    call = Call(callee, lambda *_: 0, args, {}, (4, 2), layout.of(arguments), CPU)
    half = call.fewer()
    assert half is not None
    assert half.args == (images[:3], records[:3])
    assert [len(part.args[0]) for part in half.parts()] == [2, 1]
    assert call.how() == "6 samples as 4 + 2, by the entries of its lists"


def call(model: nn.Module, x: Any, sizes: tuple[int, ...]) -> Call:
    def run(module: nn.Module, part: Any) -> Any:
        return module(*part.args, **part.kwargs)

    return Call(Callee(model.forward), run, (x,), {}, sizes, Layout(), CPU)


# ---------------------------------------------------------------- the calls checked
def test_methods_have_a_schedule_each(setup: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    monkeypatch.setattr(
        flowdp.data_parallel.wrapper,
        "check_call",
        lambda module, call: checked.append(call.callee.name) or call_check.check_call(module, call),
    )

    def twice(module: Any, x: Tensor, n: int) -> Tensor:
        return module.inner(x) * n

    dp = setup(Contrastive("none"))
    x = numbers(8, 6)
    for _ in range(3):
        dp.call(lambda module, x: module.inner(x), x)
        dp.call("inner", x)
        dp.call(partial(twice, n=3), x)
    assert checked == ["<lambda>", "Contrastive.inner", "partial"] * 2


def test_gradients_are_those_of_one_device_behind_a_check(setup: Any) -> None:
    model = mlp()
    twin = copy.deepcopy(model)
    dp = setup(model)
    for call in (dp, twin):
        x = numbers(8, 6).requires_grad_()
        call(x * 2).sin().sum().backward()
    assert_equal(gradients(model), gradients(twin))
