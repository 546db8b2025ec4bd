"""Runs the examples of docs/errors.md, and updates the outputs on the page.

    python -m tests.docs.errors_page --write

Every block of output on the page follows its name, `<!-- output: step-error -->`, and is the output of the
example of that name: with only the example's own frames, without events of the log, and with long lines
broken. Numbers may differ, as some are times; `--write` keeps a block if nothing else differs.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import re
import sys
import tempfile
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import flowdp
from flowdp.protocol.messages import Averaged
from tests.limits import HANG_S

__all__ = ["EXAMPLES", "PAGE", "missing", "named", "output", "rewritten", "same"]

PAGE = Path(__file__).resolve().parents[2] / "docs/errors.md"
WIDTH = 96
BLOCK = re.compile(r"<!-- output: ([\w-]+) -->\n```text\n(.*?)```\n", re.DOTALL)
FENCE = re.compile(r"^```\w*$", re.MULTILINE)
FRAME = re.compile(r'  File "|  [\d.]+ ms ')  # of a stack, or an event of the event log
EXAMPLES: dict[str, Callable[[], object]] = {}
TRACED = {"data-error", "step-error"}  # the page has the traceback of their error


# ---------------------------------------------------------------- the examples
def example(function: Callable[[], object]) -> Callable[[], object]:
    """Register a function as the example of this name."""
    EXAMPLES[function.__name__.replace("_", "-")] = function
    return function


def trainer(**options: Any) -> flowdp.Trainer:
    """A trainer with two CPU devices in lockstep, 8 batches in each of 2 epochs; `options` replace or add
    arguments.
    """
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "model": nn.Linear(4, 1),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "loss": loss,
        "dataset": (torch.randn(64, 4), torch.randn(64, 1)),
        "per_device_batch_size": 8,
        "epochs": 2,
        "devices": ["cpu", "cpu"],
        "policy": "sync",
    }
    return flowdp.Trainer(**{**given, **options})


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def is_at(step: int, rank: int = 1) -> bool:
    worker = flowdp.current_worker()
    return worker is not None and worker.local_step == step and worker.rank == rank


class Photos(torch.utils.data.Dataset[Any]):
    """A dataset with one broken image."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 37:
            raise OSError("photo_37.jpg is truncated")
        return torch.zeros(4), torch.zeros(1)


@example
def option_error() -> None:
    trainer(epochs=None)


@example
def option_error_devices() -> None:
    trainer(devices=["cuda:3"])


@example
def data_error() -> None:
    trainer(dataset=Photos()).fit()


@example
def step_error() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if is_at(2):
            raise ValueError("target 11 is out of bounds")
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    trainer(loss=loss).fit()


@example
def not_joined() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        raise ValueError("target 11 is out of bounds")

    run = trainer(loss=loss, devices=["cpu"]).start()
    ended = threading.Event()
    with printed_by_threads(ended):
        ended.wait()
    assert run.done


@example
def smaller_pieces() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if is_at(2) and len(batch[0]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    trainer(loss=loss).fit()


@example
def out_of_device_memory() -> None:
    def step(params: Any) -> torch.optim.Optimizer:
        class Full(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        return Full(params, lr=0.1)

    trainer(optimizer=step, devices=["cpu"]).fit()


@example
def collective_error() -> None:
    class Writes(flowdp.Callback):
        def on_step(self, worker: Any, loss: torch.Tensor | None) -> None:
            if worker.rank == 1:
                with torch.no_grad():
                    worker.model.get_parameter("bias").add_(1)

    trainer(callbacks=[Writes()], policy="exact").fit()


@example
def collective_timeout() -> None:
    first, _ = flowdp.local_groups(["cpu", "cpu"], timeout=0.05)
    first.all_reduce(torch.ones(2))


@example
def collective_aborted() -> None:
    first, second = flowdp.local_groups(["cpu", "cpu"])
    second.abort("the loss of rank 1 raised ValueError")
    first.all_reduce(torch.ones(2))


@example
def stall_error() -> None:
    lock = threading.Lock()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if is_at(2):
            with lock:
                pass
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    with lock:
        trainer(loss=loss, failures=flowdp.FailureOptions(stall_timeout=0.3)).fit()


@example
def checkpoint_torn() -> None:
    trainer(checkpoint="runs/a", epochs=1).fit()
    trainer(checkpoint="runs/a", resume=True).fit()
    newest = max(Path("runs/a").iterdir())
    newest.write_bytes(newest.read_bytes()[:1000])
    trainer(checkpoint="runs/a", resume=True, epochs=3).fit()


@example
def checkpoint_error() -> None:
    trainer(checkpoint="runs/a").fit()
    trainer(checkpoint="runs/a", resume=True, model=nn.Linear(4, 1, bias=False), epochs=3).fit()


@example
def checkpoint_other_order() -> None:
    samples = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    draw = torch.Generator().manual_seed(0)
    sampler = torch.utils.data.SubsetRandomSampler(range(64), draw)
    loader = torch.utils.data.DataLoader(samples, 8, sampler=sampler)
    given = {"policy": "cadence", "dataset": loader, "per_device_batch_size": None, "checkpoint": "runs/a"}
    trainer(max_steps=4, **given).fit()
    trainer(resume=True, **given).fit()


@example
def checkpoint_not_plain() -> None:
    class Timed(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "since": object()}

    trainer(optimizer=lambda params: Timed(params, lr=0.1), checkpoint="runs/a", epochs=1).fit()


@example
def checkpoint_disk_full() -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch("os.fsync", side_effect=full):
        run = trainer(checkpoint="runs/a", epochs=1).start()
        run.join()
    print(run.status())


@example
def late_parameter() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "scale"):
                self.scale = nn.Parameter(torch.ones(1))
            return super().forward(x) * self.scale

    trainer(model=Scaled(4, 1), devices=1).fit()


@example
def state_error() -> None:
    class Cached(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 5:
                self.register_buffer("table", torch.ones(2))
            return super().forward(x)

    trainer(model=Cached(4, 1)).fit()


@example
def every_replica_bad() -> None:
    written = threading.Event()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        worker = flowdp.current_worker()
        is_bad = worker is not None and worker.epoch == 1 and written.wait()
        return nn.functional.mse_loss(model(batch[0]), batch[1]) * (float("nan") if is_bad else 1)

    folder = {"checkpoint": "runs/a", "callbacks": [flowdp.OnCheckpoint(lambda _: written.set())]}
    trainer(loss=loss, devices=["cpu"], **folder).fit()


@example
def another_result() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(13, 6), nn.Linear(6, 13)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.head(self.embed(input_ids))
            # The mean over the labels other than -100, whose number differs between devices.
            return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}

    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(0, 13, (6, 8))
    labels = ids.masked_fill(torch.arange(8) >= torch.tensor([8, 7, 6, 5, 3, 2])[:, None], -100)
    with flowdp.setup(model, optimizer, devices=["cpu", "cpu"], cadence=False, progress=False) as dp:
        dp(ids, labels=labels)


@example
def quarantine() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1]) * (float("nan") if is_at(2) else 1)

    trainer(loss=loss).fit()


