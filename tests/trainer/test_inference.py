"""Tests of validations and predictions by a Trainer, on real threads."""

from __future__ import annotations

import random
import signal
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import flowdp
from flowdp import EvaluationOptions, MetricArray, OptionError, StepError, Trainer
from flowdp.device import cores
from flowdp.engine import active_runs
from flowdp.errors import DataError
from flowdp.threads.stacks import OWN
from flowdp.trainer.inference import _check, forward_step, joined
from tests.limits import HANG_S

torch.manual_seed(11)
X, Y = torch.randn(53, 4), torch.randint(0, 3, (53,))


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Tensor:
        return X[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(X)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


def trainer(model: Any, devices: int = 3, **options: Any) -> Trainer:
    given: dict[str, Any] = {
        "optimizer": lambda params: torch.optim.SGD(params, 0.1),
        "loss": nn.CrossEntropyLoss(),
        "dataset": (X, Y),
        "per_device_batch_size": 8,
        "epochs": 1,
        "devices": ["cpu"] * devices,
        "policy": "sync",
        "progress": False,
    }
    return Trainer(model, **{**given, **options})


class Together:
    """A step whose first call on each rank waits for those of the others, so that all have a batch."""

    def __init__(self, ranks: int) -> None:
        self.meeting, self.seen = threading.Barrier(ranks), set[int]()

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        if (rank := flowdp.current_worker().rank) not in self.seen:
            self.seen.add(rank)
            self.meeting.wait(HANG_S)
        assert not torch.is_grad_enabled()
        assert not any(part.training for part in model.modules())
        return model(batch)


@pytest.mark.parametrize(
    "dataset",
    [X, Samples(), Stream(), DataLoader(Samples(), 10, num_workers=2), DataLoader(Samples(), 7)],
    ids=["tensor", "map", "stream", "processes", "loader"],
)
def test_a_prediction_is_that_of_one_device_in_the_order_of_the_samples(dataset: Any) -> None:
    model = net()
    model[1].eval()  # a mode that the user has set stays
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes, random = [part.training for part in model.modules()], torch.get_rng_state()
    found = trainer(model).predict(dataset, Together(3))
    assert torch.equal(torch.get_rng_state(), random)
    assert [part.training for part in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.eval()
    assert found.shape == (53, 3)
    assert not found.requires_grad
    torch.testing.assert_close(found, model(X).detach())


def test_without_a_step_the_forward_is_called() -> None:
    model = net()
    own = trainer(model)
    expected = own.predict(X)
    assert torch.equal(own.predict((X, Y)), expected)  # a criterion has x and y
    assert torch.equal(own.predict(X, batch_size=8), expected)
    with pytest.raises(StepError, match=r"a batch here is a tuple of 2.*\(samples 0, 1, 2, 3, 4, 5, 6, 7\)"):
        trainer(model, 1, loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])).predict(
            (X, Y)
        )


