"""The examples of several machines, under the launchers that they name."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import flowdp
from tests.limits import HANG_S
from tests.machines.launch import ROOT, below, free_port

pytestmark = pytest.mark.posix

EXAMPLES = ROOT / "examples"
DIGITS, STEPS = 1797, 5 * 57


@contextmanager
def started(commands: Sequence[Sequence[str]], **more: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes of commands, which end with the block, as do all that they have started."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
    running = [
        subprocess.Popen(
            command,
            env=environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for command in commands
    ]
    try:
        yield running
    finally:
        for process in running:
            for pid in [*below(process.pid), process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.communicate()


def said(running: Sequence[subprocess.Popen[str]]) -> list[str]:
    """What processes wrote that must end well."""
    outputs = [process.communicate(timeout=HANG_S)[0] for process in running]
    assert [process.returncode for process in running] == [0] * len(running), "\n".join(outputs)
    return outputs


def test_the_command_of_the_example_starts_two_nodes(tmp_path: Path) -> None:
    text = (EXAMPLES / "several_machines.py").read_text()
    command = " ".join(re.findall(r"    torchrun (.*?)\n\n", text, re.DOTALL)[0].replace("\\\n", " ").split())
    assert "--nnodes 2 --nproc-per-node 1" in command
    command = command.replace("host0:29400", f"localhost:{free_port()}").replace("runs/digits", str(tmp_path))
    node = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "localhost", *command.split()]
    with started([node, node]) as running:
        outputs = said(running)
    for output in outputs:
        assert f"5 epochs, step {STEPS}, loss " in output
    assert flowdp.load_checkpoint(tmp_path).global_step == STEPS


def test_elastic_machines_meet_at_the_lighthouse_of_the_example(tmp_path: Path) -> None:
    pytest.importorskip("torchft", reason="torchft is not installed: pip install 'flowdp[torchft]'")
    text = (EXAMPLES / "elastic.py").read_text()
    (options,) = re.findall(r"    torchft_lighthouse (.*?)  +#", text)
    port = free_port()
    program = [str(Path(sys.executable).with_name("torchft_lighthouse")), "--bind", f"127.0.0.1:{port}"]
    node = [sys.executable, str(EXAMPLES / "elastic.py"), str(tmp_path), "5"]
    address = f"http://127.0.0.1:{port}"
    with (
        started([[*program, *options.split()]]),
        started([node, node], TORCHFT_LIGHTHOUSE=address) as running,
    ):
        outputs = said(running)
    for output in outputs:
        assert f"5 epochs, step {STEPS}, loss " in output
    assert flowdp.load_checkpoint(tmp_path).global_step == STEPS


def test_slurm_starts_one_process_on_each_node(tmp_path: Path) -> None:
    # A srun that starts two tasks here, as it would one on each node.
    programs = {
        "scontrol": '#!/bin/sh\n[ "$*" = "show hostnames node[0-1]" ] && printf "127.0.0.1\\n127.0.0.2\\n"\n',
        "srun": '#!/bin/sh\n[ "$1" = --kill-on-bad-exit=1 ] || exit 9\nshift\nexport SLURM_NTASKS=2\n'
        'SLURM_PROCID=1 "$@" &\nSLURM_PROCID=0 "$@" || exit 1\nwait $!\n',
    }
    for name, program in programs.items():
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)
    job = ["bash", str(EXAMPLES / "slurm.sh"), str(EXAMPLES / "several_machines.py"), str(tmp_path / "runs")]
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[0-1]",
        "MASTER_PORT": str(free_port()),
        "PYTHON": sys.executable,
    }
    with started([job], **variables) as running:
        (output,) = said(running)
    assert output.count(f"5 epochs, step {STEPS}, loss ") == 2


def test_ray_train_runs_it_in_two_workers(tmp_path: Path) -> None:
    pytest.importorskip("ray.train")
    pytest.importorskip("pandas")  # of ray[train]
    # Ray keeps its results in the home folder.
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "HOME": str(tmp_path)}
    with started([[sys.executable, str(EXAMPLES / "ray_train.py")]], **variables) as running:
        (output,) = said(running)
    metrics = ast.literal_eval(re.findall(r"^\{'epoch': .*\}$", output, re.MULTILINE)[-1])
    assert metrics["epoch"] == 5
    assert len(metrics["samples"]) == 2
    assert min(metrics["samples"]) > 0
    assert sum(metrics["samples"]) == DIGITS
    assert [path.name for path in tmp_path.rglob("model.pt")] == ["model.pt"]
