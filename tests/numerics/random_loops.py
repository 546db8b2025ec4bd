"""Random loops: models and sequences of actions from a seed, played by plain PyTorch and by `setup`.

A program is drawn without being run, so that it plays the same on both sides.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

import flowdp

__all__ = ["Action", "Difference", "Program", "draw", "play"]

ATOL, RTOL = 1e-10, 1e-9
MOST_KEPT = 4  # outputs whose graphs live on
SIZES = (1, 2, 3, 4, 5, 7, 8, 8, 12)
FIRST_IN, FIRST_OUT = 4, 3  # features of the first model; the second takes what the first gives


# ---------------------------------------------------------------- models
class Mlp(nn.Sequential):
    def __init__(self, inputs: int, depth: int) -> None:
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Linear(inputs, 5), nn.Tanh() if depth % 2 else nn.Softplus()]
            inputs = 5
        super().__init__(*layers, nn.Linear(inputs, FIRST_OUT))


class Buffered(nn.Module):
    """Buffers that a graph saves, and one that counts the calls in training."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(inputs, 5), nn.Linear(5, FIRST_OUT)
        self.register_buffer("std", torch.rand(5) + 1)
        self.register_buffer("mask", torch.rand(1, FIRST_OUT).expand(FIRST_OUT, FIRST_OUT), persistent=False)
        self.register_buffer("calls", torch.ones(()))
        self.std: Tensor
        self.mask: Tensor
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        y: Tensor = self.out(torch.tanh(self.layer(x) / self.std)) @ self.mask * (1 + 1 / self.calls)
        return y


