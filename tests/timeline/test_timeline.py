"""Tests of the timeline: of commands, of simulated steps, and of real runs."""

from __future__ import annotations

import json
import math
import sys
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import nn

import flowdp
from flowdp.policy.efficiency import Activity
from flowdp.protocol.commands import (
    EvaluationEnded,
    Finish,
    Paused,
    Quarantined,
    RoundEnded,
    Save,
    Send,
)
from flowdp.protocol.messages import SyncNow, Throttle
from flowdp.protocol.position import Position
from flowdp.timeline.record import EVENTS
from flowdp.timeline.sampler import UNKNOWN
from flowdp.timeline.timeline import Timeline
from tests.timeline.hostile import HOSTILE


def ended(number: int, **fields: Any) -> RoundEnded:
    given: dict[str, Any] = {
        "round": number,
        "rounds": 1,
        "epoch": 0,
        "global_step": 2 * number,
        "steps": (1, 1),
        "samples": (6, 2),
        "loss": 1.0,
        "lr": 0.1,
        "wall_ms": 4.0,
        "busy_ms": (3.0, 3.0),
        "data_ms": (0.0, 0.0),
        "wait_ms": (0.0, 0.0),
        "sync_ms": 0.5,
        "anchor": 1,
    }
    return RoundEnded(**{**given, **fields})


def kinds(timeline: Timeline) -> list[str]:
    return [event.kind for event in timeline.events]


# ---------------------------------------------------------------- commands
def test_commands_become_events_and_rounds() -> None:
    timeline = Timeline(["a", "b"])
    for command in (
        ended(0),
        ended(1, anchor=3, share=(0.75, 0.25), reason="the drift rose"),
        Send(1, Throttle(7, "the others are too far behind")),
        Send(1, SyncNow(4)),
        Quarantined(0, None),
        Save(0, Position(global_step=4, done=0, round=2, world_size=2), version=1, snapshots=0),
        Paused(True),
        EvaluationEnded(8, 0, {"loss": 0.5}),
        Finish("rank 1 failed\nin loss", stopped=True, global_step=8, epochs_done=1),
    ):
        timeline.note(command)
    assert [(event.kind, event.rank, event.text) for event in timeline.events] == [
        ("round length", None, "1 step of the slowest device"),
        ("round length", None, "1 → 3 steps of the slowest device"),
        ("shares", None, "shares 75 % 25 %"),
        ("round", None, "round 1: the drift rose"),
        ("held", 1, "waits at step 7: the others are too far behind"),
        ("rank", 0, "NaN or inf parameters: it copies those of another device"),
        ("checkpoint", None, "checkpoint 1"),
        ("pause", None, "paused"),
        ("evaluation", None, "step 8 | eval loss 0.5000"),
        ("end", None, "stopped after 1 epoch, step 8: rank 1 failed"),
    ]
    assert [(one.rounds, one.loss, one.anchor, one.samples) for one in timeline.rounds] == [
        (1, 1.0, 1, (6, 2)),
        (1, 1.0, 3, (6, 2)),
    ]


def test_a_long_run_is_thinned_evenly_and_a_loss_that_is_not_finite_is_left_out() -> None:
    timeline = Timeline(["a", "b"])
    for number in range(10_000):
        timeline.note(ended(number, loss=math.nan if number % 8 else 2.0))
        timeline.sample(1.0, number, [])
    assert [one.global_step for one in timeline.rounds] == list(range(0, 20_000, 8))
    assert [one.ram_bytes for one in timeline.samples] == list(range(0, 10_000, 4))
    assert [one.loss for one in timeline.rounds[::2]] == [2.0] * 1250
    assert math.isnan(timeline.rounds[1].loss)


def test_events_of_one_kind_do_not_push_out_another() -> None:
    timeline = Timeline(["a", "b"])
    timeline.note(ended(0))
    for step in range(2 * EVENTS):
        timeline.note(Send(0, Throttle(step, "the others are too far behind")))
    assert kinds(timeline).count("round length") == 1
    assert kinds(timeline).count("held") == EVENTS


def test_an_unknown_use_is_no_zero() -> None:
    unknown = Timeline(["cuda:0"], {"cuda:0": "GPU-1"})
    unknown.sample(1.0, math.nan, [UNKNOWN])
    assert math.isnan(unknown.samples[0].gpus[0].utilisation)


def test_a_million_steps_need_little_memory_and_are_all_counted() -> None:
    timeline = Timeline(["a", "b"])
    for rank, recorder in enumerate(timeline.ranks):
        for step in range(500_000):
            start_s = step * 1e-3
            recorder.add(Activity.STEP, start_s, start_s + 8e-4)
            if step % 2 == rank:
                recorder.add(Activity.GATE, start_s + 8e-4, start_s + 9e-4)
                recorder.add(Activity.AVERAGE, start_s + 9e-4, start_s + 1e-3)
    tables = [recorder.read(activity) for recorder in timeline.ranks for activity in Activity]
    # The numbers are the memory: 8 bytes each, and the lists hold as many again before they grow.
    assert 2 * sum(table.nbytes for table in tables) < 8 << 20
    steps = [span for span in timeline.spans if span.activity is Activity.STEP]
    assert sum(span.count for span in steps) == 1_000_000
    assert sum(span.busy_ms for span in steps) == pytest.approx(800_000)


# ---------------------------------------------------------------- runs
def run_of(**options: Any) -> flowdp.Run:
    torch.manual_seed(0)
    data = torch.randn(192, 6), torch.randn(192, 1)
    settings: dict[str, Any] = {
        "policy": "cadence",
        "model": nn.Linear(6, 1),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.01),
        "loss": nn.MSELoss(),
        "dataset": data,
        "per_device_batch_size": 4,
        "epochs": 2,
        "devices": ["cpu"] * 2,
        "evaluation": data,
        "timeline": True,
        "progress": False,
    }
    run = flowdp.Trainer(**{**settings, **options}).start()
    run.join()
    return run


