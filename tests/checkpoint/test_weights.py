"""Tests of exported weights: read back by torch, safetensors and transformers, to the bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from pickle import PicklingError
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from flowdp.checkpoint.weights import save_weights

safetensors: Any = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

TOKENS = 17


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.embedding(tokens)))
        return logits


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, 0]), batch[:, 1])


def trainer(model: Any, **options: Any) -> flowdp.Trainer:
    given: dict[str, Any] = {
        "loss": loss,
        "dataset": torch.randint(TOKENS, (24, 2), generator=torch.Generator().manual_seed(1)),
        "per_device_batch_size": 4,
        "epochs": 1,
        "devices": ["cpu", "cpu"],
        "policy": "sync",
        "progress": False,
    }
    return flowdp.Trainer(model, lambda params: torch.optim.Adam(params, lr=0.01), **given | options)


def same(mine: nn.Module, state: flowdp.TrainedState) -> None:
    theirs = mine.state_dict()
    assert theirs.keys() == state.state_dict.keys()
    for name, tensor in state.state_dict.items():
        assert torch.equal(theirs[name], tensor), name


@pytest.fixture(scope="module")
def state() -> flowdp.TrainedState:
    return trainer(Tied).fit()


@pytest.mark.parametrize("suffix", [".pt", ".pth"])
def test_torch_reads_it(tmp_path: Path, state: flowdp.TrainedState, suffix: str) -> None:
    state.save(tmp_path / f"model{suffix}")
    fresh = Tied()
    fresh.load_state_dict(torch.load(tmp_path / f"model{suffix}", weights_only=True))
    same(fresh, state)
    assert [file.name for file in tmp_path.iterdir()] == [f"model{suffix}"]


def test_safetensors_reads_it_and_tied_weights_are_there_once(
    tmp_path: Path, state: flowdp.TrainedState
) -> None:
    path = tmp_path / "model.safetensors"
    state.save(path)
    stored = safetensors.load_file(path)
    assert len(stored) == len(state.state_dict) - 1
    fresh = Tied()
    assert safetensors.load_model(fresh, path) == (set(), [])  # strict: it raises where a name is too many
    same(fresh, state)
    safetensors.save_model(state.module, str(tmp_path / "theirs.safetensors"))
    assert safetensors.load_file(tmp_path / "theirs.safetensors").keys() == stored.keys()


def test_a_moving_average_is_written_in_place_of_the_weights(
    tmp_path: Path, state: flowdp.TrainedState
) -> None:
    averaged = trainer(Tied, callbacks=[flowdp.EMA(0.9)]).fit()
    averaged.save(tmp_path / "ema.safetensors", ema=True)
    fresh = Tied()
    safetensors.load_model(fresh, tmp_path / "ema.safetensors")
    assert averaged.ema is not None
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(tensor, averaged.ema[name]), name
    assert not torch.equal(fresh.head.weight, averaged.state_dict["head.weight"])
    with pytest.raises(flowdp.OptionError, match=r"there is no moving average.*flowdp\.EMA"):
        state.save(tmp_path / "none.pt", ema=True)


def test_a_suffix_without_a_format_and_a_value_that_is_no_tensor(
    tmp_path: Path, state: flowdp.TrainedState
) -> None:
    for name in ("model.bin", "model", "folder/"):
        with pytest.raises(flowdp.OptionError, match=r"must end with \.safetensors, \.pt, \.pth"):
            state.save(tmp_path / name)
    with pytest.raises(
        flowdp.OptionError, match=r"'a\._extra_state' is a dict, and safetensors holds tensors"
    ):
        save_weights(tmp_path / "model.safetensors", {"a._extra_state": {}})
    assert not any(tmp_path.iterdir())


def test_a_failure_leaves_the_file_from_before(tmp_path: Path, state: flowdp.TrainedState) -> None:
    path = tmp_path / "model.pt"
    state.save(path)
    before = path.read_bytes()
    with pytest.raises((AttributeError, PicklingError)):  # of a local function
        save_weights(path, {"value": lambda: None})
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]


@pytest.fixture(scope="module")
def gpt2() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(
        vocab_size=TOKENS, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def test_transformers_reads_a_result_and_a_checkpoint(tmp_path: Path, gpt2: Any) -> None:
    def own_loss(model: nn.Module, batch: Tensor) -> Tensor:
        value: Tensor = model(input_ids=batch, labels=batch).loss
        return value

    run = trainer(gpt2, loss=own_loss, checkpoint=tmp_path / "run").start()
    state = run.join()
    assert state.module is gpt2
    kind = type(gpt2)
    state.module.save_pretrained(tmp_path / "result")
    saved = flowdp.load_checkpoint(tmp_path / "run")
    saved.load_into(kind(gpt2.config)).save_pretrained(tmp_path / "checkpoint")
    (tmp_path / "file").mkdir()
    gpt2.config.save_pretrained(tmp_path / "file")
    state.save(tmp_path / "file" / "model.safetensors")
    for folder in ("result", "checkpoint", "file"):
        loaded = kind.from_pretrained(tmp_path / folder)
        assert loaded.lm_head.weight is loaded.transformer.wte.weight
        same(loaded, state)
