"""Metrics that compute on a thread of a run ask no other process, unless they have a way of their own."""

from __future__ import annotations

import gc
import logging
import sys
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from flowdp.engine import local_metrics as module
from flowdp.engine.local_metrics import local_metrics


@pytest.fixture
def metric(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An object with the interface of a torchmetrics metric, whose `synced` are the calls that ask others."""

    class Metric:
        distributed_available_fn = staticmethod(lambda: True)
        process_group: Any = None

        def __init__(self) -> None:
            self.synced: list[dict[str, Any]] = []

        def sync(
            self,
            dist_sync_fn: Any = None,
            process_group: Any = None,
            should_sync: bool = True,
            distributed_available: Any = None,
        ) -> None:
            self.synced.append({"fn": dist_sync_fn, "group": process_group, "should": should_sync})

        def compute(self, **given: Any) -> None:
            self.sync(**{"dist_sync_fn": None, "should_sync": True, **given})

    monkeypatch.setitem(sys.modules, "torchmetrics.metric", SimpleNamespace(Metric=Metric))
    monkeypatch.setattr(module, "_told", set())
    monkeypatch.setattr(module, "_is_job", lambda: True)
    return Metric()


def test_a_thread_of_a_run_asks_nobody_and_says_so_once(
    metric: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "flowdp"), local_metrics():
        with local_metrics():
            metric.compute()
        metric.compute()
    assert metric.synced == []
    assert len(caplog.records) == 1
    assert "Metric.compute() in a loss" in caplog.text
    metric.compute()
    assert len(metric.synced) == 1


def test_a_ctrl_c_at_any_line_leaves_nothing_behind(metric: Any) -> None:
    def interrupted_at(number: int) -> bool:
        """Whether the context has so many lines: then a Ctrl-C has come at that one."""
        seen = 0

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal seen
            if frame.f_code is not local_metrics.__wrapped__.__code__:  # type: ignore[attr-defined]
                return None
            if event == "line":
                seen += 1
                if seen == number:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            with local_metrics():
                pass
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    lines = 1
    while interrupted_at(lines):
        gc.collect()
        metric.compute()
        assert len(metric.synced) == lines
        lines += 1
    assert lines > 4


def test_it_asks_as_the_user_has_chosen(metric: Any) -> None:
    with local_metrics():
        metric.compute(dist_sync_fn=print)
        metric.compute(should_sync=False)
        metric.process_group = "mine"
        metric.compute()
        metric.process_group = None
        metric.distributed_available_fn = lambda: False
        metric.compute()
    assert [one["fn"] for one in metric.synced] == [print, None, None, None]
    assert [one["should"] for one in metric.synced] == [True, False, True, True]


def test_outside_a_job_nothing_changes(metric: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_is_job", lambda: False)
    with local_metrics():
        metric.compute()
    assert len(metric.synced) == 1


def test_the_method_is_replaced_once(metric: Any) -> None:
    with local_metrics():
        replaced = type(metric).sync
    with local_metrics():
        assert type(metric).sync is replaced
