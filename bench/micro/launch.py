"""Ranks that launch many small kernels at once: threads, processes, flowdp, and each remedy in flowdp.

    python -m bench.micro.launch                             # all variants, 1 to 8 ranks: some 10 minutes
    python -m bench.micro.launch --quick                     # three variants, 1 and 4 ranks: a minute
    python -m bench.micro.launch --variant flowdp --variant processes --ranks 1 --ranks 4 --seconds 2
    python -m bench.micro.launch --width 256 --length 64     # steps much longer than their launches

A figure is the optimizer steps per second of all ranks together, for a GPT whose step is some 1,000 small
kernels, with AdamW and one compute thread per rank. Every variant has its own processes, which are warmed up
once; then all are measured in turns, in random order, and are idle meanwhile. On CUDA the ranks go round the
devices; several may share one. A second table has the parts of a step, in threads and in processes: the
difference is the lock. docs/gil.md discusses both.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from itertools import islice, pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, Literal

import torch
from torch import nn

import flowdp
from bench.harness import Comparison, options, report
from bench.models import Gpt, predict_next, texts
from flowdp.threads.crew import Crew

TOKENS = 64
SAMPLES = 4096
STEPS_AHEAD = 3
"""Steps between two waits of the host in a hand loop on CUDA; flowdp has at most as many in flight."""
WARM_STEPS = 20
WARM_S = 2.0
FEWEST_ROUNDS = 2
PARTS = ("forward", "backward", "optimizer")

Rate = Callable[[float], float]
"""Measures for this many seconds, or a little longer; returns steps per second."""


@dataclass(frozen=True)
class Variant:
    """One way to train on several ranks.

    Attributes:
        how: Kind of ranks: a process each, a bare thread each, a Trainer, or `setup`, whose loop splits a
            batch into a sample per rank.
        is_fused: AdamW(fused=True); False: the default AdamW.
        is_compiled: The model goes through torch.compile.
        launch_limit: Ranks that may be in their loss at once; None: all.
        is_captured: Steps are CUDA graphs.
        options: Arguments of the Trainer, or of `setup`, beside those of every variant.
    """

    how: Literal["processes", "threads", "flowdp", "setup"]
    is_fused: bool = True
    is_compiled: bool = False
    launch_limit: int | None = None
    is_captured: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def missing(self) -> str:
        """Arguments that this version of flowdp lacks, or a device that is, in words; "" if all is there."""
        if self.is_captured and not torch.cuda.is_available():
            return "captured steps need a CUDA device"
        door: Callable[..., object] = flowdp.setup if self.how == "setup" else flowdp.Trainer
        unknown = self.options.keys() - signature(door).parameters.keys()
        return f"this flowdp has no {door.__name__}({', '.join(sorted(unknown))}=)" if unknown else ""


PROCESSES = "processes"
VARIANTS = {
    PROCESSES: Variant("processes"),
    "processes, compiled": Variant("processes", is_compiled=True),
    "threads": Variant("threads"),
    "threads, not fused": Variant("threads", is_fused=False),
    "threads, compiled": Variant("threads", is_compiled=True),
    "flowdp": Variant("flowdp"),
    "flowdp, one launches": Variant("flowdp", launch_limit=1),
    "flowdp, not fused": Variant("flowdp", is_fused=False),
    "flowdp, compiled": Variant("flowdp", is_compiled=True),
    "flowdp, captured": Variant("flowdp", is_captured=True),
    "setup": Variant("setup"),
}
QUICK = (PROCESSES, "threads", "flowdp")


@dataclass(frozen=True)
class Task:
    """The model, its text and the ranks' devices.

    Attributes:
        device: "cpu" or "cuda".
    """

    device: str
    layers: int
    width: int
    length: int

    def model(self, is_compiled: bool) -> nn.Module:
        torch.manual_seed(0)
        model = Gpt(self.layers, self.width, heads=4, length=self.length, tokens=TOKENS)
        if is_compiled:
            model.compile()
        return model

    def devices(self, ranks: int) -> list[torch.device]:
        if self.device == "cpu":
            return [torch.device("cpu")] * ranks
        return [torch.device("cuda", rank % torch.cuda.device_count()) for rank in range(ranks)]

    def loop(self, variant: Variant, rank: int, spent_s: list[float] | None = None) -> Rate:
        """A hand loop.

        Args:
            variant: Its variant.
            rank: Rank of this loop.
            spent_s: Receives the seconds of the host in each of `PARTS`, if given.
        """
        device = self.devices(rank + 1)[rank]
        model = self.model(variant.is_compiled).to(device)
        optimizer = adamw(model.parameters(), is_fused=variant.is_fused)
        batch = (texts(SAMPLES, self.length, TOKENS)[0][:1].to(device),)

        def step() -> None:
            marks = [time.perf_counter()]
            loss = predict_next(model, batch)
            marks.append(time.perf_counter())
            loss.backward()
            marks.append(time.perf_counter())
            optimizer.step()
            optimizer.zero_grad()
            marks.append(time.perf_counter())
            if spent_s is not None:
                for place, (start_s, end_s) in enumerate(pairwise(marks)):
                    spent_s[place] += end_s - start_s

        def rate(seconds: float) -> float:
            torch.set_num_threads(1)
            steps, start_s = 0, time.perf_counter()
            while time.perf_counter() - start_s < seconds:
                step()
                steps += 1
                if device.type == "cuda" and steps % STEPS_AHEAD == 0:
                    torch.cuda.current_stream(device).synchronize()
            return steps / (time.perf_counter() - start_s)

        return rate

    def trainer(self, variant: Variant, ranks: int) -> flowdp.Trainer:
        options: dict[str, Any] = {"policy": "cadence", "cadence": flowdp.CadenceOptions(max_anchor=10)}
        options.update(variant.options)
        return flowdp.Trainer(
            model=lambda: self.model(variant.is_compiled),
            optimizer=partial(adamw, is_fused=variant.is_fused),
            loss=predict_next,
            dataset=texts(SAMPLES, self.length, TOKENS),
            per_device_batch_size=1,
            epochs=10**6,
            devices=self.devices(ranks),
            progress=False,
            failures=flowdp.FailureOptions(stall_timeout=None),  # the pause may be long
            runtime=flowdp.RuntimeOptions(capture=variant.is_captured, launch_limit=variant.launch_limit),
            **options,
        )


def adamw(parameters: Any, *, is_fused: bool) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=is_fused or None)


# ---------------------------------------------------------------------- in a process that measures
@contextmanager
def hand_loops(task: Task, variant: Variant, ranks: int) -> Iterator[Rate]:
    """Bare loops, each in its own thread."""
    with closing(Crew([f"rank-{rank}" for rank in range(ranks)])) as crew:
        loops = [task.loop(variant, rank) for rank in range(ranks)]

        def rate(seconds: float) -> float:
            return sum(filter(None, crew.run([partial(loop, seconds) for loop in loops])))

        rate(0.0)  # the first step builds lazily; then the steps of the warm-up
        rate(WARM_S)
        yield rate


def parts_ms(task: Task, ranks: int, seconds: float) -> list[float]:
    """Milliseconds of each part of one rank's step while this many bare threads take steps."""
    torch.set_num_threads(1)
    with closing(Crew([f"rank-{rank}" for rank in range(ranks)])) as crew:
        spent_s = [[0.0] * len(PARTS) for _ in range(ranks)]
        loops = [task.loop(VARIANTS["threads"], rank, spent) for rank, spent in enumerate(spent_s)]
        crew.run([partial(loop, WARM_S / 2) for loop in loops])
        for spent in spent_s:
            spent[:] = [0.0] * len(PARTS)
        rates = crew.run([partial(loop, seconds) for loop in loops])
    steps = seconds * sum(filter(None, rates))
    return [sum(part) / steps * 1e3 for part in zip(*spent_s, strict=True)]


