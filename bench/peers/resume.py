"""Samples of an epoch that is stopped in its middle and resumed on another number of devices.

    pip install lightning accelerate
    python -m bench.peers.resume

640 samples in batches of 8, one shuffled epoch. Two devices are stopped after 20 steps each; one, or three,
resume and train the epoch to its end. Each peer does it the way its documentation shows. A sample that is
trained is written down by its index, before and after; the table counts those trained once, twice and never.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

SAMPLES, BATCH, STEPS = 640, 8, 20
SIDES = ("flowdp", "lightning", "accelerate")


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """Each sample is its index, and a target."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(index), torch.tensor([index / SAMPLES])


def loss_of(model: nn.Module, batch: Any, folder: Path) -> Tensor:
    """The loss, with the samples written down."""
    index, target = batch
    with (folder / f"trained-{os.getpid()}").open("a") as file:
        file.write("".join(f"{one}\n" for one in index.tolist()))
    return nn.functional.mse_loss(model(target), target)


# ------------------------------------------------------------------ flowdp
def flowdp(folder: Path, devices: int, *, resume: bool) -> None:
    """Train, until step 20 of each of two devices; or resume, to the end of the epoch."""
    import flowdp

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return loss_of(model, batch, folder)

    flowdp.Trainer(
        nn.Linear(1, 1),
        lambda params: torch.optim.SGD(params, lr=0.01),
        loss,
        dataset=Numbers(),
        batch_size=2 * BATCH,  # of two devices, as theirs are together
        max_steps=None if resume else STEPS,
        epochs=1,
        devices=["cpu"] * devices,
        checkpoint=folder / "flowdp",
        resume=resume,
        progress=False,
    ).fit()


# ------------------------------------------------------------------ Lightning
def lightning(folder: Path, devices: int, *, resume: bool) -> None:
    """As above: `ModelCheckpoint` after 20 steps, `ckpt_path` to resume."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(1, 1)

        def training_step(self, batch: Any, _: int) -> Tensor:
            return loss_of(self.model, batch, folder)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    lightning.seed_everything(0)
    file = folder / "middle.ckpt"
    save = lightning.pytorch.callbacks.ModelCheckpoint(folder, file.stem, every_n_train_steps=STEPS)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_epochs=1,
        max_steps=-1 if resume else STEPS,
        logger=False,
        callbacks=[] if resume else [save],
        enable_checkpointing=not resume,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(Numbers(), batch_size=BATCH, shuffle=True)
    trainer.fit(Module(), loader, ckpt_path=str(file) if resume else None)


# ------------------------------------------------------------------ Accelerate
def accelerate(folder: Path, _devices: int, *, resume: bool) -> None:
    """As above, on the devices of its launcher: `save_state`, then `load_state` and `skip_first_batches`."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    set_seed(0)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Numbers(), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resume:
        accelerator.load_state(str(folder / "accelerate"))
        loader = accelerator.skip_first_batches(loader, STEPS)
    for step, batch in enumerate(loader):
        if not resume and step == STEPS:
            break
        accelerator.backward(loss_of(model, batch, folder))
        optimizer.step()
        optimizer.zero_grad()
    if not resume:
        accelerator.save_state(str(folder / "accelerate"))


# ------------------------------------------------------------------ both parts, counted
def run(side: str, folder: Path, devices: int, *, resume: bool) -> None:
    """One part of a run, in processes of its own."""
    command = [sys.executable, "-m", "bench.peers.resume", "--side", side, "--folder", str(folder)]
    command += ["--devices", str(devices), *(["--resume"] if resume else [])]
    if side == "accelerate":
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{side} on {devices} devices failed:\n{done.stdout}\n{done.stderr}")


def trained(folder: Path) -> Counter[int]:
    """How often each sample was trained."""
    lines = [line for file in folder.glob("trained-*") for line in file.read_text().split()]
    return Counter(map(int, lines))


def main() -> None:
    """Print the table; or do one part of a run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--devices", type=int)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    if options.folder is not None:
        {"flowdp": flowdp, "lightning": lightning, "accelerate": accelerate}[options.side](
            options.folder, options.devices, resume=options.resume
        )
        return
    print(f"{'':<12}{'devices':>10}{'once':>8}{'twice':>8}{'never':>8}")
    for side in [options.side] if options.side else SIDES:
        for after in (1, 3):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                run(side, folder, 2, resume=False)
                run(side, folder, after, resume=True)
                times = Counter(trained(folder)[sample] for sample in range(SAMPLES))
            more = sum(count for often, count in times.items() if often > 1)
            print(f"{side:<12}{f'2, then {after}':>10}{times[1]:>8}{more:>8}{times[0]:>8}", flush=True)


if __name__ == "__main__":
    main()
