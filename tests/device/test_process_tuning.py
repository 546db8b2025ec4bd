from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

import flowdp.device.process_tuning as process
from flowdp.device.process_tuning import SWITCH_INTERVAL_S, as_tuning, keep_freed_memory, tuned_process
from flowdp.errors import OptionError
from flowdp.options import ProcessTuning
from tests.device.fresh_thread import in_thread
from tests.limits import HANG_S

NONE = ProcessTuning(openmp=False, malloc=False, switch_interval=False)
INTERVAL = ProcessTuning(openmp=False, malloc=False)
POOL = ProcessTuning(malloc=False, switch_interval=False)

linux = pytest.mark.skipif(
    sys.platform != "linux", reason="counts threads and page faults as Linux shows them"
)


@pytest.fixture(autouse=True)
def python_default() -> Iterator[None]:
    """Start every test with the interpreter's default."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield
    assert process._switch_interval._inside == 0
    sys.setswitchinterval(before)


class TestOptions:
    def test_a_bool_is_all_or_none(self) -> None:
        assert as_tuning(True) == ProcessTuning()
        assert as_tuning(False) == NONE
        assert as_tuning(POOL) is POOL

    @pytest.mark.parametrize("wrong", [None, 1, "yes", {"malloc": True}])
    def test_anything_else_is_an_option_error(self, wrong: object) -> None:
        with pytest.raises(OptionError, match="tune_process must be True, False or a ProcessTuning"):
            as_tuning(wrong)  # type: ignore[arg-type]


FAULTS = """
import ctypes, resource, torch
from flowdp.device.process_tuning import ProcessTuning, tuned_process
torch.set_num_threads(1)
def faults():
    steps = 5
    for step in range(steps + 3):
        if step == 3:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        activations = [torch.ones(2 << 20) for _ in range(8)]     # 8 x 8 MiB, freed at the step's end
        del activations
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / steps
# As in a new process. Later, glibc changes it depending on the addresses of blocks.
ctypes.CDLL(None).mallopt(-3, 128 << 10)
default = faults()
with tuned_process(ProcessTuning(openmp=False, switch_interval=False)):
    print(default, faults())
"""


@linux
class TestMalloc:
    @pytest.mark.skipif("glibc" not in str(os.confstr("CS_GNU_LIBC_VERSION")), reason="needs glibc")
    def test_freed_memory_stays(self) -> None:
        # In a child process, as the thresholds cannot be reset.
        chosen = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
        child = subprocess.run(
            [sys.executable, "-c", FAULTS],
            env={name: value for name, value in os.environ.items() if name not in chosen},
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
        assert child.returncode == 0, child.stderr
        default, tuned = map(float, child.stdout.split())
        assert default > 20  # 16,384 with pages of 4 KiB, 32 with huge ones
        assert tuned < 5

    @pytest.mark.parametrize(
        "choice",
        [
            {"MALLOC_MMAP_THRESHOLD_": "131072"},
            {"MALLOC_TRIM_THRESHOLD_": "131072"},
            {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"},
        ],
    )
    def test_a_choice_of_the_user_stays(
        self, choice: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in choice.items():
            monkeypatch.setenv(name, value)
        keep_freed_memory.cache_clear()
        assert keep_freed_memory() is False
        keep_freed_memory.cache_clear()


class TestSwitchInterval:
    def test_short_while_a_run_lives(self) -> None:
        with tuned_process(INTERVAL):
            assert sys.getswitchinterval() == SWITCH_INTERVAL_S
        assert sys.getswitchinterval() == 0.005

    def test_the_last_of_several_runs_restores_it(self) -> None:
        first, second = tuned_process(INTERVAL), tuned_process(INTERVAL)
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert sys.getswitchinterval() == SWITCH_INTERVAL_S
        in_thread(lambda: second.__exit__(None, None, None))  # a run may end in another thread
        assert sys.getswitchinterval() == 0.005

    def test_restored_after_an_error(self) -> None:
        with pytest.raises(ZeroDivisionError), tuned_process(INTERVAL):
            raise ZeroDivisionError
        assert sys.getswitchinterval() == 0.005

    def test_a_shorter_one_of_the_user_stays(self) -> None:
        sys.setswitchinterval(2e-4)
        with tuned_process(INTERVAL):
            assert sys.getswitchinterval() == pytest.approx(2e-4)
        assert sys.getswitchinterval() == pytest.approx(2e-4)

    def test_a_change_during_the_run_stays(self) -> None:
        with tuned_process(INTERVAL):
            sys.setswitchinterval(0.02)
        assert sys.getswitchinterval() == 0.02

    def test_switched_off(self) -> None:
        with tuned_process(NONE):
            assert sys.getswitchinterval() == 0.005