@contextmanager
def training(task: Task, variant: Variant, ranks: int) -> Iterator[Rate]:
    """A Trainer's run, paused between two measurements."""
    run = task.trainer(variant, ranks).start()
    records = run.metrics("round")
    still = ExitStack()

    def rate(seconds: float) -> float:
        newest = run.status().round
        still.close()
        steps, wall_ms, rounds, start_s = 0, 0.0, 0, time.perf_counter()
        for record in records:
            # The first two rounds after a pause do not count: one may be short, and one includes the wait.
            if newest is not None and record.round <= newest + 2:
                continue
            steps, wall_ms, rounds = steps + sum(record.steps), wall_ms + record.wall_ms, rounds + 1
            if rounds >= FEWEST_ROUNDS and time.perf_counter() - start_s >= seconds:
                break
        still.enter_context(run.paused())
        return steps / wall_ms * 1e3

    with run, still:
        enough = -(-WARM_STEPS * ranks // sum(next(records).steps))
        for _ in islice(records, enough):
            pass
        rate(WARM_S)
        try:
            yield rate
        finally:
            run.stop()


@contextmanager
def looping(task: Task, variant: Variant, ranks: int) -> Iterator[Rate]:
    """A loop over the objects that `setup` returns."""
    model = task.model(variant.is_compiled)
    data = texts(SAMPLES, task.length, TOKENS)[0]
    batches = [(data[start : start + ranks],) for start in range(0, SAMPLES, ranks)]
    with flowdp.setup(
        model,
        adamw(model.parameters(), is_fused=variant.is_fused),
        devices=task.devices(ranks),
        cadence=False,
        loss_fn=loss_of_window,
        inputs=without_last,
        **variant.options,
    ) as dp:

        def steps() -> Iterator[None]:
            while True:
                for window in dp.epoch(batches):
                    dp.forward_batch(window)
                    dp.step()
                    yield

        stepped = steps()

        def rate(seconds: float) -> float:
            count, start_s = 0, time.perf_counter()
            while not count or time.perf_counter() - start_s < seconds:
                next(stepped)
                count += ranks
            return count / (time.perf_counter() - start_s)

        rate(WARM_S)
        yield rate


def without_last(batch: tuple[torch.Tensor]) -> torch.Tensor:
    return batch[0][:, :-1]


def loss_of_window(context: flowdp.LossContext) -> torch.Tensor:
    logits: torch.Tensor = context.output
    return nn.functional.cross_entropy(logits.flatten(0, 1), context.batch[0][:, 1:].flatten())


DOORS = {"processes": hand_loops, "threads": hand_loops, "flowdp": training, "setup": looping}


def serve(pipe: Connection, task: Task, variant: Variant, ranks: int) -> None:
    """Body of a process: measures on request; answers with a text for an error."""
    torch.set_num_threads(1)
    try:
        with DOORS[variant.how](task, variant, ranks) as rate:
            pipe.send(None)
            while (seconds := pipe.recv()) is not None:
                pipe.send(rate(seconds))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}".partition("\n")[0])


