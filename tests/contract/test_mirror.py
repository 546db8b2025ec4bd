"""Tests lie where their module lies. A module without decisions of its own needs no file: others test it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

FREE_FOLDERS = {
    "contract": "rules about the whole repository",
    "numerics": "the engine against plain PyTorch",
    "reliability": "whole runs that are cut, resumed, hurt and evaluated",
    "gpu": "what needs CUDA devices",
    "late": "runs on emulated devices that are late",
    "real": "training scripts as others write them",
    "machines": "jobs of several processes, under launchers, cut and steered",
    "vectors": "recorded behaviour, run through the production functions",
    "bench": "mirrors bench/",
    "docs": "the code of the pages, and the site made of them",
    "browser": "pages, traces and notebooks in real programs",
    "simulator": "random virtual clusters, their judges, and the tests of these",
}
FREE_FILES = {
    "test_doors.py": "one run through each door",
    "test_exit.py": "how processes end that have a run",
    "test_step_path.py": "calls of a step, over all modules",
    "data_parallel/test_patterns.py": "loops as people write them, against plain PyTorch",
    "data_parallel/test_pattern_state.py": "the same: what a model keeps",
    "data_parallel/test_pattern_graphs.py": "the same: what loops do with graphs",
    "data_parallel/test_pattern_hooks.py": "the same: what watches a model",
    "data_parallel/test_pattern_containers.py": "the same: containers among the arguments",
}


def mirror_of(module: str) -> str:
    """Where the tests of `module` lie, as a path below tests/."""
    folder, _, name = module.rpartition("/")
    return f"{folder}/test_{name}" if folder else f"test_{name}"


def modules_below(folder: Path, pattern: str = "*.py") -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob(pattern)}


def offences(package: Path, tests: Path) -> list[str]:
    """Test files without a module."""
    modules = {m for m in modules_below(package) if not m.rpartition("/")[2].startswith("__")}
    present = modules_below(tests, "test_*.py")
    mirrored = {file for file in present if file.split("/")[0] not in FREE_FOLDERS} - FREE_FILES.keys()
    wanted = {mirror_of(module) for module in modules}
    return [f"tests/{file} mirrors no module" for file in sorted(mirrored - wanted)]


def test_tests_mirror_modules() -> None:
    found = offences(ROOT / "flowdp", ROOT / "tests")
    assert not found, "\n" + "\n".join(found)


def test_bench_tests_mirror_benches() -> None:
    wanted = {mirror_of(module) for module in modules_below(ROOT / "bench")}
    assert modules_below(ROOT / "tests/bench", "test_*.py") <= wanted
