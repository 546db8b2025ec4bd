"""Tests of captured calls, with fake streams and graphs: the bits of the plain loop."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowdp import FlowdpError, OptionError
from flowdp.device.cuda_graphs import GraphPool
from flowdp.device.streams import HostLane, StreamLane
from flowdp.graphs import call_graphs
from flowdp.graphs.call_graphs import CallGraphs
from flowdp.graphs.captured_call import MOST_AHEAD, CapturedCall, captured_call
from flowdp.options import CaptureOptions
from flowdp.policy.worth import WATCHED, LaunchWatch
from tests.fakes import FakeCuda, FakeEvent, hide_modes

CPU = torch.device("cpu")
GENERATOR = torch.Generator().manual_seed(1)
X, Y = torch.randn(64, 6, generator=GENERATOR), torch.randint(3, (64,), generator=GENERATOR)
CALLS = 24

Call = Callable[..., Any]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A fake card, with a stream of the user's."""
    cuda = FakeCuda()
    hide_modes(monkeypatch.setattr)
    with cuda.stream(cuda.Stream()):
        yield cuda
    assert cuda.races == []
    captures = cuda.captures
    assert not captures.current
    assert not captures.diverted


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, "flowdp")
    return lambda: [text for text in caplog.messages if text.startswith("capture")]


def captured(module: nn.Module, cuda: FakeCuda, **options: Any) -> CapturedCall:
    return CapturedCall(module, StreamLane(CPU, cuda), options=CaptureOptions(**options))


def called(call: CapturedCall) -> Call:
    return lambda *args, **kwargs: call(args, kwargs)


def batch(number: int, samples: int = 8) -> tuple[Tensor, Tensor]:
    start = number * samples % 56
    # Copies, for the bits of a product may depend on how its operands are aligned.
    return X[start : start + samples].clone(), Y[start : start + samples].clone()


def model(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3))


