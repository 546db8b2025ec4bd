"""Tests of the table of peers: what is missing or raises is named, and the other rows go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bench.gpu import peers
from bench.gpu.part import Figure, Finding, Note, Place
from bench.gpu.peers import EXPERT, HAND, Row, Seen, Work

CPU = Place(torch.device("cpu"))


def taking(ms: float) -> Callable[[Place, Work, nn.Module], float]:
    return lambda place, work, model: ms


def failing(_place: Place, _work: Work, _model: nn.Module) -> float:
    raise ValueError("no graph today")


def found(monkeypatch: pytest.MonkeyPatch, **rows: Any) -> tuple[list[Finding], str]:
    """Findings of a table of these rows, and the error at its end."""
    monkeypatch.setattr(peers, "ROWS", {HAND: Row(taking(4.0)), EXPERT: Row(taking(1.0)), **rows})
    seen: list[Finding] = []
    try:
        for finding in peers.measure(CPU):
            seen.append(finding)  # noqa: PERF402  # what came before an error is kept
    except RuntimeError as error:
        return seen, str(error)
    return seen, ""


def test_rows_have_times_ratios_and_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, error = found(monkeypatch, ours=Row(taking(2.0)))
    figures = {one.name: one.value for one in seen if isinstance(one, Figure)}
    assert error == ""
    assert figures["peers, MLP, ours: best, ms"] == figures["peers, MLP, ours: median, ms"] == 2.0
    assert figures["peers, MLP, ours: times the CUDA graph"] == 2.0
    assert figures["peers, MLP, ours: times the loop by hand"] == 0.5
    assert figures[f"peers, MLP, {EXPERT}: times the loop by hand"] == 0.25
    losses = {value for name, value in figures.items() if name.startswith("peers, CNN") and "loss" in name}
    assert len(losses) == 1  # none of these rows has trained


def test_a_row_that_raises_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, error = found(monkeypatch, broken=Row(failing), ours=Row(taking(2.0)))
    assert Note("peers, MLP, broken: ValueError: no graph today") in seen
    assert Figure("peers, GPT, ours: times the loop by hand", 0.5) in seen
    assert "peers, GPT, broken: ValueError: no graph today" in error


def test_ratios_are_those_of_common_rounds() -> None:
    ours, graph = Seen({0: 2.0, 1: 6.0, 2: 3.0}), Seen({0: 1.0, 1: 2.0})
    assert ours.times(graph) == 2.5
    assert ours.times(Seen()) is None


def test_rows_of_one_order_train_alike() -> None:
    """A graph's step, run eagerly here, is that of the loop beside it."""
    work = peers.works(CPU)[1]
    names = ("by hand, data on the card, fused", EXPERT, "torch.compile by hand")
    losses = [peers.train(CPU, work, peers.ROWS[name])[1] for name in names]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
