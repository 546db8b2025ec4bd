"""The names that the code of a page takes for granted: a small model, small data, the objects of a loop.

Every page begins with `small`; a block behind `<!-- with: name -->` has the names of that preamble, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flowdp

__all__ = ["PREAMBLES", "small"]

Names = dict[str, Any]
SAMPLES = 64


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def accuracy(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}


def small() -> Names:
    """A model, its data and the objects of a loop; `options` are what `...` stands for in a Trainer."""
    data = TensorDataset(torch.randn(SAMPLES, 20), torch.randint(10, (SAMPLES,)))
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 10))
    optimizer = sgd(model.parameters())
    return {
        "torch": torch,
        "nn": nn,
        "F": F,
        "flowdp": flowdp,
        "data": data,
        "dataset": data,
        "held_out": data,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10),
        "loader": DataLoader(data, batch_size=16),
        "loss": loss,
        "accuracy": accuracy,
        "options": {
            "policy": "cadence",
            "model": model,
            "optimizer": sgd,
            "loss": loss,
            "dataset": data,
            "per_device_batch_size": 8,
            "epochs": 1,
        },
    }


# ---------------------------------------------------------------- of single pages
class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(4, 8), nn.Linear(8, 1)


def gan() -> Names:
    def critic_loss(model: Any, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
        return (model.critic(fake) - model.critic(real)).mean()  # type: ignore[no-any-return]

    def generator_loss(model: Any, fake: torch.Tensor) -> torch.Tensor:
        return -model.critic(fake).mean()  # type: ignore[no-any-return]

    return {
        "Gan": Gan,
        "dataset": {"noise": torch.randn(SAMPLES, 4), "real": torch.randn(SAMPLES, 8)},
        "critic_loss": critic_loss,
        "generator_loss": generator_loss,
    }


class Pretrained(nn.Linear):
    """A stand-in for a model of transformers."""

    def save_pretrained(self, folder: str) -> None:
        Path(folder).mkdir()


def finished() -> Names:
    """A run that has ended, with its best checkpoint and a moving average."""
    rmtree("runs", ignore_errors=True)  # of the blocks before
    own = small()
    model = Pretrained(20, 10)
    run = flowdp.Trainer(
        **own["options"] | {"model": model},
        evaluation=flowdp.EvaluationOptions(own["held_out"], step=accuracy),
        checkpoint=flowdp.CheckpointOptions("runs/a", keep_best=("accuracy", "max")),
        callbacks=[flowdp.EMA(0.9)],
    ).start()
    run.join()
    return {"model": model, "run": run}


def compiled() -> Names:
    own = small()
    del own["options"]["model"]
    return own | {"net": own["model"], "Net": lambda: nn.Linear(20, 10)}


def replicas() -> Names:
    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch) ** 2).mean()

    return {
        "make": lambda: nn.Linear(8, 1),
        "devices": ["cpu", "cpu"],
        "pieces_of_any_size": [[torch.randn(3, 8), torch.randn(5, 8)] for _ in range(2)],
        "loss_of": loss_of,
    }


def process_group() -> Names:
    """A process group of this process alone, as torchrun would make it of several."""
    torch.distributed.init_process_group(
        "gloo", init_method=Path("store").absolute().as_uri(), rank=0, world_size=1
    )
    return {"loss_of": F.mse_loss}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2)

    def forward(self, query: Any, key: Any, value: Any, src: Any, tgt: Any, tgt_mask: Any) -> Any:
        return self.layer(query, key, value)


def attention() -> Names:
    model = Attention()
    return {"model": model, "optimizer": sgd(model.parameters())}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(20, 16), nn.Linear(16, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(image))  # type: ignore[no-any-return]


def images() -> Names:
    model = Classifier()
    samples = [{"image": torch.randn(20), "label": torch.tensor(one % 10)} for one in range(SAMPLES)]
    return {
        "model": model,
        "optimizer": sgd(model.parameters()),
        "loader": DataLoader(samples, batch_size=16),  # type: ignore[arg-type]
    }


PREAMBLES: dict[str, Callable[[], Names]] = {
    "attention": attention,
    "compiled": compiled,
    "finished": finished,
    "gan": gan,
    "images": images,
    "process-group": process_group,
    "replicas": replicas,
    "small": small,
}