def plain_step(call: Call, module: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> Any:
    x, y = batch(number)
    loss = F.cross_entropy(call(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


Step = Callable[[Call, Any, torch.optim.Optimizer, int], Any]


def train(
    cuda: FakeCuda | None, make: Callable[[], nn.Module], step: Step = plain_step, calls: int = CALLS
) -> Any:
    """Results of a loop: losses, state, generator; and the captured call, if there is one."""
    torch.manual_seed(0)
    module = make()
    optimizer = torch.optim.AdamW([one for one in module.parameters() if one.requires_grad], 2**-5)
    one = None if cuda is None else captured(module, cuda)
    call = module if one is None else called(one)
    losses = [step(call, module, optimizer, number) for number in range(calls)]
    return losses, module.state_dict(), torch.get_rng_state(), one


def assert_same(
    cuda: FakeCuda, make: Callable[[], nn.Module], step: Step = plain_step, *, replays: int | None = None
) -> CapturedCall:
    """A loop with captured calls has the bits of the plain one, and replays so many graphs at least."""
    losses, state, random_state, _ = train(None, make, step)
    mine, my_state, my_random, call = train(cuda, make, step)
    for number, (one, other) in enumerate(zip(losses, mine, strict=True)):
        assert torch.equal(one, other), f"step {number}: {other} instead of {one}"
    for name, value in state.items():
        assert torch.equal(value, my_state[name]), name
    assert torch.equal(random_state, my_random)
    assert call.ended is None
    # Three calls are eager, and five compared: by forward and backward of the graphs, too.
    assert cuda.captures.replays >= (2 * (CALLS - 2) if replays is None else replays)
    return call


def test_a_call_is_two_launches_of_graphs(cuda: FakeCuda, told: Any) -> None:
    call = assert_same(cuda, model)
    assert call.has_graphs
    assert cuda.captures.replays == 2 * (CALLS - 2)
    assert told() == []


def test_dropout_draws_the_same_numbers(cuda: FakeCuda) -> None:
    assert_same(cuda, lambda: model(0.5))


def test_outputs_and_gradients_lie_in_memory_of_their_own(cuda: FakeCuda) -> None:
    torch.manual_seed(0)
    module = model()
    twin = model()
    twin.load_state_dict(module.state_dict())
    call = called(captured(module, cuda))
    kept: list[list[Tensor]] = []
    for number in range(12):
        x, y = batch(number)
        pair = []
        for own, parameters in ((call, module), (twin, twin)):
            output = own(x)
            gradients = torch.autograd.grad(F.cross_entropy(output, y), list(parameters.parameters()))
            pair.append([output, *gradients])
        kept.append(pair[0])
        kept.append(pair[1])
    for mine, theirs in zip(kept[::2], kept[1::2], strict=True):
        assert all(torch.equal(*one) for one in zip(mine, theirs, strict=True))


# ---------------------------------------------------------------- loops as people write them
def scaled(call: Call, module: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**number)
    x, y = batch(number)
    loss = F.cross_entropy(call(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=number % 2 == 0)
    return loss.detach()


def accumulated(call: Call, module: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
    x, y = batch(number)
    loss = F.cross_entropy(call(x), y) / 3
    loss.backward()
    if number % 3 == 2:
        nn.utils.clip_grad_value_(module.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return loss.detach()


def several(call: Call, module: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
    x, y = batch(number)
    loss = F.cross_entropy(call(x), y) + call(x.flip(0)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def retained(call: Call, module: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
    x, y = batch(number)
    output = call(x)
    loss, other = F.cross_entropy(output, y), output.square().mean()
    loss.backward(retain_graph=True)
    other.backward(retain_graph=number % 2 == 0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def frozen_in_between(call: Call, module: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
    module[0].requires_grad_(number < 8)
    return plain_step(call, module, optimizer, number)


def evaluated(call: Call, module: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
    loss = plain_step(call, module, optimizer, number)
    module.eval()
    with torch.no_grad():
        loss = loss + call(batch(number + 1)[0]).mean()
    module.train()
    with torch.no_grad():
        return loss + call(batch(number + 2)[0]).mean()


def in_place(call: Call, module: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
    x, y = batch(number)
    output = call(x)
    loss = F.cross_entropy(output.mul_(2.0), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def cast(call: Call, module: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
    x, y = batch(number)
    with torch.autocast("cpu", torch.bfloat16):
        output = call(x)
        assert output.dtype == torch.bfloat16
        loss = F.cross_entropy(output.float(), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize(
    ("step", "replays"),
    [
        (scaled, 44),
        (accumulated, 44),
        (several, 50),
        (retained, 36),
        (frozen_in_between, 36),
        (evaluated, 44),
        (in_place, 44),
        (cast, 44),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_loops_as_people_write_them(cuda: FakeCuda, step: Step, replays: int) -> None:
    assert_same(cuda, model, step, replays=replays)


def test_hooks_on_parameters_are_called(cuda: FakeCuda) -> None:
    def make() -> nn.Module:
        module = model()
        module[0].weight.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[index, union-attr]
        module[4].bias.register_post_accumulate_grad_hook(twice)  # type: ignore[index, union-attr]
        return module

    def twice(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2)

    assert_same(cuda, make)


# ---------------------------------------------------------------- models
@dataclass
class Record:
    loss: Tensor
    scores: Tensor
    name: str


class Heads(nn.Module):
    """Returns several tensors, in a container of a kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.trunk = nn.Linear(6, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(2))
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Any:
        hidden = torch.tanh(self.trunk(x)) * scale
        one, other = (head(hidden) for head in self.heads)
        loss = F.cross_entropy(self.frozen(one), y)
        if self.kind == "dict":
            return {"loss": loss, "scores": other, "best": one.argmax(1), "none": None}
        if self.kind == "record":
            return Record(loss, other, "record")
        return loss, (other, other), {"hidden": hidden.detach()}


def of_heads(both: Callable[[int], bool]) -> Step:
    def step(call: Call, module: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
        x, y = batch(number)
        output = call(x, y, scale=0.5)
        if isinstance(output, dict):
            loss, other = output["loss"], output["scores"]
            assert output["none"] is None
            assert output["best"].dtype == torch.int64
            assert not output["best"].requires_grad
        elif isinstance(output, Record):
            loss, other = output.loss, output.scores
            assert output.name == "record"
        else:
            loss, (other, same), rest = output
            assert other is same
            assert not rest["hidden"].requires_grad
        if both(number):
            loss = loss + other.square().mean()
        loss.backward()
        grads = [None if one.grad is None else one.grad.clone() for one in module.parameters()]
        flags = torch.tensor([one is not None for one in grads])
        optimizer.step()
        optimizer.zero_grad()
        return torch.cat([loss.detach().reshape(1), flags.float()])

    return step


@pytest.mark.parametrize(
    ("kind", "both"),
    [
        ("dict", lambda _: True),
        ("record", lambda _: False),
        ("tuple", lambda number: number > 9),
        ("dict", lambda number: number % 4 != 3),
    ],
    ids=["both", "one", "later both", "now and then"],
)
def test_models_of_several_outputs(cuda: FakeCuda, kind: str, both: Callable[[int], bool]) -> None:
    assert_same(cuda, lambda: Heads(kind), of_heads(both), replays=36)


def test_a_part_without_trained_parameters_is_never_busy(cuda: FakeCuda) -> None:
    module, other = (nn.BatchNorm1d(6).requires_grad_(False) for _ in range(2))
    call = called(captured(module, cuda))
    for number in range(20):
        x, _ = batch(number)
        assert torch.equal(call(x), other(x))
    assert torch.equal(module.running_mean, other.running_mean)  # type: ignore[arg-type]
    assert cuda.captures.replays == 18


def test_plain_arguments_are_part_of_the_form(cuda: FakeCuda) -> None:
    class Sized(nn.Linear):
        def forward(self, x: Tensor, size: tuple[int, str], *, scale: float = 1.0) -> Tensor:
            return super().forward(x) * size[0] * scale

    call = captured(Sized(6, 3), cuda)
    for number in range(20):
        x, _ = batch(number)
        size, scale = (1 + number % 2, "size"), 0.5
        assert torch.equal(called(call)(x, size, scale=scale), call._module(x, size, scale=scale))
    assert len(call.forms) == 2
    assert cuda.captures.replays == 24


def test_a_gan(cuda: FakeCuda) -> None:
    def loop(cuda: FakeCuda | None) -> list[Tensor]:
        torch.manual_seed(0)
        models = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(), nn.Linear(8, 1))
        optimizers = [torch.optim.Adam(one.parameters(), 2**-6) for one in models]
        make, judge = (one if cuda is None else called(captured(one, cuda)) for one in models)
        losses = []
        for number in range(CALLS):
            fake = make(torch.randn(8, 4))
            real = judge(batch(number)[0])
            loss = F.softplus(-real).mean() + F.softplus(judge(fake.detach())).mean()
            optimizers[1].zero_grad()
            loss.backward()
            optimizers[1].step()
            cheat = F.softplus(-judge(fake)).mean()
            optimizers[0].zero_grad()
            cheat.backward()
            optimizers[0].step()
            losses += [loss.detach(), cheat.detach()]
        return losses

    assert all(torch.equal(*pair) for pair in zip(loop(None), loop(cuda), strict=True))
    assert cuda.captures.replays >= 4 * (CALLS - 4)


def test_tied_weights_and_a_recurrent_layer(cuda: FakeCuda) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
            self.other.weight = self.one.weight
            self.cell = nn.GRU(6, 5)
            self.head = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            outputs, _ = self.cell(self.other(self.one(x)).unsqueeze(0))
            return self.head(outputs[-1])  # type: ignore[no-any-return]

    call = assert_same(cuda, Recurrent)
    cell = call._module.cell
    assert all(a is b for a, b in zip(cell._flat_weights, cell.all_weights[0], strict=True))  # type: ignore[union-attr, arg-type, index]


# ---------------------------------------------------------------- graphs that are busy
def prepared(cuda: FakeCuda, module: nn.Module | None = None, calls: int = 5, **options: Any) -> CapturedCall:
    """A captured call that has run as graphs."""
    torch.manual_seed(0)
    call = captured(module or model(), cuda, **options)
    for number in range(calls):
        called(call)(batch(number)[0]).square().mean().backward()
    assert call.has_graphs, call.ended
    return call


def launches(cuda: FakeCuda, work: Callable[[], Any]) -> int:
    before = cuda.captures.replays
    work()
    return cuda.captures.replays - before


def is_captured(output: Tensor) -> bool:
    return type(output.grad_fn).__name__ == "_CallNodeBackward"


def test_a_graph_is_busy_until_its_backward_has_run_or_cannot_run(cuda: FakeCuda) -> None:
    call = prepared(cuda, calls=10)  # the next comparison is far
    one, x = called(call), batch(0)[0]
    first = one(x)
    assert is_captured(first)
    assert not is_captured(one(x))
    first.sum().backward(retain_graph=True)
    assert not is_captured(one(x))
    first.sum().backward()
    second = one(x)
    assert is_captured(second)
    assert not is_captured(one(x))
    del second
    assert is_captured(one(x))


@pytest.mark.parametrize("make", [model, lambda: nn.Linear(6, 3)], ids=["deep", "reads no parameter"])
def test_a_second_backward_is_torchs_error(cuda: FakeCuda, make: Callable[[], nn.Module]) -> None:
    call = prepared(cuda, make(), calls=7)
    output = called(call)(batch(0)[0])
    loss = output.sum()
    assert is_captured(output)
    loss.backward(retain_graph=True)
    loss.backward()
    called(call)(batch(1)[0])
    with pytest.raises(RuntimeError, match=r"a second time through a captured call.*capture=False"):
        output.sum().backward()


def test_create_graph_is_an_error_with_a_remedy(cuda: FakeCuda) -> None:
    call = prepared(cuda, calls=7)
    loss = called(call)(batch(0)[0]).sum()
    with pytest.raises(FlowdpError, match="capture=False"):
        torch.autograd.grad(loss, list(call._module.parameters()), create_graph=True)


def test_a_loop_that_differentiates_twice_is_never_captured(cuda: FakeCuda, told: Any) -> None:
    def step(call: Call, module: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
        x, y = batch(number)
        loss = F.cross_entropy(call(x), y)
        gradients = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
        (loss + sum(one.square().sum() for one in gradients)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    plain = train(None, model, step)
    mine = train(cuda, model, step)
    assert all(torch.equal(*pair) for pair in zip(plain[0], mine[0], strict=True))
    assert cuda.captures.replays == 0
    assert "create_graph=True" in told()[0]


def test_a_call_on_another_stream_is_eager(cuda: FakeCuda) -> None:
    call = prepared(cuda)
    other = threading.Thread(target=lambda: called(call)(batch(0)[0]))  # of another stream
    assert launches(cuda, lambda: (other.start(), other.join())) == 0


# ---------------------------------------------------------------- recording
def test_no_node_that_ends_a_graph_is_used_from_outside(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that is alive keeps the nodes of the parameters, of the stream on which they were made."""
    own, seen = GraphPool.capture, []

    def capture(pool: GraphPool, work: Any) -> Any:
        def watched() -> None:
            work()
            seen.append(True)

        return own(pool, watched)

    monkeypatch.setattr(GraphPool, "capture", capture)
    torch.manual_seed(0)
    module = model()
    call = called(captured(module, cuda))
    kept = [call(batch(0)[0]).sum() for _ in range(2)]  # alive
    nodes = [torch.autograd.graph.get_gradient_edge(one).node for one in module.parameters()]
    ran: list[int] = []
    for node in nodes:
        node.register_prehook(lambda *_: ran.append(1))
    call(batch(0)[0]).sum()
    assert len(seen) == 2
    assert not ran
    assert kept


def test_recording_changes_nothing(cuda: FakeCuda) -> None:
    torch.manual_seed(0)
    module = model(0.5)
    parameters, before = list(module.parameters()), {k: v.clone() for k, v in module.state_dict().items()}
    versions = [one._version for one in parameters]
    generator = torch.get_rng_state()
    call = captured(module, cuda)
    graphs = CallGraphs(module, call._lane, *_flat(batch(0)[0]))
    graphs.record()
    assert [one._version for one in parameters] == versions
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(one.grad is None for one in parameters)


def _flat(*args: Any) -> Any:
    from flowdp.device.trees import flatten

    return flatten([args, {}])


def factor(how: str) -> float:
    """A number that no fingerprint sees."""
    return time.perf_counter() % 1 if how == "time" else 1.0


def test_weights_that_a_forward_writes_by_data_move_once_a_call(cuda: FakeCuda) -> None:
    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.slow = nn.Linear(6, 3), nn.Linear(6, 3).requires_grad_(False)

        def forward(self, x: Tensor) -> Any:
            self.slow.weight.data.mul_(0.9).add_(self.own.weight.data, alpha=0.1)
            return self.own(x) + self.slow(x)

    assert_same(cuda, Slow)


def test_backwards_of_different_outputs(cuda: FakeCuda) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor, self.critic = nn.Linear(6, 3), nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Any:
            return self.actor(x), self.critic(x)

    def step(call: Call, module: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
        outputs = call(batch(number)[0])
        for output in outputs:
            output.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return outputs[0].detach()

    assert_same(cuda, Both, step)


class Reading(nn.Module):
    """Reads or writes something that no graph can."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layer = nn.Linear(6, 3)
        self.state = [torch.zeros(3)]
        self.outside = [nn.Parameter(torch.ones(3))]
        self.count = 0

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        if self.how == "value" and y.sum().item() > 1e9:
            return 2 * y
        if self.how == "parameter":
            return y * self.outside[0]
        if self.how == "counter":
            self.count += 1
        if self.how == "object":
            return y, object()
        return y * factor(self.how)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("value", "may not read a value on the host"),
        ("parameter", "requires grad from elsewhere"),
        ("counter", "changes too often"),
        ("object", "returns a object"),
        ("time", "differs from an eager one: "),
    ],
)
def test_calls_that_stay_eager(cuda: FakeCuda, told: Any, how: str, why: str) -> None:
    call = captured(Reading(how), cuda)
    for number in range(12):
        output = called(call)(batch(number)[0].clone())
        (output[0] if isinstance(output, tuple) else output).square().mean().backward()
    assert call.ended is not None
    assert why in call.ended
    assert len(told()) == 1
    assert not cuda.captures.pools or how == "time"


class Unseen:
    """A place that guards do not look at."""

    __slots__ = ("scale",)


def test_a_difference_ends_it_and_the_eager_result_counts(cuda: FakeCuda, told: Any) -> None:
    unseen = Unseen()
    unseen.scale = 1.0

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * unseen.scale

    call = prepared(cuda, Scaled(6, 3), calls=6)
    unseen.scale = 2.0
    for number in range(8):
        x, _ = batch(number)
        output = called(call)(x)
        output.sum().backward()
        if call.ended is not None:
            assert torch.equal(output, call._module(x))
            break
    assert told()[-1].startswith(
        "capture: Scaled: calls go on eagerly, from the eager result: a captured call differs from an eager "
        "one: output differs by"
    )


def test_a_hook_on_a_layer_ends_it(cuda: FakeCuda) -> None:
    call = prepared(cuda)
    seen: list[int] = []
    call._module[0].register_forward_hook(lambda *_: seen.append(1))  # type: ignore[index]
    assert launches(cuda, lambda: [called(call)(batch(n)[0]).sum().backward() for n in range(4)]) == 0
    assert len(seen) == 4
    assert "has a hook" in str(call.ended)


def test_a_change_voids_the_graphs_and_a_backward_that_is_due_still_runs(cuda: FakeCuda) -> None:
    call = prepared(cuda, calls=7)
    module = call._module
    output = called(call)(batch(0)[0])
    assert is_captured(output)
    module[3].p = 0.25  # type: ignore[index]
    called(call)(batch(1, 6)[0])  # of another form, for that one's graphs are busy
    assert not call.has_graphs
    module.zero_grad()
    output.sum().backward()
    assert all(one.grad is not None for one in module.parameters())


def test_forms_have_graphs_of_their_own_and_may_take_turns(cuda: FakeCuda) -> None:
    def step(call: Call, module: Any, optimizer: torch.optim.Optimizer, number: int) -> Any:
        loss = torch.zeros(())
        for samples in (8, 6, 5):
            x, y = batch(number, samples)
            loss = loss + F.cross_entropy(call(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    call = assert_same(cuda, model, step, replays=100)
    assert len(call.forms) == 3


@pytest.mark.parametrize("how", ["requires grad", "an object", "a mode"])
def test_calls_that_no_graph_takes_are_eager(cuda: FakeCuda, how: str) -> None:
    class Taking(nn.Linear):
        def forward(self, x: Tensor, _more: object = None) -> Tensor:
            return super().forward(x)

    call = prepared(cuda, Taking(6, 3))
    x = batch(0)[0].clone().requires_grad_(how == "requires grad")
    more = object() if how == "an object" else None

    def work() -> None:
        if how == "a mode":
            with torch.autograd.graph.save_on_cpu():
                called(call)(x).sum().backward()
        else:
            called(call)(x, more).sum().backward() if more else called(call)(x).sum().backward()

    assert launches(cuda, work) == 0
    assert how != "requires grad" or x.grad is not None
    assert call.ended is None


def test_graphs_and_module_go_when_the_call_does(cuda: FakeCuda) -> None:
    call = prepared(cuda)
    pool = weakref.ref(call.forms[0].graph)  # type: ignore[arg-type]
    call.close()
    gc.collect()
    assert pool() is None
    assert launches(cuda, lambda: called(call)(batch(0)[0])) == 0


# ---------------------------------------------------------------- whether it pays


def test_a_device_with_calls_of_before_to_do_is_not_waiting(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, passed = LaunchWatch(), threading.Event()
    call = CapturedCall(model(), StreamLane(CPU, cuda), watch)
    monkeypatch.setattr(FakeEvent, "passed", passed)
    for number in range(MOST_AHEAD + 4):  # nothing waits
        called(call)(batch(number)[0])
    assert watch._seen == []
    passed.set()
    called(call)(batch(0)[0])
    assert len(watch._seen) == MOST_AHEAD
    assert [launch_ms > 0 for launch_ms, _ in watch._seen] == [True] + [False] * (MOST_AHEAD - 1)


@pytest.mark.parametrize("captured_ms", [0.5, 2.0])
def test_a_loop_that_graphs_make_slower_goes_on_without_them(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, told: Any, captured_ms: float
) -> None:
    now_s, module, watch = 0.0, model(), LaunchWatch()
    monkeypatch.setattr("flowdp.graphs.captured_call.perf_counter", lambda: now_s)
    monkeypatch.setattr(FakeEvent, "elapsed_time", lambda *_: 0.0)  # the device waits
    call = CapturedCall(module, StreamLane(CPU, cuda), watch)
    for number in range(3 * WATCHED):
        called(call)(batch(number)[0]).sum().backward()
        now_s += 1e-3 * (captured_ms if call.has_graphs else 1.0)
    assert (call.ended is None) is call.has_graphs is (captured_ms < 1.0)
    assert call.problem is None
    assert call._periods is None
    first, *others = told()
    assert "waits for launches" in first
    if captured_ms < 1.0:
        assert others == []
        return
    reason = "the loop takes 2 ms from one captured call to the next, and 1 ms without graphs"
    assert others == [f"capture: Sequential: calls run eagerly: {reason}"]
    before = cuda.captures.replays
    called(call)(batch(0)[0]).sum().backward()
    assert cuda.captures.replays == before


def test_compiled_functions_are_recorded_and_give_one_backward(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their backward may write over saved values."""
    monkeypatch.setattr(call_graphs, "uses_compile", lambda _: True)
    assert_same(cuda, model, several, replays=50)
    call = prepared(cuda, calls=10)
    output = called(call)(batch(0)[0])
    assert is_captured(output)
    output.sum().backward(retain_graph=True)
    with pytest.raises(FlowdpError, match="a second time through a captured call with compiled functions"):
        output.sum().backward()


def test_options() -> None:
    lane, host = StreamLane(CPU, FakeCuda()), HostLane(CPU)
    assert captured_call(model(), [lane], "auto", is_summed=False) is not None
    assert captured_call(model(), [lane], True, is_summed=False) is not None
    assert captured_call(model(), [lane, host], "auto", is_summed=False) is not None
    for lanes, option, is_summed in [
        ([lane], False, False),
        ([lane], "auto", True),
        ([host], "auto", False),
        ([host, lane], "auto", False),
    ]:
        assert captured_call(model(), lanes, option, is_summed=is_summed) is None
    with pytest.raises(OptionError, match="one CUDA device of one machine, and the devices are cpu"):
        captured_call(model(), [host], True, is_summed=False)
    with pytest.raises(OptionError, match="the devices are cpu, cpu; capture='auto'"):
        captured_call(model(), [lane, lane], True, is_summed=False)
    with pytest.raises(OptionError, match="over machines"):
        captured_call(model(), [lane], True, is_summed=True)
    with pytest.raises(OptionError, match="must be 'auto', True or False, not 'yes'"):
        captured_call(model(), [lane], "yes", is_summed=False)