class Normed(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.layer, self.norm, self.out = nn.Linear(inputs, 6), nn.LayerNorm(6), nn.Linear(6, FIRST_OUT)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(torch.tanh(self.norm(self.layer(x))))
        return y


class Recurrent(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(inputs, 4), nn.Linear(4, FIRST_OUT)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 4)
        for step in range(3):
            state = self.cell(x.roll(step, 1), state)
        y: Tensor = self.out(state)
        return y


class Tied(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.first, self.again, self.out = nn.Linear(inputs, 5), nn.Linear(inputs, 5), nn.Linear(5, FIRST_OUT)
        self.again.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(
            torch.tanh(self.first(x)) + self.again(x).sin() + (x @ self.first.weight.T).cos()
        )
        return y


class BatchNormed(nn.Module):
    """Always in evaluation: in training each device normalises its part by itself."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.layer, self.norm, self.out = nn.Linear(inputs, 5), nn.BatchNorm1d(5), nn.Linear(5, FIRST_OUT)
        self.norm.running_mean, self.norm.running_var = torch.rand(5), torch.rand(5) + 0.5

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(torch.tanh(self.norm(self.layer(x))))
        return y

    def train(self, mode: bool = True) -> BatchNormed:
        super().train(False)
        return self


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda inputs: Mlp(inputs, 0),
    "mlp": lambda inputs: Mlp(inputs, 1),
    "deep mlp": lambda inputs: Mlp(inputs, 2),
    "buffers": Buffered,
    "LayerNorm": Normed,
    "GRUCell": Recurrent,
    "tied": Tied,
    "BatchNorm": BatchNormed,
}

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    # With torch's own epsilon a step turns the rounding of a gradient of zero into a change that shows.
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-4),
}


# ---------------------------------------------------------------- programs
@dataclass(frozen=True)
class Action:
    """A step of a loop, with all that it needs to be played."""

    name: str
    options: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.options.items())})"


@dataclass(frozen=True)
class Program:
    """A loop.

    Attributes:
        seed: Where it came from; the numbers in models and batches follow from it, too.
        models: Names in `MODELS`, one or two.
        optimizer: Name in `OPTIMIZERS`.
        devices: Number of devices.
        ratios: Fixed shares, or None.
        actions: What the loop does.
    """

    seed: int
    models: tuple[str, ...]
    optimizer: str
    devices: int
    ratios: tuple[float, ...] | None
    actions: tuple[Action, ...]

    def __str__(self) -> str:
        shares = "equal shares" if self.ratios is None else f"shares {self.ratios}"
        head = f"{' and '.join(self.models)}, {self.optimizer}, {self.devices} devices, {shares}"
        return "\n".join(
            [head, *(f"    {number}. {action}" for number, action in enumerate(self.actions, 1))]
        )


WEIGHTS = {
    "forward": 8,
    "no_grad": 2,
    "inference": 2,
    "freeze": 3,
    "other_weights": 4,
    "backward": 8,
    "penalty": 2,
    "inner_step": 2,
    "gradients": 2,
    "step": 5,
    "zero_grad": 2,
    "mode": 2,
    "hook": 2,
    "load": 1,
    "write": 2,
    "drop": 1,
}
"""How often each action is drawn."""


def _options(name: str, dice: random.Random) -> dict[str, Any]:
    """What an action needs, drawn."""
    data = {"data": dice.randrange(1000), "size": dice.choice(SIZES)}
    model = {"model": dice.randrange(2)}
    match name:
        case "forward":
            way = dice.choice(["own", "own", "own", "input", "chain", "cut chain"])
            return {**model, **data, "way": way}
        case "no_grad" | "inference":
            return {**model, **data}
        case "freeze":
            return {**model, "which": dice.randrange(64), "thaws": dice.random() < 0.5}
        case "other_weights":
            way = dice.choice(["no_grad", "no_grad", "leaves", "graph", "some"])
            return {**model, **data, "way": way, "factor": dice.choice([0.5, 1.5])}
        case "backward":
            ways = {"retains": dice.random() < 0.25, "syncs": dice.random() < 0.8}
            return {"which": dice.randrange(1, 16), **ways, "loss": dice.choice(["square", "abs", "row"])}
        case "penalty":
            return {**model, **data, "on": dice.choice(["parameters", "input"]), "keeps": dice.random() < 0.3}
        case "inner_step":
            return {**model, **data, "steps": dice.choice([1, 2]), "first_order": dice.random() < 0.3}
        case "gradients":
            return {"which": dice.randrange(1, 16), "retains": dice.random() < 0.5}
        case "step":
            return {"which": dice.choice([1, 2, 3, 3]), "zeroes": dice.random() < 0.7}
        case "zero_grad":
            return {"set_to_none": dice.random() < 0.5, "by": dice.choice(["model", "optimizer"])}
        case "mode":
            return {**model, "trains": dice.random() < 0.5}
        case "hook":
            return {**model, "layer": dice.randrange(6), "way": dice.choice(["count", "scale", "remove"])}
        case "load":
            return {**model, "factor": dice.choice([1.0, 0.9])}
        case "write":
            way = dice.choice(["data in place", "data anew", "no_grad", "buffers"])
            return {**model, "which": dice.randrange(1, 64), "way": way}
    return {}


def draw(seed: int) -> Program:
    """The program of a seed."""
    dice = random.Random(seed)
    devices = dice.choice([2, 3])
    ratios = None if dice.random() < 0.5 else tuple(float(dice.randint(1, 3)) for _ in range(devices))
    models = tuple(dice.choice(list(MODELS)) for _ in range(dice.choice([1, 1, 2])))
    names = dice.choices(list(WEIGHTS), list(WEIGHTS.values()), k=dice.randint(6, 15))
    names[0] = "forward"
    actions = tuple(Action(name, _options(name, dice)) for name in names)
    return Program(seed, models, dice.choice(list(OPTIMIZERS)), devices, ratios, actions)


# ---------------------------------------------------------------- sides
class Difference(AssertionError):
    """What the two sides did was not the same."""


@dataclass
class Part:
    """A model of a side.

    Attributes:
        call: What the loop calls.
        module: The module.
        optimizer: Its optimizer.
        start: Its first state.
        is_synced: Whether its gradients are those of all devices.
    """

    call: nn.Module
    module: nn.Module
    optimizer: Optimizer
    start: dict[str, Tensor]
    is_synced: bool = True


Spread = Callable[[nn.Module, Optimizer, Program], AbstractContextManager[nn.Module]]


def spread(module: nn.Module, optimizer: Optimizer, program: Program) -> AbstractContextManager[nn.Module]:
    """The wrapper of `setup`."""
    devices = ["cpu"] * program.devices
    return flowdp.setup(module, optimizer, devices=devices, partition_ratios=program.ratios, progress=False)


def _plain(module: nn.Module, _: Optimizer, __: Program) -> AbstractContextManager[nn.Module]:
    return nullcontext(module)


class Side:
    """A loop by one of the two ways, as far as it has come."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.kept: list[Tensor] = []
        self.leaves: list[Tensor] = []  # arguments and weights of the loop's own that get gradients
        self.hooks: list[tuple[Any, list[int]]] = []

    # ------------------------------------------------------------ parts of actions
    def part(self, number: int) -> Part:
        return self.parts[number % len(self.parts)]

    def _batch(self, options: Mapping[str, Any], part: Part) -> Tensor:
        generator = torch.Generator().manual_seed(options["data"])
        features = FIRST_IN if part is self.parts[0] else FIRST_OUT
        return torch.randn(options["size"], features, generator=generator, dtype=torch.float64)

    def _keep(self, output: Tensor) -> Tensor:
        self.kept = [*self.kept[-MOST_KEPT + 1 :], output]
        return output

    def _leaf(self, tensor: Tensor) -> Tensor:
        leaf = tensor.detach().clone().requires_grad_()
        self.leaves.append(leaf)
        return leaf

    def _chosen(self, mask: int) -> list[Tensor]:
        return [output for bit, output in enumerate(self.kept) if mask >> bit & 1] or self.kept[:1]

    def _trained(self, part: Part) -> list[nn.Parameter]:
        return [p for p in part.module.parameters() if p.requires_grad]

    def _loss(self, outputs: Sequence[Tensor], kind: str) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for number, output in enumerate(outputs):
            by_kind = {"square": output.square().mean, "abs": output.abs().mean, "row": output[0].sin().sum}
            total = total + (1 + number) * by_kind[kind]()
        return total

    def play(self, action: Action) -> Any:
        """Do an action; the result is compared."""
        return getattr(self, f"_{action.name}")(action.options)

    # ------------------------------------------------------------ actions
    def _forward(self, options: Mapping[str, Any]) -> Tensor:
        part, way = self.part(options["model"]), options["way"]
        if way in ("chain", "cut chain") and len(self.parts) == 2:
            between = self.parts[0].call(self._batch(options, self.parts[0]))
            return self._keep(self.parts[1].call(between if way == "chain" else between.detach()))
        x = self._batch(options, part)
        return self._keep(part.call(self._leaf(x) if way == "input" else x))

    def _no_grad(self, options: Mapping[str, Any]) -> Tensor:
        part = self.part(options["model"])
        with torch.no_grad():
            y: Tensor = part.call(self._batch(options, part))
            return y

    def _inference(self, options: Mapping[str, Any]) -> Tensor:
        part = self.part(options["model"])
        was_training = part.call.training
        part.call.eval()
        with torch.inference_mode():
            y: Tensor = part.call(self._batch(options, part))
        part.call.train(was_training)
        return y.clone()

    def _freeze(self, options: Mapping[str, Any]) -> None:
        for bit, parameter in enumerate(self.part(options["model"]).module.parameters()):
            if options["which"] >> bit & 1 or options["thaws"]:
                parameter.requires_grad_(options["thaws"])

    def _other_weights(self, options: Mapping[str, Any]) -> Tensor:
        part, way, factor = self.part(options["model"]), options["way"], options["factor"]
        x = self._batch(options, part)
        own = dict(part.module.named_parameters())
        if way == "some":
            own = dict(list(own.items())[:1])
        if way == "no_grad":
            with torch.no_grad():
                y: Tensor = functional_call(part.call, {name: p * factor for name, p in own.items()}, (x,))
                return y
        if way == "graph":
            weights = {name: p * factor for name, p in own.items()}
        else:
            weights = {name: self._leaf(p * factor) for name, p in own.items()}
        return self._keep(functional_call(part.call, weights, (x,)))

    def _backward(self, options: Mapping[str, Any]) -> None:
        if not self.kept:
            return
        chosen = self._chosen(options["which"])
        if not options["retains"]:
            self.kept = [output for output in self.kept if all(output is not one for one in chosen)]
        loss = self._loss(chosen, options["loss"])
        with ExitStack() as stack:
            for part in self.parts:
                if not options["syncs"] and isinstance(part.call, flowdp.DataParallel):
                    stack.enter_context(part.call.no_sync())
                    part.is_synced = False
            loss.backward(retain_graph=options["retains"])

    def _penalty(self, options: Mapping[str, Any]) -> Tensor:
        part = self.part(options["model"])
        x = self._batch(options, part).requires_grad_(options["on"] == "input")
        y: Tensor = part.call(x)
        of = [x] if options["on"] == "input" else self._trained(part)
        slopes = torch.autograd.grad(self._loss([y], "square"), of, create_graph=True, allow_unused=True)
        penalty = y.square().mean()
        for slope in slopes:
            penalty = penalty if slope is None else penalty + slope.square().sum()
        if options["keeps"]:
            return self._keep(penalty[None])
        penalty.backward()
        return penalty

    def _inner_step(self, options: Mapping[str, Any]) -> Tensor:
        part = self.part(options["model"])
        x = self._batch(options, part)
        weights: dict[str, Tensor] = {n: p for n, p in part.module.named_parameters() if p.requires_grad}
        for _ in range(options["steps"]):
            loss = self._loss([functional_call(part.call, weights, (x,))], "square")
            graph = not options["first_order"]
            slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=graph)
            named = zip(weights.items(), slopes, strict=True)
            weights = {name: weight - 0.1 * slope for (name, weight), slope in named}
        return self._keep(functional_call(part.call, weights, (x + 1,)))

    def _gradients(self, options: Mapping[str, Any]) -> Any:
        if not self.kept:
            return None
        chosen = self._chosen(options["which"])
        if not options["retains"]:
            self.kept = [output for output in self.kept if all(output is not one for one in chosen)]
        of = [*(p for part in self.parts for p in self._trained(part)), *self.leaves]
        loss = self._loss(chosen, "square")
        return torch.autograd.grad(loss, of, retain_graph=options["retains"], allow_unused=True)

    def _step(self, options: Mapping[str, Any]) -> None:
        for bit, part in enumerate(self.parts):
            if options["which"] >> bit & 1 or len(self.parts) == 1:
                part.optimizer.step()
                part.is_synced = True
                if options["zeroes"]:
                    part.optimizer.zero_grad()

    def _zero_grad(self, options: Mapping[str, Any]) -> None:
        for part in self.parts:
            zeroed = part.call if options["by"] == "model" else part.optimizer
            zeroed.zero_grad(set_to_none=options["set_to_none"])

    def _mode(self, options: Mapping[str, Any]) -> None:
        self.part(options["model"]).call.train(options["trains"])

    def _hook(self, options: Mapping[str, Any]) -> None:
        if options["way"] == "remove":
            for handle, _ in self.hooks:
                handle.remove()
            return
        layers = list(self.part(options["model"]).module.modules())
        count = [0]

        def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor | None:
            count[0] += 1
            return output * 1.1 if options["way"] == "scale" else None

        self.hooks.append((layers[options["layer"] % len(layers)].register_forward_hook(hook), count))

    def _load(self, options: Mapping[str, Any]) -> None:
        part = self.part(options["model"])
        part.call.load_state_dict({name: value * options["factor"] for name, value in part.start.items()})

    def _write(self, options: Mapping[str, Any]) -> None:
        """Writes of the loop between two steps: no graph lives that has saved what is written to."""
        self._drop({})
        part, way = self.part(options["model"]), options["way"]
        if way == "buffers":
            for buffer in {id(b): b for b in part.module.buffers() if b.is_floating_point()}.values():
                if 0 not in buffer.stride():  # an expanded one has one place for several entries
                    buffer.mul_(1.1)
            return
        for bit, parameter in enumerate(part.module.parameters()):
            if not options["which"] >> bit & 1:
                continue
            if way == "data in place":
                parameter.data.mul_(0.9)
            elif way == "data anew":
                parameter.data = parameter.data * 0.9
            else:
                with torch.no_grad():
                    parameter.add_(0.01)

    def _drop(self, _: Mapping[str, Any]) -> None:
        self.kept.clear()

    # ------------------------------------------------------------ comparison
    def settle(self) -> None:
        """Begin anew behind an error: what an action that failed has done by then is not compared."""
        self.kept.clear()
        self.leaves.clear()
        for part in self.parts:
            part.call.zero_grad()
            part.is_synced = True
        for _, count in self.hooks:
            count[0] = 0

    def all(self) -> Iterator[tuple[str, Any]]:
        """Everything that must be the same on both sides."""
        for number, output in enumerate(self.kept):
            yield f"output {number} of those kept", output
        for number, leaf in enumerate(self.leaves):
            yield f"gradient of leaf {number}", leaf.grad
        for number, (_, count) in enumerate(self.hooks):
            yield f"calls of hook {number}", count[0]
        for number, part in enumerate(self.parts):
            of = f" of model {number}"
            yield "mode" + of, part.call.training
            for name, parameter in part.module.named_parameters():
                yield f"{name}{of}", parameter
                yield f"requires_grad of {name}{of}", parameter.requires_grad
                yield f"gradient of {name}{of}", parameter.grad
            for name, buffer in part.module.named_buffers():
                yield f"buffer {name}{of}", buffer


@contextmanager
def _side(program: Program, way: Spread) -> Iterator[Side]:
    torch.manual_seed(program.seed)
    parts: list[Part] = []
    with ExitStack() as stack:
        for name in program.models:
            module = MODELS[name](FIRST_OUT if parts else FIRST_IN).double()
            module.train()
            optimizer = OPTIMIZERS[program.optimizer](module.parameters())
            start = {key: value.clone() for key, value in module.state_dict().items()}
            call = stack.enter_context(way(module, optimizer, program))
            parts.append(Part(call, module, optimizer, start))
        yield Side(parts)


def _compare(where: str, found: Any, expected: Any) -> None:
    if isinstance(expected, tuple):
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            _compare(f"{where}[{number}]", one, other)
    elif isinstance(expected, Tensor) and isinstance(found, Tensor):
        if found.requires_grad is not expected.requires_grad:
            raise Difference(f"{where}: requires_grad is {found.requires_grad}")
        if found.shape != expected.shape:
            raise Difference(f"{where}: shape {tuple(found.shape)}, not {tuple(expected.shape)}")
        if not torch.allclose(found, expected, rtol=RTOL, atol=ATOL, equal_nan=True):
            worst = (found - expected).abs().max().item()
            raise Difference(f"{where}: differs by up to {worst:.3g}")
    elif found is not expected and found != expected:
        raise Difference(f"{where}: {found}, not {expected}")


def _attempt(side: Side, action: Action) -> tuple[Any, Exception | None]:
    try:
        return side.play(action), None
    except Exception as error:
        return None, error


def _act(ours: Side, plain: Side, action: Action) -> None:
    """Play an action on both sides and compare."""
    expected, wanted = _attempt(plain, action)
    found, raised = _attempt(ours, action)
    if wanted is None and raised is not None:
        raise Difference(f"plain PyTorch runs: {type(raised).__name__}: {raised}") from raised
    if wanted is not None:
        if raised is None:
            raise Difference(f"plain PyTorch raises {type(wanted).__name__}: {wanted}")
        if not isinstance(raised, (type(wanted), flowdp.FlowdpError)):
            raise Difference(f"{type(raised).__name__}: {raised}, not {type(wanted).__name__}: {wanted}")
        ours.settle()
        plain.settle()
    else:
        _compare("result", found, expected)
    for (where, found), (_, expected) in zip(ours.all(), plain.all(), strict=True):
        if where.startswith("gradient of ") and not all(part.is_synced for part in ours.parts):
            continue  # `no_sync` has left those of the other devices where they are
        _compare(where, found, expected)


def play(program: Program, way: Spread = spread) -> None:
    """Play a program on both sides.

    Raises:
        Difference: It differs; the message has the action, and the program.
    """
    with _side(program, _plain) as plain, _side(program, way) as ours:
        for number, action in enumerate(program.actions, 1):
            try:
                _act(ours, plain, action)
            except Difference as error:
                raise Difference(
                    f"seed {program.seed}, action {number}, {action}: {error}\n{program}"
                ) from error.__cause__
