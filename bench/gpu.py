"""What can be checked on a machine with CUDA, with the interpreter as it is: no venv, nothing installed.

Runs `tests/gpu` and prints what the machine has; the record goes into $OUT when that is set, else into
bench/results. This version trains on CPU devices, so there is no figure of a GPU in it yet.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

import flowdp
from bench.harness import RESULTS, ROOT, report


def main() -> int:
    summary = flowdp.devices()
    print(summary)
    print(
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, cupy {'yes' if find_spec('cupy') else 'no'}"
    )
    tests = subprocess.run([sys.executable, "-m", "pytest", "tests/gpu"], cwd=ROOT, check=False)
    figures = {
        "CUDA devices": float(torch.cuda.device_count()),
        "tests/gpu exit code": float(tests.returncode),
    }
    report("gpu", [], figures=figures, save=True, folder=Path(os.environ.get("OUT", RESULTS)))
    return tests.returncode


if __name__ == "__main__":
    sys.exit(main())
