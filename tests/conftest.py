"""Shared parts of all tests: the check for left threads, readable skips, the Fashion-MNIST folder."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

GRACE_S = 20.0  # for threads that are ending when the test returns

if os.name != "posix":  # benches of reliability fork, kill and limit processes
    collect_ignore = ["bench"]

FASHION_MNIST_PLACES = (
    Path("/usr/share/datasets/fashion-mnist"),  # Debian's package dataset-fashion-mnist
    Path(__file__).resolve().parents[2] / "shared/data/fashion-mnist",
)


def _is_foreign(thread: threading.Thread) -> bool:
    """Whether a test cannot end this thread.

    A `_DummyThread` stands for a thread started by C++; tqdm's monitor is one per process, and stays.
    """
    return isinstance(thread, threading._DummyThread) or type(thread).__name__ == "TMonitor"


def _where(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)[-3:]) if frame else "  (no Python frame)\n"


def _join(thread: threading.Thread, deadline: float) -> None:
    """Wait for a thread; it may be one that another thread is about to start."""
    while (left := deadline - time.monotonic()) > 0:
        try:
            thread.join(left)
        except RuntimeError:  # `start` has not returned
            continue
        return


@pytest.fixture
def stopped_runs() -> Iterator[None]:
    """End runs left by a failed test, so that the tests end, too."""
    import flowdp

    yield
    for run in flowdp.runs():
        run.stop()


@pytest.fixture(autouse=True)
def _one_compute_thread() -> Iterator[None]:
    """Compute with one thread in the plain loops of tests, and so in all runs that they start.

    Bits depend on the number of threads. Tensors of tests are small: more threads would wait for each other,
    and spin on busy cores.
    """
    import torch

    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def thread_police() -> Iterator[None]:
    """Fail a test that leaves a thread behind."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + GRACE_S
    left = []
    for thread in set(threading.enumerate()) - before:
        if _is_foreign(thread):
            continue
        _join(thread, deadline)
        if thread.is_alive():
            left.append(thread)
    if left:
        pytest.fail("\n".join(f"Test left a thread: {t.name}\n{_where(t)}" for t in left), pytrace=False)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    # A GPU machine may lack the plugin of this option, and pytest refuses unknown ones.
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "Time limit of a test in seconds; needs pytest-timeout.")


def pytest_configure() -> None:
    # A shell starts background jobs with SIGINT ignored, and Python then installs no handler of its own: no
    # test of a Ctrl-C, here or in a child process, would receive one.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    # A run that releases a card collects garbage. Imported objects are not garbage, and there are many:
    # checking them took a third of a second, in a third of the suite's tests.
    if "torch" in sys.modules:
        importlib.import_module("torch._dynamo")  # as the first optimizer does
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that this system cannot run, and a `gpu(n)` test on a machine with fewer CUDA devices."""
    if os.name != "posix" and item.get_closest_marker("posix"):
        pytest.skip("needs fork, signals, named pipes, links or locked files of a POSIX system")
    if sys.platform != "linux" and item.get_closest_marker("linux"):
        pytest.skip("needs /proc or /dev/full of Linux")
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    import torch  # here, so that tests of the pure layers need not import torch

    needed, there = marker.args[0] if marker.args else 1, torch.cuda.device_count()
    if there < needed:
        pytest.skip(f"needs {needed} CUDA device(s), this machine has {there}")


@pytest.fixture(params=["cpu", "streams", "streams of a full card"])
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run a test on plain CPU devices, and on fake streams, as CUDA devices would run it.

    There, ranks average and measure as on a card, and keep a dataset of tensors resident, or prefetch it if
    the card has no room. Every replica and batch is watched: two streams that use one must be ordered by an
    event.
    """
    if request.param == "cpu":
        yield request.param
        return
    from tests.data.cards import Card, put_on_streams

    card = Card() if request.param == "streams" else Card(total=1)
    put_on_streams(card, monkeypatch.setattr)
    yield request.param
    assert not card.races


@pytest.fixture(autouse=True)
def _cut_batches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `setup` cut all batches, in tests without the marker `pace`.

    Models of tests are small: after some 20 steps the first device would do all calls alone.
    """
    if request.node.get_closest_marker("pace") is None:
        from flowdp.data_parallel.balancer import Pace

        monkeypatch.setattr(Pace, "step", lambda pace: None)


@pytest.fixture
def kept_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the replicas of a finished run, for tests that look at them."""
    from flowdp.engine.engine import Engine

    monkeypatch.setattr(Engine, "let_go", lambda engine: None)


@pytest.fixture(scope="session")
def fashion_mnist() -> Path:
    """The folder with Fashion-MNIST's four `.gz` files; without it the test skips and says how to get one."""
    given = os.environ.get("FLOWDP_FASHION_MNIST")
    for folder in [Path(given)] if given else FASHION_MNIST_PLACES:
        if (folder / "train-images-idx3-ubyte.gz").is_file():
            return folder
    pytest.skip(
        "Fashion-MNIST is missing: install Debian's dataset-fashion-mnist, or name a folder with its "
        f"idx .gz files in FLOWDP_FASHION_MNIST (now {given!r})"
    )
