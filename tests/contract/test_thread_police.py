"""A test that leaves a thread behind fails, and says which."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.limits import HANG_S

ROOT = Path(__file__).resolve().parents[2]

TESTS = """
import threading

never = threading.Event()

def test_ends():
    thread = threading.Thread(target=threading.Event().wait, args=(0.05,))
    thread.start()              # on its way out: the grace covers it

def test_leaves():
    threading.Thread(target=never.wait, name="stray", daemon=True).start()
"""


def test_a_stray_thread_fails_its_test(tmp_path: Path) -> None:
    conftest = (ROOT / "tests/conftest.py").read_text(encoding="utf-8")
    (tmp_path / "conftest.py").write_text(conftest.replace("GRACE_S = 20.0", "GRACE_S = 2.0"))
    (tmp_path / "test_threads.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    child = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=HANG_S)
    assert "2 passed, 1 error" in child.stdout, child.stdout
    assert "Test left a thread: stray" in child.stdout
    assert "in wait" in child.stdout  # where it hangs
