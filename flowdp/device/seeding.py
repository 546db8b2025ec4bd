"""Seeding of the process-wide generators: Python's, NumPy's, and torch's on all devices."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from flowdp.device.accelerator import device_generator, started_devices
from flowdp.errors import OptionError
from flowdp.validators import is_int

__all__ = ["generators_kept", "seed_everything"]

SEEDS = 2**32
"""Seeds that NumPy takes."""


def seed_everything(seed: int) -> None:
    """Seed the generators of `random`, `numpy.random`, and torch's of the CPU and all accelerators.

    Call it before the model is built: its first weights are drawn from torch's generator. The order of a
    run's samples, and a run's generators of accelerators, come from `Trainer(seed=)` and not from this.

    It cannot fix:

    - dropout and the like on several CPU devices, whose threads draw from torch's one generator in the order
      in which they come: `policy="exact"` with `partition_ratios` gives each a generator of its own;
    - shares that follow measured speed ("cadence", "async", and "exact" without `partition_ratios`): two runs
      differ in their rounding;
    - kernels of CUDA that add in any order: `torch.use_deterministic_algorithms(True)`;
    - generators of your own (`torch.Generator`, `numpy.random.default_rng`), and the order of sets of
      strings, which the environment variable PYTHONHASHSEED sets before Python starts.

    Args:
        seed: From 0 to 2**32 - 1.

    Raises:
        OptionError: It is something else.

    Threads:
        Any, while no run draws.
    """
    if not is_int(seed) or not 0 <= seed < SEEDS:
        raise OptionError(f"seed must be an int from 0 to 2**32 - 1, not {seed!r}")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def generators_kept(
    devices: Sequence[torch.device] | None = None, own: Iterable[torch.Generator] = ()
) -> Iterator[None]:
    """Context that puts the generators of `seed_everything` back to where they were.

    Args:
        devices: Accelerators whose generators are kept; None: all.
        own: More generators to put back.

    Threads:
        Any, while nothing else draws.
    """
    python, numpy = random.getstate(), np.random.get_state()
    if devices is None:
        devices = started_devices()
    generators = [torch.default_generator, *map(device_generator, devices), *own]
    states = [(generator, generator.get_state()) for generator in generators]
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for generator, state in states:
            generator.set_state(state)
