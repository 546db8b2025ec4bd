"""Real processes of one job find each other, and share values and sums."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from flowdp.errors import CollectiveError, MachineLostError, OptionError
from flowdp.network import machines as module
from flowdp.network.machines import Machines, backend_here, find_machines
from flowdp.trainer.team_options import find_team
from flowdp.trainer.trainer import Trainer
from tests.accelerators import pretend
from tests.limits import HANG_S
from tests.torch_world import in_processes


def calls(rank: int) -> dict[str, Any]:
    machines = find_machines(timeout_s=HANG_S)
    assert machines is not None
    values = torch.full((3,), float(rank + 1), dtype=torch.float64)
    counts = torch.tensor([rank, 5 - rank])
    machines.reduce([values, counts], ["sum", "max"])
    halves = torch.full((3,), 1.5 + rank, dtype=torch.bfloat16)
    machines.reduce([halves])
    mine = torch.tensor([rank + 10])
    machines.spread([mine])
    found = {
        "place": (machines.index, machines.count, machines.leads),
        "gathered": machines.gather({"rank": rank}),
        "shared": machines.share(f"of {rank}"),
        "spread": mine.tolist(),
        "sums": values.tolist(),
        "largest": counts.tolist(),
        "halves": halves.tolist(),
        "names": machines.names,
    }
    machines.close()
    machines.close()
    return found


def test_machines_share_values_and_sums(tmp_path: Path) -> None:
    found = in_processes(calls, tmp_path, 3)
    for rank, one in enumerate(found):
        assert one["place"] == (rank, 3, rank == 0)
        assert one["gathered"] == [{"rank": other} for other in range(3)]
        assert one["shared"] == "of 0"
        assert one["spread"] == [10]
        assert one["sums"] == [6.0] * 3
        assert one["largest"] == [2, 5]
        assert one["halves"] == [7.5] * 3
        assert one["names"] == found[0]["names"]
        assert one["names"][rank].startswith(f"machine {rank} (")


def alone(rank: int) -> bool:
    return not find_team(["cpu"], False)[1].is_spread


def test_a_process_may_train_by_itself_in_a_job(tmp_path: Path) -> None:
    assert in_processes(alone, tmp_path, 2) == [True, True]


def test_no_job_no_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert find_machines(timeout_s=1.0) is None
    monkeypatch.setenv("WORLD_SIZE", "2")  # of a scheduler: nothing says where the others are
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert find_machines(timeout_s=1.0) is None


def test_an_environment_that_is_wrong_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "WORLD_SIZE": "2",
        "RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "no port",
    }.items():
        monkeypatch.setitem(os.environ, name, value)
    with pytest.raises(OptionError, match=r"a job of 2 processes.*machines=False"):
        find_machines(timeout_s=1.0)


class OnlyHereError(Exception):
    """An error of one machine."""


def fails_alone(rank: int, folder: str, where: str) -> None:
    model, optimizer = torch.nn.Linear(2, 1), partial(torch.optim.SGD, lr=0.1)
    data = TensorDataset(torch.randn(64, 2), torch.randn(64, 1))
    more = {"devices": ["cpu"], "batch_size": 8, "epochs": 1, "progress": False}
    if rank == 1 and where == "arguments":
        more["seed"] = -1

    def build() -> torch.nn.Module:
        if rank == 1 and where == "start":
            raise OnlyHereError("no such disk")
        return model

    try:
        Trainer(build, optimizer, torch.nn.MSELoss(), dataset=data, **more).fit()
        text = "no error"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    (Path(folder) / str(rank)).write_text(text)
    # As a script that ends by its error; the others are not to wait for more.
    os._exit(1)


@pytest.mark.parametrize(
    ("where", "named"), [("arguments", "OptionError: seed"), ("start", "OnlyHereError: no such disk")]
)
def test_the_error_of_one_machine_before_a_run_is_named_on_the_others(
    tmp_path: Path, where: str, named: str
) -> None:
    with pytest.raises(AssertionError, match="see what the processes wrote"):
        in_processes(fails_alone, tmp_path, 2, str(tmp_path), where)
    assert (tmp_path / "1").read_text().startswith(named)
    text = (tmp_path / "0").read_text()
    assert text.startswith("CollectiveError: ")
    assert re.search(rf"on machine 0 \(.*\): machine 1 \(.*\) failed: {named}", text), text


def trainer(rank: int, where: str, attempt: int) -> Trainer:
    """A Trainer that fails on machine 1 at the first attempt, in its arguments or at the start of its run."""

    def build() -> torch.nn.Module:
        if rank == 1 and where == "start" and not attempt:
            raise OnlyHereError("no such disk")
        torch.manual_seed(0)
        return torch.nn.Linear(2, 1)

    x = torch.randn(64, 2, generator=torch.Generator().manual_seed(1))
    return Trainer(
        build,
        partial(torch.optim.SGD, lr=0.1),
        torch.nn.MSELoss(),
        dataset=TensorDataset(x, x.sum(1, keepdim=True)),
        devices=["cpu"],
        batch_size=8,
        epochs=-1 if rank == 1 and where == "arguments" and not attempt else 1,
        progress=False,
    )


def tries_again(rank: int, where: str) -> dict[str, Any]:
    """A machine whose first try fails on machine 1, which lives on, and whose second try does not."""
    module.START_S = HANG_S  # none waits for it
    text, at = "", 0.0
    try:
        trainer(rank, where, 0).fit()
    except Exception as error:
        text, at = f"{type(error).__name__}: {error}", time.monotonic()
    # Nobody goes on before all have heard of it: machine 1 would otherwise come, and end the wait.
    dist.barrier()
    state = trainer(rank, where, 1).fit()
    return {"text": text, "at": at, "steps": state.global_step, "loss": state.history[-1].loss}


@pytest.mark.parametrize(("size", "where"), [(2, "arguments"), (2, "start"), (4, "start")])
def test_machines_hear_of_one_that_fails_and_lives_on_and_try_again(
    tmp_path: Path, size: int, where: str
) -> None:
    found = in_processes(tries_again, tmp_path, size, where)
    named = "OnlyHereError: no such disk" if where == "start" else "OptionError: epochs"
    assert found[1]["text"].startswith(named)
    for rank, one in enumerate(found):
        if rank != 1:
            assert one["text"].startswith("CollectiveError: ")
            assert re.search(rf"machine 1 \(.*\) failed: {named}", one["text"]), one["text"]
            assert one["at"] - found[1]["at"] < HANG_S / 2  # long before a wait for it is over
        assert (one["steps"], one["loss"]) == (8, found[0]["loss"])


def starts_again(rank: int) -> list[Any]:
    """A Trainer whose first start fails on machine 1, and that is started again twice."""
    module.START_S = HANG_S
    fails = [True]

    def build() -> torch.nn.Module:
        if rank == 1 and fails:
            raise OnlyHereError("no such disk")
        torch.manual_seed(0)
        return torch.nn.Linear(2, 1)

    x = torch.randn(64, 2, generator=torch.Generator().manual_seed(1))
    again = Trainer(
        build,
        partial(torch.optim.SGD, lr=0.1),
        torch.nn.MSELoss(),
        dataset=TensorDataset(x, x.sum(1, keepdim=True)),
        devices=["cpu"],
        batch_size=8,
        epochs=1,
        progress=False,
    )
    found: list[Any] = []
    for _ in range(3):
        try:
            found.append(again.fit().history[-1].loss)
        except Exception as error:
            found.append(type(error).__name__)
            fails.clear()
    return found


def test_a_trainer_whose_start_has_failed_is_started_again(tmp_path: Path) -> None:
    first, second = in_processes(starts_again, tmp_path, 2)
    assert (first[0], second[0]) == ("CollectiveError", "OnlyHereError")
    assert first[1:] == second[1:]
    assert first[1] == pytest.approx(first[2], rel=1e-5)  # the shares follow speed
    assert isinstance(first[1], float)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def uses_many(rank: int) -> tuple[int, int, int]:
    """Count open files before and after many Trainers, whose runs, or who themselves, are kept or dropped."""
    again = trainer(rank, "", 1)
    again.fit()
    kept: list[Any] = []
    before = open_files()
    for _ in range(4):
        again.fit()
        kept.append(trainer(rank, "", 1).start())
        kept[-1].join()
    dist.barrier()
    after = open_files()
    for _ in range(4):
        trainer(rank, "", 1)  # never started: closed by the next one
    return before, after, open_files()


@pytest.mark.linux
def test_groups_are_given_back_with_their_run_or_trainer(tmp_path: Path) -> None:
    for before, after, last in in_processes(uses_many, tmp_path, 2):
        assert after == before
        assert last <= before + 2 * SOCKETS


SOCKETS = 10
"""More files than one group of two machines has open."""


def test_a_closed_group_is_not_mistaken_for_the_default_one(tmp_path: Path) -> None:
    assert all(in_processes(calls_closed, tmp_path, 2))


def calls_closed(rank: int) -> bool:
    machines = find_machines(timeout_s=HANG_S)
    assert machines is not None
    machines.close()
    with pytest.raises(CollectiveError, match="has closed its connection"):
        machines.gather(rank)
    with pytest.raises(CollectiveError, match="has closed its connection"):
        machines.reduce([torch.zeros(1)])
    return True


def gives_up(rank: int) -> str:
    found = find_machines(timeout_s=HANG_S)
    assert found is not None
    if rank:
        return ""
    wait = found.begin([torch.ones(3)])  # the other machine is lost to it
    found.give_up()
    found.close()
    with pytest.raises(MachineLostError, match="another machine was lost before"):
        found.begin([torch.ones(3)])
    begun_s = monotonic()
    with pytest.raises(MachineLostError, match="one was lost, or did not come in time"):
        wait()
    assert monotonic() - begun_s < HANG_S / 2
    return "given up"


def test_a_sum_without_the_others_is_given_up(tmp_path: Path) -> None:
    # Its group is not freed either: that would wait as long, here and at the end of the process.
    assert in_processes(gives_up, tmp_path, 2) == ["given up", ""]


def belongs(rank: int, folder: str) -> list[str]:
    _, alone = find_team(["cpu"], False)
    _, first = find_team(["cpu"], True)
    first.check()
    dist.destroy_process_group()
    alone.check()
    said = [_refusal(first.check)]
    _, before = find_team(["cpu"], True)
    before.check()
    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=2)
    alone.check()
    assert first.machines is not None
    machines = first.machines
    return [*said, _refusal(before.check), _refusal(first.check), _refusal(lambda: machines.gather(3))]


def _refusal(call: Callable[[], object]) -> str:
    with pytest.raises(OptionError) as raised:
        call()
    return str(raised.value)


def test_a_team_of_another_process_group_is_refused(tmp_path: Path) -> None:
    for said in in_processes(belongs, tmp_path, 2, str(tmp_path)):
        assert len(said) == 4
        assert all("belongs to another process group" in one for one in said)


def test_a_store_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module._ask(lambda: "told", "") == "told"

    def is_gone() -> str:
        raise RuntimeError("connection closed")

    assert module._ask(is_gone, "none") == "none"
    monkeypatch.setattr(module, "STORE_S", 0.01)
    frozen = threading.Event()

    def answers_late() -> str:
        frozen.wait()
        return "late"

    assert module._ask(answers_late, "none") == "none"
    frozen.set()


class Looking(Machines):
    """Machines, of which one lets the other into a sum when it has looked for a lost one several times."""

    pipe: Path
    looks = 0

    @property
    def _is_given_up(self) -> bool:
        self.looks += 1
        if self.looks == 5:
            self.pipe.open("wb").close()
        return False

    @_is_given_up.setter
    def _is_given_up(self, value: bool) -> None:
        assert not value


def waits_long(rank: int, folder: str) -> list[float]:
    module.LOOK_S = 0.01
    machines = Looking(60.0)
    machines.pipe = Path(folder, "pipe")
    if rank:
        machines.pipe.open("rb").close()
    tensor = torch.full((1000,), 1.0 + rank)
    machines.reduce([tensor])
    machines.close()
    assert rank or machines.looks >= 5
    return [float(tensor.min()), float(tensor.max())]


@pytest.mark.posix
def test_a_sum_may_take_longer_than_the_looks_for_a_lost_machine(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert in_processes(waits_long, tmp_path, 2, str(tmp_path)) == [[3.0, 3.0]] * 2


@pytest.mark.parametrize(
    ("kind", "backend"),
    [("cuda", "cpu:gloo,cuda:nccl"), ("xpu", "cpu:gloo,xpu:xccl"), ("mps", "gloo"), (None, "gloo")],
)
def test_tensors_on_an_accelerator_have_a_backend_of_their_own(
    kind: str | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind is None:
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)
    else:
        module = pretend(monkeypatch, kind)
    assert backend_here() == backend
    if kind is not None:  # torch is built for it, and there is no device
        monkeypatch.setattr(module, "is_available", lambda: False)
        assert backend_here() == "gloo"
