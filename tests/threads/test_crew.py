"""Tests of crews: jobs run at once, every error is reported, a Ctrl-C is survived, no thread is left."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest

from flowdp.threads.crew import Crew, _Job
from tests.limits import HANG_S


@pytest.fixture
def crew() -> Iterator[Crew]:
    crew = Crew(["zero", "one", "two"])
    yield crew
    crew.close()


def name() -> str:
    return threading.current_thread().name


def fail(error: BaseException) -> None:
    raise error


def test_each_job_runs_in_the_thread_of_its_place(crew: Crew) -> None:
    assert crew.run([name, None, name]) == ["zero", None, "two"]
    assert crew.run([None, name, None]) == [None, "one", None]
    assert crew.run([None, None, None]) == [None, None, None]


def test_jobs_run_at_once(crew: Crew) -> None:
    met = threading.Barrier(3)
    places = crew.run([partial(met.wait, HANG_S)] * 3)
    assert sorted(place or 0 for place in places) == [0, 1, 2]


def test_a_place_without_a_name_works_in_the_calling_thread() -> None:
    crew = Crew([None, "other"])
    met = threading.Barrier(2)

    def meet() -> str:
        met.wait(HANG_S)
        return name()

    assert crew.run([meet, meet]) == [name(), "other"]
    with pytest.raises(ValueError, match="inline"):
        crew.run([partial(fail, ValueError("inline")), None])
    crew.close()


def test_a_job_for_each_place(crew: Crew) -> None:
    with pytest.raises(ValueError, match="zip"):
        crew.run([name])


# ---------------------------------------------------------------- errors
def test_the_first_error_in_order_of_places_is_raised_and_tells_the_others(crew: Crew) -> None:
    later = threading.Event()

    def first() -> None:
        later.wait(HANG_S)  # ends last, and is reported all the same
        raise KeyError("first")

    def second() -> None:
        try:
            raise OSError("second")
        finally:
            later.set()

    with pytest.raises(KeyError, match="first") as caught:
        crew.run([None, first, second])
    assert caught.value.__notes__ == ["at the same time: OSError: second"]


def test_an_error_is_raised_when_all_have_ended(crew: Crew) -> None:
    ended = threading.Event()
    failed = threading.Event()

    def slow() -> None:
        failed.wait(HANG_S)
        ended.set()

    def quick() -> None:
        failed.set()
        raise ValueError("quick")

    with pytest.raises(ValueError, match="quick"):
        crew.run([quick, slow, None])
    assert ended.is_set()


def test_after_an_error_the_crew_goes_on(crew: Crew) -> None:
    with pytest.raises(SystemExit):
        crew.run([partial(fail, SystemExit(3)), None, None])
    assert crew.run([name, name, name]) == ["zero", "one", "two"]


# ---------------------------------------------------------------- Ctrl-C
class Interrupted:
    """A crew whose first job continues after a Ctrl-C."""

    def __init__(self, crew: Crew) -> None:
        self.release = threading.Event()
        self.is_done = False
        with pytest.raises(KeyboardInterrupt):
            crew.run([self._go_on, None, None])

    def _go_on(self) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        assert self.release.wait(HANG_S)
        self.is_done = True


@pytest.mark.posix
def test_the_call_after_a_ctrl_c_waits_for_what_still_runs(crew: Crew) -> None:
    left = Interrupted(crew)
    assert not left.is_done
    timer = threading.Timer(0.1, left.release.set)
    timer.start()
    assert crew.run([None, lambda: left.is_done, None]) == [None, True, None]
    timer.join()


def test_a_ctrl_c_while_jobs_are_handed_out_leaves_none_to_wait_for(crew: Crew) -> None:
    class Box:
        def put(self, job: object) -> None:
            raise KeyboardInterrupt

    real, crew._boxes[1] = crew._boxes[1], Box()  # type: ignore[call-overload]
    with pytest.raises(KeyboardInterrupt):
        crew.run([name, name, name])
    crew._boxes[1] = real
    assert crew.run([name, name, name]) == ["zero", "one", "two"]


def test_a_ctrl_c_just_behind_a_wait_leaves_nothing_to_wait_for() -> None:
    job = _Job(lambda: 3)
    job()
    assert job._end.acquire(timeout=0)  # an interrupted caller got this far
    job.wait()
    assert job.result == 3


@pytest.mark.posix
def test_settle_waits_for_what_still_runs(crew: Crew) -> None:
    left = Interrupted(crew)
    timer = threading.Timer(0.1, left.release.set)
    timer.start()
    crew.settle()
    assert left.is_done
    timer.join()


@pytest.mark.posix
def test_a_ctrl_c_while_waiting_for_what_still_runs_is_heard(crew: Crew) -> None:
    left = Interrupted(crew)
    main = threading.main_thread().ident or 0
    timer = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT))

    def wait() -> None:
        timer.start()
        crew.run([None, name, None])

    with pytest.raises(KeyboardInterrupt):
        wait()
    timer.join()
    left.release.set()
    assert crew.run([name, name, None]) == ["zero", "one", None]


# ---------------------------------------------------------------- life cycle
def test_a_thread_of_the_crew_cannot_hand_it_work(crew: Crew) -> None:
    with pytest.raises(RuntimeError, match="zero cannot hand work to its own crew"):
        crew.run([partial(crew.run, [None, name, None]), None, None])


def test_a_job_of_the_caller_cannot_hand_it_work_either() -> None:
    crew = Crew([None, "one"])
    for ask in (lambda: crew.run([None, name]), crew.settle):
        with pytest.raises(RuntimeError, match="cannot hand work to its own crew"):
            crew.run([ask, None])
    assert crew.run([None, name]) == [None, "one"]
    crew.close()


def test_two_callers_take_turns(crew: Crew) -> None:
    found = []
    callers = [
        threading.Thread(target=lambda: found.extend(crew.run([name] * 3) for _ in range(50))) for _ in "ab"
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(HANG_S)
    assert found == [["zero", "one", "two"]] * 100


def test_it_closes_twice_and_then_takes_no_work(crew: Crew) -> None:
    crew.close()
    crew.close()
    assert not {"zero", "one", "two"} & {thread.name for thread in threading.enumerate()}
    with pytest.raises(RuntimeError, match=r"have been closed: make them anew, by setup\(\)"):
        crew.run([name, None, None])


def test_threads_end_when_the_crew_is_collected() -> None:
    crew = Crew(["collected"])
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "collected"]
    crew.run([name])
    gone = weakref.ref(crew)
    del crew
    gc.collect()
    assert gone() is None
    thread.join(HANG_S)
    assert not thread.is_alive()


def test_a_context_around_each_thread() -> None:
    seen: list[str] = []

    @contextmanager
    def around(place: int) -> Iterator[None]:
        seen.append(f"{name()} in {place}")
        yield
        seen.append(f"{name()} out {place}")

    crew = Crew([None, "inner"], around)
    crew.run([name, name])
    assert seen == ["inner in 1"]
    crew.close()
    assert seen == ["inner in 1", "inner out 1"]


class Payload:
    def weigh(self) -> Payload:
        return self


def test_nothing_of_a_job_is_kept(crew: Crew) -> None:
    payload = Payload()
    gone = weakref.ref(payload)
    assert crew.run([payload.weigh, None, None])[0] is payload
    del payload
    # The thread drops its job before it waits for the next.
    crew.run([None, None, name])
    crew.run([name, None, None])
    assert gone() is None


def test_a_job_is_dropped_before_its_caller_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    payload, held = Payload(), []
    gone = weakref.ref(payload)
    job = _Job(partial(bool, payload))
    monkeypatch.setattr(job, "_end", SimpleNamespace(release=lambda: held.append(gone())))
    del payload
    job()
    assert held == [None]


def test_nothing_of_a_failed_job_is_kept(crew: Crew) -> None:
    payload = Payload()
    gone = weakref.ref(payload)

    def bad(payload: Payload) -> None:
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        crew.run([partial(bad, payload), None, None])
    del payload
    crew.run([name, None, None])
    gc.collect()
    assert gone() is None
