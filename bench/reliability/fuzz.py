"""Mutated checkpoint files: each is read as it was or refused with CheckpointError, and nothing else happens.

::

    python -m bench.reliability.fuzz --mutations 100000

Half of the files get right checksums after the mutation, so that the parsers see them. The files are read in
a forked process with little memory; a crash, a hang or any other error is recorded with the seed.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import select
import signal
import struct
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils._pytree import tree_leaves

from flowdp.checkpoint.file import read, write
from flowdp.errors import CheckpointError
from flowdp.policy.tally import EpochMetrics, RankMetrics, Work
from flowdp.protocol.position import OpenEpoch, Position
from flowdp.replica.learning_rate import LearningRate, SchedulerOptions

__all__ = ["Report", "files", "fuzz", "mutated"]

MEMORY = 1 << 29  # bytes that a reader may allocate
HANG_S = 5.0
ODD = (
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
OPCODES = (
    b"(.0122FIJKLMNPQRSTUVXabcdeghijlopqrstu}])B"
    b"\x80\x81\x82\x83\x84\x85\x86\x87\x88\x89\x8a\x8b\x8c\x93\x94\x95"
)
HEADERS = (b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07")

Reader = Callable[[Path], Any]


@dataclass(slots=True)
class Report:
    """Results of the mutations.

    Attributes:
        counts: Files read as before, read with other values (only with right checksums), or refused.
        failures: Seed and error of all others.
    """

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)


# ---------------------------------------------------------------- files and mutations
def files(folder: Path) -> list[bytes]:
    """Small real checkpoints: of one rank and of two, with and without an open epoch."""
    made = []
    torch.manual_seed(0)  # so that a mutation's seed means the same in any process
    for world_size in (1, 2):
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        optimizer = torch.optim.AdamW(module.parameters(), 0.1)
        rate = LearningRate(
            [optimizer], SchedulerOptions(lambda one: OneCycleLR(one, 0.1, total_steps=9), unit="step")
        )
        module(torch.randn(4, 2)).sum().backward()
        optimizer.step()
        rate.advance(1, 0)
        rank = {
            "optimizers": [optimizer.state_dict()],
            "scaler": None,
            "generator": torch.zeros(16, dtype=torch.uint8),
            "learning_rate": rate.state_dict(),
        }
        sums = tuple(
            Work(2, 2, 8, losses=(1.5, 8), scalars={"accuracy": (4.0, 8.0)}) for _ in range(world_size)
        )
        metrics = RankMetrics(8, 2, 1.0, 0.0, 0.0, 0.0, 0.5, {"accuracy": 0.5}, 0.1)
        history = EpochMetrics(0, 3, 0.5, {}, (metrics,), 1.0, (8.0,), (1.0,), 0.1, 1, 0.0, 1, None, 1.0, 2)
        open_ = (OpenEpoch(1, 3, ((1,), (2,))[:world_size], sums),)
        path = folder / f"{world_size}.pt"
        write(
            path,
            {
                "version": 1,
                "epoch": 1,
                "global_step": 4,
                "position": Position(world_size, 1, open_ if world_size == 2 else (), 4, versions=1),
                "model": dict(module.state_dict()),
                "buffers": {"count": torch.tensor(3)},
                "ranks": [rank] * world_size,
                "history": (history,),
                "fingerprint": {"dataset_length": 100, "model": {"0.weight": "float32 (2, 2)"}},
                "orders": {1: 0xCBF43926} if world_size == 2 else None,
                "best": 0.5,
            },
        )
        made.append(path.read_bytes())
    return made


def mutated(seed: int, originals: Sequence[bytes]) -> tuple[bytes, int, bool]:
    """Make a mutation: its bytes, the number of its original, and whether its checksums are right."""
    draw = random.Random(seed)
    number = draw.randrange(len(originals))
    is_sealed = draw.random() < 0.5
    content = bytearray(originals[number])
    for _ in range(draw.choice((1, 1, 2, 4))):
        draw.choice(MUTATIONS)(draw, content, draw.choice(originals))
    if is_sealed:
        _seal(content)
    return bytes(content), number, is_sealed


def _seal(content: bytearray) -> None:
    """Set the checksums of all records found in an archive."""
    for entry in _all(content, b"PK\x01\x02"):
        if len(content) < entry + 46:
            continue
        (size,) = struct.unpack_from("<I", content, entry + 20)
        (header,) = struct.unpack_from("<I", content, entry + 42)
        if len(content) < header + 30:
            continue
        start = header + 30 + sum(struct.unpack_from("<HH", content, header + 26))
        struct.pack_into("<I", content, entry + 16, zlib.crc32(content[start : start + size]))


def _flip(draw: random.Random, content: bytearray, _other: bytes) -> None:
    if content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)


def _cut(draw: random.Random, content: bytearray, _other: bytes) -> None:
    del content[draw.randrange(len(content) + 1) :]


def _delete(draw: random.Random, content: bytearray, _other: bytes) -> None:
    start = draw.randrange(len(content) + 1)
    del content[start : start + draw.choice((1, 2, 8, 64, 1000))]


def _insert(draw: random.Random, content: bytearray, _other: bytes) -> None:
    start = draw.randrange(len(content) + 1)
    content[start:start] = draw.randbytes(draw.choice((1, 2, 8, 64, 1000)))


def _splice(draw: random.Random, content: bytearray, other: bytes) -> None:
    start, length = draw.randrange(len(other)), draw.choice((1, 4, 30, 300))
    place = draw.randrange(len(content) + 1)
    content[place : place + draw.choice((0, length))] = other[start : start + length]


def _zip_field(draw: random.Random, content: bytearray, _other: bytes) -> None:
    places = _all(content, draw.choice(HEADERS))
    if places:
        form = draw.choice("BHIQ")
        size = struct.calcsize("<" + form)
        start = draw.choice(places) + draw.randrange(4, 56)
        content[start : start + size] = struct.pack("<" + form, draw.choice(ODD) % 256**size)


def _opcode(draw: random.Random, content: bytearray, _other: bytes) -> None:
    start = content.find(b"\x80\x02}")  # the pickle
    stop = content.find(b"PK", start + 1)
    if 0 <= start < stop:
        place = draw.randrange(start, stop)
        content[place : place + draw.choice((0, 1, 1, 2))] = bytes([draw.choice(OPCODES)])


def _number(draw: random.Random, content: bytearray, _other: bytes) -> None:
    """Change a size, offset or stride in the pickle."""
    places = [place + 1 for opcode in (b"K", b"M", b"J") for place in _all(content[:-1], opcode)]
    if places:
        content[draw.choice(places)] = draw.choice((0, 1, 2, 3, 0x7F, 0xFF))


MUTATIONS = (_flip, _flip, _cut, _delete, _insert, _splice, _zip_field, _zip_field, _opcode, _opcode, _number)


def _all(content: bytes | bytearray, part: bytes) -> list[int]:
    places, at = [], content.find(part)
    while at >= 0:
        places.append(at)
        at = content.find(part, at + 1)
    return places


# ---------------------------------------------------------------- reading them
def fuzz(mutations: int, *, first: int = 0, hang_s: float = HANG_S, reader: Reader = read) -> Report:
    """Read mutations in forked processes.

    Args:
        mutations: Number of mutations.
        first: Seed of the first.
        hang_s: Time after which a file counts as a hang.
        reader: Function that reads a file.
    """
    report = Report()
    seed, end = first, first + mutations
    with tempfile.TemporaryDirectory() as folder:
        originals = files(Path(folder))
        while seed < end:
            seed = _run_child(seed, end, originals, Path(folder), hang_s, reader, report)
    return report


def _run_child(
    seed: int,
    end: int,
    originals: Sequence[bytes],
    folder: Path,
    hang_s: float,
    reader: Reader,
    report: Report,
) -> int:
    """Read mutations in one process until it ends; returns the next seed."""
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(source)
            _child(range(seed, end), originals, folder, reader, sink)
        finally:
            os._exit(0)
    os.close(sink)
    try:
        with os.fdopen(source, "rb", buffering=0) as pipe:
            rest = b""
            while seed < end:
                if not select.select([pipe], [], [], hang_s)[0]:
                    report.failures.append((seed, f"no answer for {hang_s:g} s"))
                    return seed + 1
                said = pipe.read(1 << 16)
                if not said:
                    report.failures.append((seed, "the process died"))
                    return seed + 1
                *lines, rest = (rest + said).split(b"\n")
                for line in lines:
                    _note(report, seed, line.decode())
                    seed += 1
            return seed
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _note(report: Report, seed: int, said: str) -> None:
    if said in ("read as before", "read with other values", "refused"):
        report.counts[said] += 1
    else:
        report.failures.append((seed, said))


def _child(seeds: range, originals: Sequence[bytes], folder: Path, reader: Reader, sink: int) -> None:
    torch.set_num_threads(1)  # a fork has none of the parent's threads
    warnings.simplefilter("ignore")  # torch warns about objects in the mutated pickles
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    path = folder / "mutated.pt"
    expected = []
    for original in originals:
        path.write_bytes(original)
        expected.append(_shown(read(path)))
    for seed in seeds:
        content, number, is_sealed = mutated(seed, originals)
        path.write_bytes(content)
        said = _judged(path, reader, expected[number])
        if said == "read with other values" and not is_sealed:
            said = f"a wrong checksum was not noticed: {said}"
        os.write(sink, said.encode() + b"\n")


def _judged(path: Path, reader: Reader, expected: str) -> str:
    try:
        return "read as before" if _shown(reader(path)) == expected else "read with other values"
    except CheckpointError:
        return "refused"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:200]!r}"


def _shown(state: Any) -> str:
    """All values as text, which reads every element."""
    leaves = tree_leaves(state)
    return repr([leaf.tolist() if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz, print the counts and save the failures; returns 1 if there were any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mutations", type=int, default=100_000, help="number of mutations (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one (%(default)s)")
    parser.add_argument("--failures", type=Path, default=Path("fuzz_failures.txt"), help="file (%(default)s)")
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    report = fuzz(options.mutations, first=options.first)
    took_s = time.perf_counter() - started
    for what, count in sorted(report.counts.items()):
        print(f"{what:<24}{count:>9,}")
    print(f"{'failed':<24}{len(report.failures):>9,}")
    print(f"{options.mutations:,} mutations in {took_s:.1f} s, {options.mutations / took_s:,.0f} per second")
    if report.failures:
        options.failures.write_text("".join(f"{seed}\t{what}\n" for seed, what in report.failures))
        print(f"seeds and errors: {options.failures}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
