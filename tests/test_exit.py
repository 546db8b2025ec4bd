"""Tests of the end of a process with a run: without `join()`, by Ctrl-C, by a failure, by `sys.exit`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.limits import HANG_S

pytestmark = pytest.mark.posix

ROOT = Path(__file__).resolve().parents[1]

# `at_end` is registered before flowdp is imported, so it runs after flowdp has waited for the run.
BEGIN = """
import atexit, os, signal, sys, threading

@atexit.register
def at_end():
    print("at exit:", ending(), flush=True)

def ending():
    return f"{run.status().phase} {run.state and (run.state.interrupted, run.state.global_step)}"

import torch
import flowdp

never = threading.Event()
steps = threading.Semaphore(0)
taken = []

def loss(model, batch):
    taken.append(1)
    steps.release()
    return (model(batch) - batch).square().mean()

def trainer(loss=loss, epochs=3, **options):
    return flowdp.Trainer(
        torch.nn.Linear(1, 1), lambda params: torch.optim.SGD(params, 1e-3), loss,
        dataset=torch.ones(20, 1), per_device_batch_size=2, epochs=epochs, devices=2,
        **({"policy": "cadence", "progress": False} | options))

def endless(loss=loss, **options):
    return trainer(loss, epochs=None, max_steps=10**9, **options)

def is_in(name, *functions):
    thread = next((thread for thread in threading.enumerate() if thread.name == name), None)
    frame, names = sys._current_frames().get(thread and thread.ident), set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return names.issuperset(functions)

def until_is_in(name, *functions):
    while not is_in(name, *functions):
        steps.acquire(timeout=0.01)

def when_main_is_in(*functions, do):
    def watch():
        until_is_in("MainThread", "wait_for", *functions)
        do()
    threading.Thread(target=watch, daemon=True).start()

def say_going():
    print("going", flush=True)

def stuck(model, batch):
    if flowdp.current_worker().rank == 0:
        never.wait()
    return loss(model, batch)