# ---------------------------------------------------------------------- in the process that asks
@dataclass
class Side:
    """A variant on a number of ranks, with its processes."""

    pipes: Sequence[Connection]

    def ask(self, seconds: float) -> float:
        """Measure; raises `RuntimeError` if the variant fails."""
        for pipe in self.pipes:
            pipe.send(seconds)
        return sum(filter(None, self.answers()))

    def answers(self) -> list[float | None]:
        answers: list[float | str | None] = []
        for pipe in self.pipes:
            try:
                answers.append(pipe.recv())
            except EOFError:
                answers.append("its process has ended")
        for answer in answers:
            if isinstance(answer, str):
                raise RuntimeError(answer)
        return [answer for answer in answers if not isinstance(answer, str)]


def open_side(stack: ExitStack, task: Task, variant: Variant, ranks: int) -> Side:
    """Start the processes of a side, and wait until they are warm."""
    context = get_context("spawn")
    pipes = []
    is_split = variant.how == "processes"
    for _ in range(ranks if is_split else 1):
        here, there = context.Pipe()
        # Not a daemon: a variant may start threads and processes of its own.
        process = context.Process(target=serve, args=(there, task, variant, 1 if is_split else ranks))
        process.start()
        there.close()
        stack.callback(process.join)
        stack.callback(here.close)
        pipes.append(here)
    side = Side(pipes)
    stack.callback(dismiss, side)
    side.answers()
    return side


def dismiss(side: Side) -> None:
    for pipe in side.pipes:
        try:
            pipe.send(None)
        except OSError:
            continue  # it has ended already


Case = tuple[str, int]
"""(variant, ranks)."""


def open_sides(stack: ExitStack, task: Task, names: Sequence[str], ranks: Sequence[int]) -> dict[Case, Side]:
    """Every variant that this flowdp and this machine support, on each number of ranks."""
    sides: dict[Case, Side] = {}
    for name in names:
        if VARIANTS[name].missing:
            print(f"{name}: skipped, {VARIANTS[name].missing}", flush=True)
            continue
        for count in ranks:
            try:
                sides[name, count] = open_side(stack, task, VARIANTS[name], count)
            except RuntimeError as error:
                print(f"{name}, {count} ranks: skipped, {error}", flush=True)
    return sides