@example
def callback() -> None:
    class Board(flowdp.Callback):
        def on_epoch_end(self, metrics: flowdp.EpochMetrics) -> None:
            raise ConnectionError("the board does not answer")

    run = trainer(callbacks=[Board()]).start()
    run.join()
    print(run.status())
    print(*run.status().problems, sep="\n")


@example
def left_behind() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if is_at(2):
            raise ValueError("target 11 is out of bounds")
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    run = trainer(loss=loss, failures=flowdp.FailureOptions(on_failure="continue")).start()
    run.join()
    print(run.status())


@example
def protocol_error() -> None:
    run = trainer().start()
    with run.paused():
        run._engine._requests.inbox.post(Averaged(0, 0.0, ()))  # not requested here
    run.join()


@contextlib.contextmanager
def printed_by_threads(ended: threading.Event) -> Iterator[None]:
    """Set the event when a thread's unhandled exception has been printed."""
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs, /) -> None:
        name = "" if args.thread is None else args.thread.name
        print(f"Exception in thread {name}:")
        print("".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)))
        ended.set()

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


# ---------------------------------------------------------------- outputs
def output(name: str) -> str:
    """Output of an example: its own prints, the log without any set-up, and its error."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    handler.setLevel(logging.WARNING)
    handler.addFilter(lambda record: "other programs want the cores" not in record.getMessage())
    log = logging.getLogger("flowdp")
    is_loud, log.propagate = log.propagate, False
    log.addHandler(handler)
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        try:
            os.chdir(folder)
            with contextlib.redirect_stdout(said):
                EXAMPLES[name]()
        except flowdp.FlowdpError as error:
            own = error.__traceback__ and error.__traceback__.tb_next
            traced = traceback.format_exception(type(error), error, own)
            said.write("".join(traced if name in TRACED else traceback.format_exception_only(error)))
        finally:
            for thread in threading.enumerate():
                if thread.name.startswith("flowdp-"):
                    thread.join(HANG_S)
            os.chdir(here)
            log.removeHandler(handler)
            log.propagate = is_loud
    return shortened(said.getvalue())


def shortened(text: str) -> str:
    """The text without other frames, events and column markers, and with long lines broken."""
    kept: list[str] = []
    is_own = True
    for line in text.splitlines():
        if FRAME.match(line):
            is_own = __file__ in line
            line = line.replace(__file__, "train.py")
        elif not line.startswith("    "):
            is_own = True
        elif not line.strip(" ^~"):
            continue
        if is_own:
            kept += textwrap.wrap(line, WIDTH, subsequent_indent="    ", break_long_words=False) or [""]
        elif kept and kept[-1] != "  ...":
            kept.append("  ...")
    return "\n".join(kept).strip() + "\n"


# ---------------------------------------------------------------- the page
def named(page: str) -> dict[str, str]:
    """The blocks of output on a page, by name."""
    return dict(BLOCK.findall(page))


def missing(page: str) -> list[str]:
    """Fences on a page that open an output without a name."""
    opening = FENCE.findall(BLOCK.sub("", page))[::2]
    return [fence for fence in opening if fence not in ("```python", "```bash")]


def same(one: str, other: str) -> bool:
    """Whether two outputs differ only in numbers and line breaks."""
    return _words(one) == _words(other)


def _words(text: str) -> list[str]:
    return re.sub(r"\d[\d.,]*", "0", text).split()


def rewritten(page: str, outputs: dict[str, str]) -> str:
    """The page with these outputs, where it differs from them."""

    def block(match: re.Match[str]) -> str:
        name, shown = match.groups()
        if same(shown, outputs.get(name, shown)):
            return match[0]
        return f"<!-- output: {name} -->\n```text\n{outputs[name]}```\n"

    return BLOCK.sub(block, page)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        before = PAGE.read_text(encoding="utf-8")
        names = named(before)
        PAGE.write_text(rewritten(before, {name: output(name) for name in names}), encoding="utf-8")
    else:
        for name in sys.argv[1:] or EXAMPLES:
            print(f"== {name}\n{output(name)}")