def interrupt():
    # A thread inside torch when the interpreter ends would end the process by an abort.
    until_is_in("flowdp-worker-1", "enter")
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
"""


def run_script(body: str, *, interrupt: bool = False) -> tuple[int, str, str]:
    """Run a script, with a Ctrl-C once it prints "going"; returns its exit code, output and errors."""
    command = [sys.executable, "-W", "error", "-c", BEGIN + textwrap.dedent(body)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    ) as child:
        try:
            printed = ""
            if interrupt:
                assert child.stdout is not None
                printed = child.stdout.readline()
                assert printed == "going\n", child.communicate(timeout=HANG_S)
                child.send_signal(signal.SIGINT)
            output, errors = child.communicate(timeout=HANG_S)
        finally:
            child.kill()
    return child.returncode, printed + output, errors


def test_a_script_that_ends_without_join_waits_for_its_runs() -> None:
    code, printed, errors = run_script(
        """
        import gc
        run = trainer().start()
        run.pause()
        trainer().start()  # not kept
        gc.collect()
        said = ending
        def ending():
            return f"{said()} {len(taken)} steps"
        """
    )
    assert (code, printed, errors) == (0, "at exit: done (False, 30) 60 steps\n", "")


def test_ctrl_c_while_a_script_waits_at_its_end() -> None:
    code, printed, errors = run_script(
        """
        run = endless().start()
        when_main_is_in("_end_of_process", do=say_going)
        """,
        interrupt=True,
    )
    assert printed.startswith("going\nat exit: stopped (True, ")
    assert errors == ""
    assert code == -signal.SIGINT  # as Python ends on an uncaught Ctrl-C; a shell shows 130


def test_a_run_that_is_stopped_by_the_end_of_its_script_says_where_it_goes_on(tmp_path: Path) -> None:
    code, printed, errors = run_script(
        f"""
        run = endless(progress="auto", checkpoint={str(tmp_path)!r}).start()
        say_going()
        never.wait()
        """,
        interrupt=True,
    )
    assert printed.startswith("going\nat exit: stopped (True, ")
    assert errors.count("flowdp: stopped after ") == 1
    assert errors.endswith("start again with resume=True to go on\n")
    assert code == -signal.SIGINT


def test_a_second_ctrl_c_does_not_wait_for_a_stuck_rank() -> None:
    code, printed, errors = run_script(
        """
        run = endless(stuck).start()
        when_main_is_in("_end_of_process", do=say_going)
        when_main_is_in("_end_of_process", "_stop", do=interrupt)
        """,
        interrupt=True,
    )
    assert (printed, errors) == ("going\nat exit: running None\n", "")
    assert code == -signal.SIGINT


def test_a_ctrl_c_that_does_not_wake_the_main_thread_is_heard() -> None:
    # A signal received by another thread leaves the main thread in its wait, like one that comes just before
    # the wait begins.
    code, printed, errors = run_script(
        """
        def interrupt():
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        run = endless(lambda model, batch: never.wait(0.05) or loss(model, batch)).start()
        when_main_is_in("_await", do=interrupt)
        run.join()
        """
    )
    assert printed.startswith("at exit: stopped (True, ")
    assert errors.endswith("\nKeyboardInterrupt\n")
    assert code == -signal.SIGINT


def test_a_script_whose_run_failed_says_so_once() -> None:
    code, printed, errors = run_script(
        """
        def failing(model, batch):
            raise ValueError("boom")
        run = trainer(failing, progress="auto").start()
        """
    )
    assert (code, printed) == (0, "at exit: failed None\n")
    assert "flowdp: stopped" not in errors
    assert errors.count("Exception in thread flowdp-coordinator:") == 1
    assert errors.count("flowdp.errors.StepError: rank ") == 1
    assert "ValueError: boom" in errors


def test_a_forked_child_of_a_process_with_a_run_can_exit(tmp_path: Path) -> None:
    code, printed, errors = run_script(
        f"""
        import warnings
        warnings.simplefilter("ignore")  # newer Pythons warn of a fork beside threads
        parent = os.getpid()
        def ending():
            return "parent" if os.getpid() == parent else "child"
        class Notes(flowdp.Callback):
            def on_epoch_end(self, metrics):
                pass
        model = torch.nn.Linear(1, 1)
        net = flowdp.setup(model, torch.optim.SGD(model.parameters(), 1e-3), devices=2, progress=False)
        net(torch.ones(4, 1))
        heard = flowdp.RuntimeOptions(handle_sigterm=True)
        run = endless(checkpoint={str(tmp_path)!r}, callbacks=[Notes()], runtime=heard).start()
        try:
            child = os.fork()
            if child == 0:
                sys.exit(len(flowdp.runs()))
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        finally:
            if os.getpid() == parent:
                print("exit", code, run.done, flush=True)
                run.stop()
                run.join()
        """
    )
    assert "exit 0 False\n" in printed, errors
    assert printed.endswith("at exit: parent\n")
    assert (code, errors) == (0, "")


FORKED = """
import os, sys, warnings
warnings.simplefilter("ignore")  # newer Pythons warn of a fork beside threads
import torch
import flowdp

dp = flowdp.setup(torch.nn.Linear(3, 1), devices=["cpu", "cpu"], progress=False)
dp(torch.ones(4, 3))
child = os.fork()
if not child:
    try:
        dp(torch.ones(4, 3))
    except RuntimeError as error:
        print("child:", error, flush=True)
    sys.exit(3)
_, status = os.waitpid(child, 0)
print("child ended with", os.waitstatus_to_exitcode(status))
print(tuple(dp(torch.ones(4, 3)).shape))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_process_is_told_and_ends() -> None:
    """Its threads are in the other process, so it would wait forever."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told, ended, shape = done.stdout.splitlines()
    assert told.startswith(
        "child: the threads of the devices are in the process that this one was forked from"
    )
    assert (ended, shape) == ("child ended with 3", "(4, 1)")
