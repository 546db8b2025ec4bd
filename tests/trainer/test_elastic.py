"""Arguments of `run_elastic`, what it raises and what it tries again; whole jobs are in `tests/machines`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

import flowdp
from flowdp import validators
from flowdp.errors import CollectiveError, MachineLostError, MachineWaitsError, OptionError
from flowdp.trainer import elastic
from tests.limits import HANG_S


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A lighthouse for this process alone."""
    pytest.importorskip("torchft", reason="torchft is not installed: pip install 'flowdp[torchft]'")
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=60_000)
    port = lighthouse.address().rpartition(":")[2]
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", f"http://127.0.0.1:{port}")
    yield
    lighthouse.shutdown()


def run(train: Any, **options: Any) -> Any:
    return flowdp.run_elastic(train, **{"host": "127.0.0.1", "timeout": HANG_S, **options})


def raising(error: BaseException) -> Any:
    """A function that counts its calls, and raises."""

    def train() -> None:
        train.calls += 1  # type: ignore[attr-defined]
        raise error

    train.calls = 0  # type: ignore[attr-defined]
    return train


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"train": 3}, "train must be a function without parameters, not 3"),
        ({"min_machines": 0}, "min_machines must be an int of at least 1, not 0"),
        ({"start_machines": 1.5}, "start_machines must be an int of at least 1 or None, not 1.5"),
        ({"timeout": 0}, "timeout must be a number above 0, not 0"),
        ({"timeout": None}, "timeout must be a number above 0, not None"),
        ({"lighthouse": 29510}, "lighthouse must be a word or None, not 29510"),
        ({"host": ""}, "host must be a word or None, not ''"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        flowdp.run_elastic(**{"train": dict, **options})


def test_torchft_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validators, "find_spec", lambda _: None)
    with pytest.raises(OptionError, match=r"run_elastic needs torchft: pip install 'flowdp\[torchft\]'"):
        flowdp.run_elastic(dict)


def test_one_machine_trains_alone(alone: None) -> None:
    assert run(lambda: (dist.get_rank(), dist.get_world_size())) == (0, 1)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "error", [ValueError("no"), OptionError("no"), CollectiveError("no"), KeyboardInterrupt(), SystemExit(3)]
)
def test_other_errors_are_raised_at_once(alone: None, error: BaseException) -> None:
    train = raising(error)
    with pytest.raises(type(error)) as raised:
        run(train)
    assert raised.value is error
    assert train.calls == 1
    assert not dist.is_initialized()


@pytest.mark.parametrize("kind", [MachineLostError, MachineWaitsError])
def test_it_goes_on_in_another_group(alone: None, kind: type[CollectiveError]) -> None:
    groups: list[object] = []

    def train() -> int:
        groups.append(dist.group.WORLD)
        if len(groups) == 1:
            raise kind("machine 1 was lost")
        return 7

    assert run(train) == 7
    assert groups[0] is not groups[1]


def test_losses_without_a_machine_gone_come_to_an_end(alone: None) -> None:
    train = raising(MachineLostError("machine 1 was lost"))
    with pytest.raises(MachineLostError, match="machine 1 was lost") as raised:
        run(train)
    assert train.calls == elastic.SHORT_LIVES
    assert any("3 times in a row no machine was gone" in note for note in raised.value.__notes__)


def test_too_few_machines(alone: None) -> None:
    with pytest.raises(CollectiveError, match=r"of 2 machines 1 came"):
        run(dict, min_machines=2, timeout=0.5)
