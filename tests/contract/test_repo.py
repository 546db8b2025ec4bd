"""The text of the repository speaks of flowdp alone and leaves nothing for later."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Each pattern is written so that it does not find itself.
FORBIDDEN = {
    "a path of one machine": re.compile(r"(?<![\w.~-])/(?:work|root|home)/(?!\*)"),
    "unfinished work": re.compile(r"\b(?:TO[D]O|FIX[M]E|X[X]X)\b"),
}


def offences(name: str, text: str) -> list[str]:
    """Lines of a file that say what no file may say."""
    return [
        f"{name}:{number}: {what}: {line.strip()[:80]}"
        for number, line in enumerate(text.splitlines(), 1)
        for what, pattern in FORBIDDEN.items()
        if pattern.search(line)
    ]


def files() -> list[Path]:
    """What git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout: nothing says which files belong to the repository")
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def test_every_file() -> None:
    found: list[str] = []
    texts = 0
    for file in files():
        content = file.read_bytes()
        if b"\0" not in content:
            texts += 1
            found += offences(str(file.relative_to(ROOT)), content.decode())
    assert texts > 10
    assert not found, "\n" + "\n".join(found)
