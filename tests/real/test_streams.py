"""Streaming datasets as people have them: plain iterables, `datasets` of Hugging Face, torchdata's loader."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import flowdp

pytestmark = pytest.mark.filterwarnings("ignore")  # of torchdata and datasets

SAMPLES, BATCH = 410, 20  # the last batch is short
DRAWS = torch.Generator().manual_seed(5)
INPUTS = torch.randn(SAMPLES, 8, generator=DRAWS, dtype=torch.float64)
TARGETS = INPUTS.sum(1, keepdim=True).tanh()
DATA = TensorDataset(INPUTS, TARGETS)


class Iterable:
    """Nothing but `__iter__`."""

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(INPUTS, TARGETS, strict=True))


class Shuffled(IterableDataset[Any]):
    """Another order in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch))
        return iter([DATA[int(index)] for index in order])


def stateful(dataset: Any, **options: Any) -> Any:
    reason = "torchdata is not installed (flowdp[real])"
    loader = pytest.importorskip("torchdata.stateful_dataloader", reason=reason).StatefulDataLoader
    return loader(dataset, BATCH, **options)


def streamed(buffer: int = 0) -> Any:
    """A streaming dataset of Hugging Face, perhaps with a buffer in which it shuffles."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed (flowdp[real])")

    def rows() -> Iterator[Any]:
        for x, y in zip(INPUTS, TARGETS, strict=True):
            yield {"x": x.tolist(), "y": y.tolist()}

    found = datasets.IterableDataset.from_generator(rows)
    found = found.shuffle(seed=3, buffer_size=buffer) if buffer else found
    return found.map(lambda row: {name: torch.tensor(row[name], dtype=torch.float64) for name in "xy"})


STREAMS: dict[str, Callable[[], Any]] = {
    "iterable": Iterable,
    "shuffled": Shuffled,
    "datasets": streamed,
    "datasets, shuffled": lambda: streamed(buffer=64),
    "stateful, of samples": lambda: stateful(DATA, shuffle=True),
    "stateful, in order": lambda: stateful(DATA),
    "stateful, of a stream": lambda: stateful(Shuffled()),
    "stateful, of datasets": lambda: stateful(streamed()),
}


def loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
    return F.mse_loss(model(x), y)


def trainer(dataset: Any, devices: int = 2, **options: Any) -> flowdp.Trainer:
    torch.manual_seed(0)
    fixed = devices > 1 and options.get("policy", "exact") == "exact"
    several = {"runtime": flowdp.RuntimeOptions(partition_ratios=(0.3, 0.7))} if fixed else {}
    size = {} if isinstance(dataset, torch.utils.data.DataLoader) else {"batch_size": BATCH}
    return flowdp.Trainer(
        nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)),
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        options.pop("loss", loss),
        dataset=dataset,
        epochs=3,
        devices=["cpu"] * devices,
        progress=False,
        **size,
        **several,
        **options,
    )


class StopsAt:
    """The loss, which asks for the end of its run in one of its calls; that comes some steps later."""

    def __init__(self, call: int) -> None:
        self.calls = itertools.count()
        self.last = call

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        if next(self.calls) == self.last:
            flowdp.runs()[0].stop()
        return loss(model, batch)


@pytest.mark.parametrize("name", STREAMS)
def test_exact_is_one_device(name: str) -> None:
    alone, together = trainer(STREAMS[name](), 1).fit(), trainer(STREAMS[name](), 2).fit()
    assert together.global_step == alone.global_step == 3 * -(-SAMPLES // BATCH)
    for record in together.history:
        assert sum(part.samples for part in record.per_rank) == SAMPLES
        assert min(part.samples for part in record.per_rank) > SAMPLES // 5
    for key, value in alone.state_dict.items():
        torch.testing.assert_close(together.state_dict[key], value, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("policy", ["exact", "sync"])
@pytest.mark.parametrize("name", STREAMS)
def test_a_resume_inside_an_epoch_is_the_run_that_was_not_cut(name: str, policy: Any, tmp_path: Path) -> None:
    """To the bit."""
    whole = trainer(STREAMS[name](), policy=policy).fit()
    call = 80 if policy == "exact" else 54  # in the middle of an epoch: exact has two for each step
    cut = trainer(STREAMS[name](), policy=policy, checkpoint=tmp_path, loss=StopsAt(call)).fit()
    assert cut.interrupted
    assert cut.global_step % (whole.global_step // 3) > 0  # inside an epoch
    resumed = trainer(STREAMS[name](), policy=policy, checkpoint=tmp_path, resume=True).fit()
    assert resumed.global_step == whole.global_step
    losses = [record.loss for record in whole.history]  # sums of the ranks' reports, so to rounding
    assert [record.loss for record in resumed.history] == pytest.approx(losses, rel=1e-12)
    for key, value in whole.state_dict.items():
        assert torch.equal(resumed.state_dict[key], value), key


def test_a_step_of_several_batches_of_a_stream() -> None:
    alone = trainer(
        DATA, 1, gradient_accumulation_steps=3, reading=flowdp.ReadingOptions(shuffle=False)
    ).fit()
    together = trainer(Iterable(), 2, gradient_accumulation_steps=3).fit()
    assert together.global_step == alone.global_step
    for key, value in alone.state_dict.items():
        torch.testing.assert_close(together.state_dict[key], value, rtol=1e-11, atol=1e-11)


def test_max_steps_ends_a_stream_inside_an_epoch() -> None:
    state = trainer(Iterable(), 2, max_steps=30).fit()
    assert state.global_step == 30
    assert state.epochs_done == 1
