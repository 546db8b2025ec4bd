"""Real processes of one job that train one model, each with devices and batches of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from time import monotonic
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from flowdp.data_parallel.machine_sum import TIMEOUT_S, check_machines
from flowdp.errors import FlowdpError, OptionError
from flowdp.options import MachineOptions
from tests.torch_world import in_processes

STEPS, ACCUMULATION = 10, 2
SIZES = {1: [24], 2: [17, 7]}
"""Samples of each machine's batch."""

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this torch has no gloo",
)


def network(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3)).double()


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(4)
    for _ in range(STEPS * ACCUMULATION):
        x = torch.randn(24, 5, generator=draw, dtype=torch.float64)
        yield x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long()


def part_of(batch: tuple[Tensor, Tensor], rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    sizes = SIZES[ranks]
    rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    return batch[0][rows], batch[1][rows]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def state_of(model: nn.Module) -> dict[str, list[Any]]:
    return {name: value.tolist() for name, value in model.state_dict().items()}


def train(
    call: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int = 0,
    ranks: int = 1,
    no_sync: Callable[[], Any] = nullcontext,
) -> dict[str, list[Any]]:
    """A loop with accumulation and clipping, as on one device and as on several machines."""
    for number, batch in enumerate(batches(), 1):
        x, y = part_of(batch, rank, ranks)
        is_last = number % ACCUMULATION == 0
        with nullcontext() if is_last else no_sync():
            (F.cross_entropy(call(x), y) / ACCUMULATION).backward()
        if is_last:
            nn.utils.clip_grad_norm_(call.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return state_of(call)


def windows(dp: flowdp.DataParallel, rank: int, ranks: int) -> dict[str, list[Any]]:
    """The same by `epoch`, `forward_batch` and `step`."""
    for number, window in enumerate(dp.epoch([part_of(batch, rank, ranks) for batch in batches()]), 1):
        is_last = number % ACCUMULATION == 0
        with nullcontext() if is_last else dp.no_sync():
            dp.forward_batch(window)
        if is_last:
            dp.step()
    return state_of(dp)


def loops(rank: int, ranks: int) -> list[dict[str, list[Any]]]:
    """Final states of the loops on one machine of several."""
    states = []
    for kind in ("every backward", "no_sync", "windows"):
        model = network(seed=3 + rank)  # machine 0's count
        optimizer = adamw(model)
        with flowdp.setup(
            model,
            optimizer,
            devices=["cpu", "cpu"],
            cadence=True,  # left out: windows go by the speed of one machine's devices
            loss_fn=(lambda c: F.cross_entropy(c.output, c.batch[1]) / ACCUMULATION)
            if kind == "windows"
            else None,
            max_grad_norm=0.5,
            progress=False,
        ) as dp:
            if kind == "windows":
                states.append(windows(dp, rank, ranks))
            else:
                states.append(
                    train(dp, optimizer, rank, ranks, dp.no_sync if kind == "no_sync" else nullcontext)
                )
            assert dp.training_step == STEPS
    return states


def test_several_machines_train_as_one_device_does(played: list[dict[str, Any]]) -> None:
    plain = network()
    wanted = train(plain, adamw(plain))
    found = [machine["loops"] for machine in played]
    for states in found:
        assert states == found[0]  # to the bit
    for state in found[0]:
        for name, value in wanted.items():
            torch.testing.assert_close(torch.tensor(state[name]), torch.tensor(value), rtol=0, atol=1e-11)


# ---------------------------------------------------------------------- what a loop may do
class Two(nn.Module):
    """Two layers; the flag chooses which of them a call uses, and one is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.c = (nn.Linear(3, 1, bias=False).double() for _ in range(3))

    def forward(self, x: Tensor, flag: bool) -> Tensor:
        return self.a(x) if flag else self.b(x)


def rows(seed: int, count: int = 4, width: int = 3) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ready(
    model: nn.Module,
    devices: int,
    *,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    **options: Any,
) -> tuple[flowdp.DataParallel, torch.optim.Optimizer]:
    made = optimizer(model.parameters(), lr=0.1)
    return flowdp.setup(model, made, devices=["cpu"] * devices, progress=False, **options), made


def alone(model: nn.Module, _devices: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def square(context: flowdp.LossContext) -> Tensor:
    return context.output.square().mean()


def unused(rank: int, devices: int) -> list[Any]:
    """Gradients where each machine uses another layer, and none uses the third."""
    dp, _ = ready(Two(), devices)
    dp(rows(rank), flag=rank == 0).mean().backward()
    return [None if p.grad is None else p.grad.tolist() for p in dp.parameters()]


def adversaries(rank: int, devices: int) -> list[Any]:
    """A generator learns through a discriminator; a penalty of gradients alone has a step of its own.

    With 0 devices: by plain PyTorch, on one machine.
    """
    torch.manual_seed(1)
    maker, judge = (
        nn.Linear(3, 3).double(),
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(),
    )
    make = ready if devices else alone
    (g, of_g), (d, of_d) = make(maker, devices), make(judge, devices)
    part = slice(2 * rank, 2 * rank + 2) if devices else slice(None)
    for step in range(3):
        x, z = rows(step)[part], rows(step + 10)[part]
        (d(x).mean() - d(g(z).detach()).mean()).backward()
        of_d.step()
        of_d.zero_grad()
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(d(x).sum(), x, create_graph=True)
        slope.square().sum(1).mean().backward()
        of_d.step()
        of_d.zero_grad()
        d(g(z)).mean().backward()
        of_g.step()
        of_g.zero_grad()
        of_d.zero_grad()
    return [p.tolist() for p in (*g.parameters(), *d.parameters())]


def discarded(rank: int, devices: int) -> list[Any]:
    """Kept gradients that are dropped count no more, and the others count by their samples."""
    found = []
    for is_behind in (False, True):
        dp, optimizer = ready(nn.Linear(3, 1).double(), devices)
        with dp.no_sync():
            dp(rows(1, 30)).mean().backward()
            optimizer.zero_grad()
            loss = dp(rows(5 + rank, 2 + rank)).mean()
            if is_behind:
                dp(rows(1, 30)).mean().backward()
                loss = dp(rows(5 + rank, 2 + rank)).mean()
                optimizer.zero_grad()
            loss.backward()
        dp.clip_grad_norm_(1e9)
        found.append(dp.module.weight.grad.tolist())
    return found


def thawed(rank: int, devices: int) -> list[Any]:
    """A layer that is frozen at first has its gradient summed later."""
    model = stack()
    dp, optimizer = ready(model, devices)
    return thaw(dp, model, optimizer, rows(rank))


def stack() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).double()


def thaw(call: nn.Module, model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor) -> list[Any]:
    model[0].requires_grad_(False)
    call(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model[0].requires_grad_(True)
    call(x).mean().backward()
    optimizer.step()
    return [p.tolist() for p in model.parameters()]


def halves(rank: int, devices: int) -> list[Any]:
    """Gradients that travel in half their bytes, of a model whose parameters are of 16 bits themselves."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    model[1].to(torch.bfloat16)
    dp, _ = ready(model, devices, machines=MachineOptions(payload="bf16"), check=False)
    dp.call(
        lambda module, x: module[1](module[0](x).bfloat16()), rows(rank, width=64).float()
    ).mean().backward()
    return [p.grad.float().tolist() for p in dp.parameters()]


def scaled(rank: int, devices: int) -> list[Any]:
    """One machine's loss overflows once: no machine takes that step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    dp, _ = ready(nn.Linear(3, 1).double(), devices)
    for step in range(3):
        loss = dp(rows(rank + 2 * step)).mean()
        scaler.scale(loss * float("inf") if rank and step == 1 else loss).backward()
        dp.step(scaler)
    return [dp.training_step, scaler.get_scale(), *(p.tolist() for p in dp.parameters())]


def buffers(rank: int, devices: int) -> list[Any]:
    """Running statistics after two steps, broadcast and averaged, and a buffer that is never written to."""
    found = []
    for option in ("broadcast", "average"):
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
        model.register_buffer("still", torch.full((2,), 1.0 + rank))
        dp, optimizer = ready(model, devices, buffers=option)
        for step in range(2):
            dp(rows(rank + 2 * step, 4 + 2 * rank)).mean().backward()
            optimizer.step()
        found.append([one.tolist() for one in model.buffers()])
    return found


SCENES = [
    unused,
    adversaries,
    discarded,
    thawed,
    halves,
    scaled,
    buffers,
]


def scenes(rank: int) -> dict[str, Any]:
    """What one machine of two finds in all scenes: processes take long to start."""
    return {
        "loops": loops(rank, 2),
        **{f"{scene.__name__} {n}": scene(rank, n) for scene in SCENES for n in (1, 2)},
        "starts": starts(rank),
        "faults": faults(rank),
    }


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_processes(scenes, tmp_path_factory.mktemp("scenes"), 2)


def close(found: Any, wanted: Any, atol: float = 1e-12) -> None:
    torch.testing.assert_close(torch.tensor(found).double(), torch.tensor(wanted).double(), rtol=0, atol=atol)


@pytest.mark.parametrize("scene", [scene.__name__ for scene in SCENES])
def test_all_machines_have_the_same_bits(played: list[dict[str, Any]], scene: str) -> None:
    for devices in (1, 2):
        of_first, of_second = (one[f"{scene} {devices}"] for one in played)
        if scene == "buffers":  # one that no forward writes to is machine 0's from the start
            assert of_first[0][0] == [1.0, 1.0]
        assert of_first == of_second


@pytest.mark.parametrize("devices", [1, 2])
class TestLoops:
    def test_a_parameter_unused_on_one_machine_counts_as_zero(self, played: Any, devices: int) -> None:
        a, b, c = played[0][f"unused {devices}"]
        close(a, [(rows(0).mean(0) / 2).tolist()])
        close(b, [(rows(1).mean(0) / 2).tolist()])
        assert c is None

    def test_several_models_and_a_penalty_of_gradients(self, played: Any, devices: int) -> None:
        for found, wanted in zip(played[0][f"adversaries {devices}"], adversaries(0, 0), strict=True):
            close(found, wanted)

    def test_dropped_gradients_do_not_count(self, played: Any, devices: int) -> None:
        wanted = torch.cat([rows(5, 2), rows(6, 3)]).mean(0)
        for found in played[0][f"discarded {devices}"]:
            close(found, [wanted.tolist()])

    def test_a_thawed_layer_is_trained(self, played: Any, devices: int) -> None:
        model = stack()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wanted = thaw(model, model, optimizer, torch.cat([rows(0), rows(1)]))
        for found, one in zip(played[0][f"thawed {devices}"], wanted, strict=True):
            close(found, one)

    def test_a_payload_of_half_the_bytes(self, played: Any, devices: int) -> None:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
        model[1].to(torch.bfloat16)
        x = torch.cat([rows(0, width=64), rows(1, width=64)]).float()
        model[1](model[0](x).bfloat16()).mean().backward()
        for found, one in zip(played[0][f"halves {devices}"], model.parameters(), strict=True):
            assert one.grad is not None
            close(found, one.grad.float().tolist(), atol=0.02 * float(one.grad.abs().max()))

    def test_no_machine_steps_by_an_overflow(self, played: Any, devices: int) -> None:
        steps, scale, *_ = played[0][f"scaled {devices}"]
        assert (steps, scale) == (2, 4.0)


def test_buffers_are_machine_0s_or_the_mean(played: list[dict[str, Any]]) -> None:
    broadcast, average = played[0]["buffers 1"]
    means = []
    for option in (broadcast, average):
        _, mean, _, tracked = option
        assert tracked == 2
        means.append(torch.tensor(mean))
    of_machines = []
    for rank in (0, 1):
        norm = nn.BatchNorm1d(3).double()
        for step in range(2):
            norm(rows(rank + 2 * step, 4 + 2 * rank))
        assert norm.running_mean is not None
        of_machines.append(norm.running_mean)
    close(means[0].tolist(), of_machines[0].tolist())
    close(means[1].tolist(), (0.4 * of_machines[0] + 0.6 * of_machines[1]).tolist())


# ---------------------------------------------------------------------- errors
def said(work: Callable[[], None]) -> str:
    """The error that a machine raises, with its notes."""
    try:
        work()
    except (FlowdpError, OSError) as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return "nothing"


def other_shape(rank: int) -> None:
    ready(nn.Linear(3, 2 + rank), 2)


def sync_batch_norm(_rank: int) -> None:
    ready(nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))), 2)


def different_steps(rank: int) -> None:
    dp, optimizer = ready(network(), 2)
    for step in range(3):
        dp(rows(step, width=5)).sum().backward()
        if rank or step != 1:
            optimizer.step()


def gradients_by_hand(rank: int) -> None:
    dp, optimizer = ready(network(), 2)
    parameters = list(dp.parameters())
    gradients = torch.autograd.grad(dp(rows(rank, width=5)).sum(), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    dp(rows(rank, width=5)).sum().backward()


def evaluation_on_one(rank: int) -> None:
    """No error: machine 0 evaluates alone, in the middle of an epoch."""
    dp, _ = ready(network(), 2, loss_fn=square)
    for window in dp.epoch(list(rows(rank, 12, 5).split(4))):
        dp.forward_batch(window)
        dp.step()
        if rank == 0:
            with torch.no_grad():
                for other in dp.epoch(list(rows(9, 12, 5).split(4))):
                    dp.forward_batch(other)
            dp.predict([rows(9, width=5)])


def ended_early(rank: int) -> None:
    with ready(network(), 2, machines=MachineOptions(timeout=600))[0] as dp:
        for step in range(3 - rank):
            dp(rows(step, width=5)).sum().backward()
            dp.step()


APART = "the machines do not do the same: their parameters differ by up to"
FAULTS: dict[Callable[[int], None], str] = {
    other_shape: r"'weight' is float32 \(3, 3\) on machine 1 .* and float32 \(2, 3\) on machine 0",
    sync_batch_norm: "SyncBatchNorm takes the statistics of the devices of one machine",
    different_steps: APART,
    gradients_by_hand: APART,
    evaluation_on_one: "nothing",
}


def faults(rank: int) -> list[str]:
    answers = [said(lambda fault=fault: fault(rank)) for fault in FAULTS]  # type: ignore[misc]
    start = monotonic()
    return [*answers, said(lambda: ended_early(rank)), str(monotonic() - start)]


def test_machines_that_do_not_do_the_same_all_say_so(played: list[dict[str, Any]]) -> None:
    for rank, (*answers, early, took_s) in enumerate(machine["faults"] for machine in played):
        for (fault, text), answer in zip(FAULTS.items(), answers, strict=True):
            assert re.search(text, answer, re.DOTALL), (rank, fault.__name__, answer)
        if rank == 0:  # at once, and not when the time is over
            assert early.startswith("MachineLostError")
            assert "give each as many batches" in early
            assert float(took_s) < 300
        else:
            assert early == "nothing"


# ---------------------------------------------------------------------- the start
def starts(rank: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    first = [p.tolist() for p in model.parameters()]
    ready(model, 2, cadence=True)[0].close()  # batches are cut all the same
    alone = nn.Linear(3, 2)
    ready(alone, 2, machines=False)[0].close()
    if rank == 0:  # a model that is not trained needs no other machine
        flowdp.setup(nn.Linear(3, 2).requires_grad_(False), devices=["cpu"], progress=False).close()
    return {"mine": first, "theirs": [p.tolist() for p in model.parameters()], "alone": alone.weight.tolist()}


def test_all_begin_with_the_parameters_of_machine_0(played: list[dict[str, Any]]) -> None:
    found = [machine["starts"] for machine in played]
    assert found[0]["theirs"] == found[1]["theirs"] == found[0]["mine"]
    assert found[0]["mine"] != found[1]["mine"]
    assert found[0]["alone"] != found[1]["alone"]


def test_options() -> None:
    layer = nn.Linear(3, 2)
    assert check_machines(True, layer) == MachineOptions(timeout=TIMEOUT_S)
    assert check_machines(False, layer) is None
    given = MachineOptions(timeout=5, payload="bf16")
    assert check_machines(given, layer) == given
    for other in (MachineOptions(rounds=4), MachineOptions(overlap=False), MachineOptions(stream="part")):
        with pytest.raises(OptionError, match="rounds, overlap and stream are for a Trainer"):
            check_machines(other, layer)
    with pytest.raises(OptionError, match="machines must be True, False or MachineOptions"):
        flowdp.setup(layer, machines=2)  # type: ignore[arg-type]
    assert check_machines(True, layer.requires_grad_(False)) is None