@pytest.mark.parametrize("policy", ["sync", "cadence", "async", "exact"])
def test_the_spans_of_a_run_are_its_steps(policy: str, tmp_path: Path) -> None:
    run = run_of(policy=policy, checkpoint=tmp_path)
    spans, status = run.timeline.spans, run.status()
    for rank, steps in enumerate(status.local_steps):
        counted = sum(s.count for s in spans if s.rank == rank and s.activity is Activity.STEP)
        assert counted == steps > 0
        own = [span for span in spans if span.rank == rank]
        assert sum(span.activity is Activity.EVALUATE for span in own) == 2
        assert sum(span.activity is Activity.SAVE for span in own) == 2
        assert sum(span.activity is Activity.AVERAGE for span in own) > 0
        inside = sorted(own, key=lambda span: span.start_ms)
        assert all(one.end_ms <= two.start_ms + 0.05 for one, two in pairwise(inside))
    assert sum(one.samples[0] + one.samples[1] for one in run.timeline.rounds) == 2 * 192
    assert kinds(run.timeline).count("epoch") == 4
    assert kinds(run.timeline).count("checkpoint") == 2
    assert run.timeline.samples


@pytest.mark.parametrize("policy", ["sync", "cadence", "async", "exact"])
def test_a_report_needs_no_timeline(policy: str) -> None:
    run = run_of(policy=policy, timeline=False)
    report = run.report()
    assert sum(report.parts.values()) == pytest.approx(1.0)
    assert report.reached == pytest.approx(sum(one.reached for one in report.devices))
    assert 0 < report.efficiency < 1
    assert report.parts["evaluation"] > 0
    # Only a round of several steps has been planned so that all finish it together, but for whole steps.
    assert (report.parts["rounding"] + report.parts["guard"] > 0) == (policy == "cadence")
    with pytest.raises(flowdp.OptionError, match=r"Trainer\(timeline=True\)"):
        _ = run.timeline


def test_the_files_of_a_run(tmp_path: Path) -> None:
    run = run_of(timeline=tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace('http-equiv="', "")
    run.timeline.save(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    steps = [one for one in trace["traceEvents"] if one["ph"] == "X" and one["name"] == "training"]
    assert sum(one["args"]["count"] for one in steps) == sum(run.status().local_steps)
    assert len(run.timeline.plot().axes) == 3


def test_a_trace_has_no_time_below_zero(tmp_path: Path) -> None:
    timeline = Timeline(["a", "b"])
    begun_s = perf_counter()
    timeline.begin(lambda: pytest.fail("a trace has no report"))
    timeline.ranks[0].add(Activity.IDLE, begun_s - 1.0, begun_s)
    timeline.note(ended(0))
    timeline.save(tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert [(one["ts"], one["dur"]) for one in events if one["ph"] == "X"] == [(0.0, pytest.approx(1e6))]
    assert all(one["ts"] >= 1e6 for one in events if one["ph"] == "C")


def test_a_run_that_fails_leaves_its_file(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        raise ValueError("a bad batch")

    with pytest.raises(flowdp.StepError):
        run_of(loss=loss, evaluation=None, timeline=str(tmp_path / "run.json"))
    assert json.loads((tmp_path / "run.json").read_text())["traceEvents"]


@pytest.mark.filterwarnings("ignore:Glyph")  # of a font
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_text_in_every_file(name: str, tmp_path: Path) -> None:
    timeline = Timeline([name, "b"], {name: "GPU-0"})
    timeline.note(ended(0, reason=name, loss=math.inf))
    timeline.note(ended(1, loss=None))
    timeline.sample(1.0, math.nan, [UNKNOWN])
    for file in ("run.html", "run.json"):
        timeline.save(tmp_path / file)
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    data = page.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    assert "<" not in data
    assert json.loads(data)["devices"][0] == name
    assert page.count("</script>") == 2
    trace = json.loads((tmp_path / "run.json").read_text())
    assert any(name in event["args"].get("name", "") for event in trace["traceEvents"] if event["ph"] == "M")
    timeline.plot().savefig(tmp_path / "run.png")


@pytest.mark.parametrize("path", ["run.txt", "run", 3, None, ""])
def test_other_files_are_refused(path: Any) -> None:
    with pytest.raises(flowdp.OptionError, match="a timeline is saved as"):
        Timeline(["a"]).save(path)
    with pytest.raises(flowdp.OptionError, match="a timeline is saved as"):
        run_of(timeline=path)


def test_a_folder_that_is_not_there_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(flowdp.OptionError, match="there is no folder"):
        run_of(timeline=tmp_path / "no" / "run.html")


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(flowdp.OptionError, match=r"flowdp\[plot\]"):
        Timeline(["a"]).plot()


def test_an_epoch_without_a_loss_is_an_event() -> None:
    run = run_of(timeline=True, evaluation=None)
    timeline = Timeline(["a", "b"])
    timeline.note(run.history[0])
    assert timeline.events[0].text.startswith("epoch 1, loss ")


def test_of_several_machines_it_has_the_ranks_of_its_own() -> None:
    timeline = Timeline(["a", "b"], first_rank=1)
    timeline.note(ended(1, samples=(8, 9, 10, 11), share=(0.1, 0.2, 0.3, 0.4)))
    for rank in range(4):
        timeline.note(Quarantined(rank, None))
    assert timeline.rounds[0].samples == (9, 10)
    assert [event.rank for event in timeline.events if event.kind == "rank"] == [0, 1]
    assert "shares 20 % 30 %" in [event.text for event in timeline.events]