def measure(sides: Mapping[Case, Side], turns: int, seconds: float) -> dict[Case, list[float]]:
    """Steps per second of each case, turn by turn."""
    draw = random.Random(0)
    seen: dict[Case, list[float]] = {case: [] for case in sides}
    for turn in range(turns):
        for case in draw.sample(list(seen), len(seen)):
            try:
                seen[case].append(sides[case].ask(seconds))
            except RuntimeError as error:
                name, count = case
                print(f"{name}, {count} ranks: failed in turn {turn + 1}, {error}", flush=True)
                del seen[case]
    return seen


def words(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def compared(seen: Mapping[Case, Sequence[float]]) -> list[Comparison]:
    """Each case against one rank of its variant, and against as many processes."""
    found = []
    for (name, count), rates in seen.items():
        others = [(words(1), (name, 1))] if count > 1 else []
        others += [(PROCESSES, (PROCESSES, count))] if name != PROCESSES else []
        for other, case in others:
            if case in seen:
                names = (words(count) if case[0] == name else name), other
                label = f"{name}, {words(count)}"
                found.append(Comparison(label, "steps/s", names, tuple(rates), tuple(seen[case])))
    return found


def lines(seen: Mapping[Case, Sequence[float]]) -> list[str]:
    """The table in Markdown: medians, each followed by the median of its ratio."""
    ratios = {(one.label, one.names[1]): one.ratio for one in compared(seen)}
    names = list(dict.fromkeys(name for name, _ in seen))
    counts = sorted({count for _, count in seen})
    made = ["| steps/s (of 1 rank, of processes) | " + " | ".join(map(words, counts)) + " |"]
    made.append("|---" * (len(counts) + 1) + "|")
    for name in names:
        cells = []
        for count in counts:
            label = f"{name}, {words(count)}"
            shown = [ratios.get((label, words(1))), ratios.get((label, PROCESSES))]
            of = ", ".join("-" if ratio is None else f"{ratio:.2f}" for ratio in shown)
            rates = seen.get((name, count))
            cells.append(f"{median(rates):,.0f} ({of})" if rates else "")
        made.append(f"| {name} | " + " | ".join(cells) + " |")
    return made


def measure_parts(task: Task, counts: Sequence[int], seconds: float) -> dict[str, float]:
    """Print the parts of a rank's step, for threads and for processes; returns figures."""
    figures: dict[str, float] = {}
    print("", "| ms of a step | " + " | ".join(PARTS) + " |", "|---" * 4 + "|", sep="\n")
    for count in counts:
        for how, (processes, ranks) in {"threads": (1, count), PROCESSES: (count, 1)}.items():
            with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
                work = partial(parts_ms, task, ranks)
                list(pool.map(work, [0.1] * processes))  # all have started and imported torch
                measured = list(pool.map(work, [seconds] * processes))
                found = [sum(part) / processes for part in zip(*measured, strict=True)]
            print(f"| {words(count)}, {how} | " + " | ".join(f"{ms:.2f}" for ms in found) + " |", flush=True)
            figures |= {
                f"{name}, {words(count)}, {how}, ms": ms for name, ms in zip(PARTS, found, strict=True)
            }
    return figures


def main() -> None:
    parser = options(__doc__, pairs=5)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="only this one (may repeat)")
    parser.add_argument("--ranks", type=int, action="append", help="number of ranks (may repeat): 1, 2, 4, 8")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a measurement (%(default)s)")
    parser.add_argument("--layers", type=int, default=12, help="layers of the GPT (%(default)s)")
    parser.add_argument("--width", type=int, default=32, help="width of the GPT (%(default)s)")
    parser.add_argument("--length", type=int, default=8, help="tokens of a text (%(default)s)")
    parser.add_argument("--quick", action="store_true", help=f"{', '.join(QUICK)} on 1 and 4 ranks, 3 turns")
    arguments = parser.parse_args()
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    task = Task(device, arguments.layers, arguments.width, arguments.length)
    names = arguments.variant or (QUICK if arguments.quick else tuple(VARIANTS))
    counts = arguments.ranks or ((1, 4) if arguments.quick else (1, 2, 4, 8))
    turns = 3 if arguments.quick else arguments.pairs
    with ExitStack() as stack:
        seen = measure(open_sides(stack, task, names, counts), turns, arguments.seconds)
    print(*lines(seen), sep="\n")
    figures = {f"{name}, {words(count)}, steps/s": median(rates) for (name, count), rates in seen.items()}
    figures |= measure_parts(task, counts, arguments.seconds)
    report("launch", compared(seen), figures=figures, save=arguments.save, more={"task": vars(task)})


if __name__ == "__main__":
    main()
