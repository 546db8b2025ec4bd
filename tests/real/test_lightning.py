"""A LightningModule as it is, by the functions in docs/moving.md, beside Lightning's own Trainer."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

import flowdp
from tests.real.ways import assert_same, program, weights

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning: Any = pytest.importorskip("lightning", reason="lightning is not installed (flowdp[real])")

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning

EPOCHS, BATCH = 4, 16


def adam(module: Any) -> Any:
    return AdamW(module.parameters(), lr=1e-2)


def plateau(module: Any) -> Any:
    optimizer = SGD(module.parameters(), lr=2.0, momentum=0.9)  # so large that the loss rises
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer, patience=0), "monitor": "val_loss"},
    }


def by_step(module: Any) -> Any:
    optimizer = adam(module)
    return [optimizer], [{"scheduler": LambdaLR(optimizer, lambda step: 0.9**step), "interval": "step"}]


def by_epoch(module: Any) -> Any:
    optimizer = adam(module)
    return [optimizer], [StepLR(optimizer, 2)]


def in_a_dict(module: Any) -> Any:
    optimizer = adam(module)
    return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1, gamma=0.5)}


FORMS: dict[str, Callable[[Any], Any]] = {
    "optimizer": adam,
    "list": lambda module: [adam(module)],
    "dict": lambda module: {"optimizer": adam(module)},
    "scheduler by epoch": by_epoch,
    "scheduler by step": by_step,
    "scheduler in a dict": in_a_dict,
    "plateau": plateau,
}


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """Class and functions of the page, without the run below them."""
    tree = ast.parse(program("From Lightning"))
    kinds = ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef
    tree.body = [node for node in tree.body if isinstance(node, kinds)]
    names: dict[str, Any] = {}
    exec(compile(tree, "docs/moving.md", "exec"), names)
    return names


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
def test_weights_and_logged_numbers_are_those_of_lightning(
    page: dict[str, Any], form: str, devices: int, tmp_path: Path
) -> None:
    class Module(page["Classifier"]):  # type: ignore[misc]
        configure_optimizers = FORMS[form]

    torch.manual_seed(0)
    train, held_out = (TensorDataset(torch.randn(n, 20), torch.randint(10, (n,))) for n in (72, 40))
    alone = Module()
    together = Module()
    together.load_state_dict(alone.state_dict())
    seen: list[dict[str, float]] = []

    class Watch(lightning.Callback):  # type: ignore[misc]
        def on_train_epoch_end(self, trainer: Any, _: Any) -> None:
            named = {"train_loss": "train_loss_epoch", "val_loss": "val_loss"}
            seen.append({name: float(trainer.callback_metrics[key]) for name, key in named.items()})

    lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=tmp_path,
        callbacks=[Watch()],
    ).fit(alone, DataLoader(train, BATCH), DataLoader(held_out, BATCH))
    state = page["trainer_of"](
        together,
        DataLoader(train, BATCH),
        held_out,
        epochs=EPOCHS,
        devices=["cpu"] * devices,
        progress=False,
    ).fit()
    assert_same(weights(together), weights(alone))
    for record, expected in zip(state.history, seen, strict=True):
        found = {"train_loss": record.scalars["train_loss"], "val_loss": record.eval["val_loss"]}
        assert found == pytest.approx(expected, rel=1e-6)  # Lightning's means are float32
    assert len(seen) == EPOCHS


def test_a_frequency_is_refused(page: dict[str, Any]) -> None:
    def often(module: Any) -> Any:
        optimizer = adam(module)
        return [optimizer], [{"scheduler": StepLR(optimizer, 1), "frequency": 5}]

    class Module(page["Classifier"]):  # type: ignore[misc]
        configure_optimizers = often

    with pytest.raises(NotImplementedError, match="frequency"):
        page["trainer_of"](Module(), None, None)


def test_what_needs_a_trainer_of_lightning_says_so(page: dict[str, Any]) -> None:
    class Module(page["Classifier"]):  # type: ignore[misc]
        def training_step(self, batch: Any, index: int) -> Any:
            return super().training_step(batch, index) * self.trainer.max_epochs

    data = TensorDataset(torch.randn(32, 20), torch.randint(10, (32,)))
    with pytest.raises(flowdp.FlowdpError, match="not attached to a `Trainer`"):
        page["trainer_of"](Module(), DataLoader(data, 16), data, epochs=1, progress=False).fit()
