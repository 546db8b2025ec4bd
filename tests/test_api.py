"""The public names are imported at the first use of one, whole, from any thread."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import flowdp
from flowdp import api

ROOT = Path(__file__).resolve().parents[1]


def output_of(program: str) -> str:
    """Output of a program in a process of its own, where nothing is imported yet."""
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=600
    )
    assert child.returncode == 0, child.stderr
    return child.stdout.strip()


def test_import_flowdp_loads_no_other_module_of_flowdp_and_no_torch() -> None:
    program = """
import importlib, sys, typing
before = set(sys.modules)
import flowdp
print(sorted(set(sys.modules) - before))
"""
    assert output_of(program) == "['flowdp']"


def test_a_public_name_loads_little_that_torch_has_not_loaded() -> None:
    program = """
import sys, torch
before = set(sys.modules)
import flowdp
flowdp.Trainer
loaded = {name for name in set(sys.modules) - before if name.partition(".")[0] not in sys.stdlib_module_names}
print(*sorted(name for name in loaded if name.partition(".")[0] not in ("flowdp", "numpy")))
"""
    assert set(output_of(program).split()) <= {
        "torch.utils._device",
        "torch.utils.serialization",
        "torch.utils.serialization.config",
    }


def test_threads_may_use_public_names_for_the_first_time_at_once() -> None:
    program = """
import threading, flowdp
names = ["Trainer", "setup", "Ddp", "OptionError", "simulate", "devices", "runs", "compare"]
found, start = {}, threading.Barrier(len(names))
def use(name):
    start.wait()
    found[name] = getattr(flowdp, name)
threads = [threading.Thread(target=use, args=(name,)) for name in names]
for thread in threads: thread.start()
for thread in threads: thread.join()
from flowdp import api
print([name for name in names if found.get(name) is not getattr(api, name)])
"""
    assert output_of(program) == "[]"


def test_a_name_is_the_same_object_everywhere() -> None:
    assert all(getattr(flowdp, name) is getattr(api, name) for name in api.__all__)
    assert vars(flowdp)["Trainer"] is api.Trainer  # found once, then a plain attribute


def test_dir_has_the_public_names_before_the_first_use() -> None:
    assert output_of("import flowdp; print(set(flowdp.__all__) - set(dir(flowdp)))") == "set()"


def test_the_version_is_that_of_the_package() -> None:
    assert flowdp.__version__ == version("flowdp")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trianer'"):
        _ = flowdp.Trianer
