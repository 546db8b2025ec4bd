"""The code of the README runs as it stands, with nothing installed but flowdp and what it requires."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

import flowdp
from tests.docs.programs import programs

PAGE = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
Devices = list[str]


def blocks(language: str) -> list[str]:
    """The blocks of one language, in their order; "" is output or a command."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return [block for name, block in found if name == language]


def test_setup_is_a_diff_of_two_lines_with_the_result_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    diff, *_ = blocks("diff")
    lines = diff.splitlines()
    assert [line[0] for line in lines].count("+") == 2
    assert {line[0] for line in lines} == {"+", " "}

    def trained(added: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        loader = [(torch.randn(7, 4, dtype=torch.float64), torch.randint(3, (7,))) for _ in range(20)]
        code = "\n".join(line[1:] for line in lines if added or line[0] == " ")
        names = {"model": model, "loader": loader, "F": F, "torch": torch}
        exec(code, names)
        if added:
            assert isinstance(names["model"], flowdp.DataParallel)
            names["model"].close()
        return list(model.parameters())

    def on_two_devices(model: nn.Module, optimizer: Optimizer, setup: Any = flowdp.setup) -> Any:
        return setup(model, optimizer, devices=["cpu", "cpu"])

    monkeypatch.setattr(flowdp, "setup", on_two_devices)
    for one, several in zip(trained(False), trained(True), strict=True):
        torch.testing.assert_close(several, one, rtol=0, atol=1e-11)


def test_the_trainer_has_15_lines_and_goes_on_with_two_more() -> None:
    """`docs/test_pages.py` runs them."""
    [run] = blocks("python")
    assert len([line for line in run.splitlines() if line]) <= 15
    assert set(re.findall(r"^(?:import|from) (\w+)", run, re.MULTILINE)) == {"torch", "flowdp"}
    [resumed] = [program for program in programs("README.md") if "resume=True" in program.code]
    assert run.startswith(resumed.code.lstrip()[:100])
    assert len(resumed.code.strip().splitlines()) == len(run.splitlines()) + 2


def test_the_first_page_is_short() -> None:
    assert len(PAGE.splitlines()) <= 150


def test_the_sample_line_is_what_a_run_prints() -> None:
    [sample] = re.findall(r"print\(metrics\)  # (.+)", PAGE)
    epochs = re.search(r"epochs=(\d+),", PAGE)
    assert epochs is not None
    pattern = rf"epoch 1/{epochs[1]} \| loss [\d.]+ \| [\d,]+ samples/s \| share \d+ % \d+ % \| [\d.]+m?s"
    assert re.fullmatch(pattern, sample)