def test_weights_of_a_result_and_of_a_checkpoint(tmp_path: Path) -> None:
    class Hidden(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.register_buffer("scale", torch.tensor(2.0), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * super().forward(x)

    own = trainer(Hidden, 2, checkpoint=tmp_path, evaluation=(X, Y))
    with pytest.raises(OptionError, match=r"the Trainer's model is a factory.*give state="):
        own.predict(X)
    state = own.fit()
    expected = F.linear(X, state.state_dict["weight"], state.state_dict["bias"]) * 2
    [file] = tmp_path.glob("*.pt")
    for given in (state, tmp_path, str(file)):
        torch.testing.assert_close(own.predict(X, state=given), expected)
        assert own.validate(given) == pytest.approx(state.history[-1].eval)
    with pytest.raises(flowdp.CheckpointError, match="of another model"):
        trainer(net).predict(X, state=state)
    with pytest.raises(OptionError, match="state must be a TrainedState or the path"):
        own.predict(X, state=3)  # type: ignore[arg-type]
    again = trainer(Hidden, 2, epochs=2, resume=state).fit()  # its buffers are not in a state_dict
    assert again.epochs_done == 2


def test_a_validation_is_an_evaluation_of_the_model_as_it_is() -> None:
    model = net()
    own = trainer(model, evaluation=(X, Y))
    first = own.validate()
    state = own.fit()
    model.eval()
    assert own.validate() == pytest.approx(state.history[-1].eval)
    assert own.validate()["loss"] == pytest.approx(F.cross_entropy(model(X), Y).item(), rel=1e-5)
    assert first["loss"] != own.validate()["loss"]
    with pytest.raises(OptionError, match=r"give Trainer\(evaluation=...\)"):
        trainer(model).validate()


def test_a_validation_has_metrics() -> None:
    pytest.importorskip("torchmetrics")
    from torchmetrics.classification import MulticlassConfusionMatrix, MulticlassF1Score

    model, f1 = net(), MulticlassF1Score(3)
    given = {"f1": f1, "confusion": MulticlassConfusionMatrix(3)}
    found = trainer(model, evaluation=(X, Y), metrics=given).validate()
    model.eval()
    f1.update(model(X), Y)
    assert found["f1"] == pytest.approx(f1.compute().item())
    assert isinstance(found["confusion"], MetricArray)
    assert sum(found["confusion"].values) == 53


def test_an_error_names_rank_device_batch_and_samples_and_ends_the_others() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        if torch.equal(x[0], X[16]):
            raise ZeroDivisionError("of mine")
        return model(x)

    with pytest.raises(
        StepError,
        match=r"rank \d on cpu failed while it predicts: ZeroDivisionError: of mine; "
        r"in batch 3 \(samples 16, 17, 18, 19, 20, 21, 22, 23\)",
    ) as caught:
        trainer(net()).predict(X, step)
    assert caught.value.device == "cpu"
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    evaluation = EvaluationOptions((X, Y), step=lambda model, batch: {"y": step(model, batch[0]).mean()})
    with pytest.raises(
        StepError, match=r"while it validates: ZeroDivisionError: .* of the evaluation"
    ) as told:
        trainer(net(), evaluation=evaluation).validate()
    for error in (caught.value, told.value):  # its frames are the caller's alone
        assert not [frame for frame in traceback.extract_tb(error.__traceback__) if OWN in frame.filename]


@pytest.mark.posix
def test_an_interrupt_ends_it_and_leaves_no_thread() -> None:
    was_heard, first, done = threading.Event(), threading.Lock(), []

    def hear(number: int, frame: object) -> None:
        was_heard.set()
        raise KeyboardInterrupt

    def step(model: nn.Module, x: Tensor) -> Tensor:
        if first.acquire(blocking=False):  # a second one would meet the end of the first
            signal.pthread_kill(main, signal.SIGINT)
        assert was_heard.wait(HANG_S)
        done.append(len(x))
        return model(x)

    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGINT, hear)
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer(net(), 2).predict(Samples(), step, batch_size=1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(done) < len(X)
    assert not [one for one in threading.enumerate() if one.name.startswith("flowdp")]


def test_a_run_on_the_same_device_is_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    def held(devices: Any) -> None:
        raise OptionError(f"devices: {devices} is held by another run")

    monkeypatch.setattr("flowdp.trainer.inference.check_free", held)
    assert active_runs.check_free is not held
    for call in (lambda: trainer(net()).predict(X), lambda: trainer(net(), evaluation=(X, Y)).validate()):
        with pytest.raises(OptionError, match="held by another run"):
            call()


def test_the_precision_is_that_of_the_training() -> None:
    found = trainer(nn.Linear(4, 3), 2, precision="bf16").predict(X)
    assert found.dtype is torch.bfloat16


# ---------------------------------------------------------------- before the first epoch
class Noisy(Samples):
    """Draws from every generator of the process."""

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(()) + random.random() + np.random.rand()
        return X[index] + 0.1 * noise, Y[index]


class Counting(nn.Module):
    """Keeps a number in a buffer, in eval mode too, and has dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return self.net(x) + 0.01 * self.forwards


def trained(sanity_check: int, evaluated: list[int]) -> flowdp.TrainedState:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)

    def step(model: nn.Module, batch: Any) -> Any:
        evaluated.append(len(batch[0]))
        flowdp.record_scalar("seen", 1.0)
        return {"loss": F.cross_entropy(model(batch[0]), batch[1])}

    held_out = DataLoader(
        Noisy(), 8, sampler=torch.utils.data.RandomSampler(range(53), generator=torch.Generator())
    )
    evaluation = EvaluationOptions(held_out, step=step, sanity_check=sanity_check)
    return trainer(Counting(), 1, evaluation=evaluation, epochs=2).fit()


def test_a_run_is_the_same_to_the_bit_with_a_sanity_check_and_without_one() -> None:
    with_two: list[int] = []
    without: list[int] = []
    state, plain = trained(2, with_two), trained(0, without)
    assert len(with_two) == len(without) + 2
    assert state.state_dict.keys() == plain.state_dict.keys()
    for name, value in plain.state_dict.items():
        assert torch.equal(state.state_dict[name], value), name
    assert [one.eval for one in state.history] == [one.eval for one in plain.history]
    assert all("seen" not in one.scalars for one in state.history)


def test_an_error_of_the_evaluation_is_found_before_the_first_epoch() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        assert not model.training, "nothing is trained before"
        return F.cross_entropy(model(batch[0]), batch[1].float())

    own = trainer(net(), 2, loss=loss, evaluation=(X, Y))
    with pytest.raises(
        StepError,
        match=r"while it tries the evaluation before the first epoch \(sanity_check=2\): RuntimeError",
    ):
        own.start()
    assert not flowdp.runs()
    assert not [one for one in threading.enumerate() if one.name.startswith("flowdp")]


def test_a_busy_machine_is_told_once_with_a_sanity_check(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cores, "thread_budget", lambda: 2)
    monkeypatch.setattr(cores, "barrier_ms", lambda _: 5.0)
    trained(2, [])
    [told] = [message for message in caplog.messages if "other programs want the cores" in message]
    assert "this run keeps its 2 threads" in told


def test_a_resumed_run_has_no_sanity_check(tmp_path: Path) -> None:
    calls: list[int] = []

    def step(model: nn.Module, batch: Any) -> Any:
        calls.append(len(batch[0]))
        return {}

    options: dict[str, Any] = {"checkpoint": tmp_path, "resume": True}
    options["evaluation"] = EvaluationOptions((X[:8], Y[:8]), step=step, sanity_check=3)
    trainer(net(), 1, **options).fit()
    assert calls == [8, 8]  # one batch is all there is
    trainer(net(), 1, epochs=2, **options).fit()
    assert calls == [8, 8, 8]


# ---------------------------------------------------------------- outputs of several batches as one
A, B = torch.arange(6.0).reshape(3, 2), torch.arange(4.0).reshape(2, 2) + 10


def test_tensors_of_one_form_are_concatenated() -> None:
    assert torch.equal(joined([(A, 3), (B, 2)]), torch.cat([A, B]))
    both = joined([({"x": A, "y": (A[:, 0],)}, 3), ({"x": B, "y": (B[:, 0],)}, 2)])
    assert both.keys() == {"x", "y"}
    assert torch.equal(both["y"][0], torch.cat([A, B])[:, 0])


def test_tensors_that_do_not_fit_are_a_list_of_the_samples() -> None:
    found = joined([(A, 3), (torch.zeros(2, 5), 2)])
    assert [tuple(one.shape) for one in found] == [(2,)] * 3 + [(5,)] * 2
    pairs = joined([((A, A[:, 0]), 3), ((torch.zeros(1, 5), torch.ones(1)), 1)])
    assert isinstance(pairs[3], tuple)
    assert pairs[2][1] == A[2, 0]
    assert joined([(A, 3), (B.double(), 2)])[4].dtype is torch.float64


def test_a_list_as_long_as_the_batch_has_an_entry_for_each_sample() -> None:
    boxes = [[{"boxes": torch.full((2, 4), float(i))} for i in range(2)] for _ in range(2)]
    found = joined([(boxes[0], 2), (boxes[1], 2)])  # as many boxes as samples, by chance
    assert [one["boxes"][0, 0].item() for one in found] == [0, 1, 0, 1]
    assert joined([(["a", "b"], 2), (["c"], 1)]) == ["a", "b", "c"]
    assert joined([({"text": ["a", "b"], "x": B}, 2)])["text"] == ["a", "b"]
    levels = joined([([A, A], 3), ([B, B], 2)])  # of one batch alone as long as it
    assert len(levels) == 2
    assert torch.equal(levels[1], torch.cat([A, B]))


def test_no_batch() -> None:
    with pytest.raises(DataError, match="there is no sample to predict"):
        joined([])


@pytest.mark.parametrize("output", [torch.zeros(()), torch.zeros(4, 3), {"loss": torch.zeros(())}, None, {}])
def test_an_output_without_an_entry_for_each_sample(output: object) -> None:
    with pytest.raises(TypeError, match=r"an entry for each of the batch's 3 samples.*give predict\(dataset"):
        _check(output, 3)


def test_the_forward_is_the_step_where_none_is_given() -> None:
    model = nn.Identity()
    for has_criterion in (False, True):
        step: Any = forward_step(has_criterion)
        assert step(model, A) is A
        assert step(model, (A,)) is A
    assert step(model, [A, B]) is A
    for batch, named in (((A, B), "tuple of 2"), ({"x": A}, "dict of 1"), (3, "int")):
        with pytest.raises(TypeError, match=f"a batch here is a {named}, and without a step"):
            forward_step(False)(model, batch)
    assert isinstance(step(model, A), Tensor)
