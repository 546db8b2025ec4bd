"""Tests of the observer: every callback gets every record in order, whatever other callbacks do."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from flowdp.errors import FlowdpError
from flowdp.observe import observer as observer_module
from flowdp.observe.callbacks import METHODS, Callback, EarlyStopping
from flowdp.observe.observer import Observer
from flowdp.observe.records import Records
from flowdp.policy.tally import EpochMetrics, Tally
from flowdp.protocol.commands import EpochStarted, EvaluationEnded, Finish, RoundEnded
from tests.limits import HANG_S

FINISH = Finish(None, False, 10, 2)


@dataclass(frozen=True)
class Saved:
    version: int


def round_record(number: int) -> RoundEnded:
    none = (0.0,)
    return RoundEnded(number, 1, 0, number + 1, (1,), (1,), 0.0, 0.1, 1.0, none, none, none, 0.0, 1)


def epoch_record(number: int) -> EpochMetrics:
    return Tally(number, 1).result(1.0, 1, number, None)


class Writes(Callback):
    """Records its calls and their threads."""

    def __init__(self, name: str, book: list[tuple[str, str, Any]]) -> None:
        self.name, self.book = name, book
        self.threads: set[str] = set()

    def write(self, method: str, value: Any) -> None:
        self.book.append((self.name, method, value))
        self.threads.add(threading.current_thread().name)

    def on_train_start(self, run: Any) -> None:
        self.write("on_train_start", run)

    def on_epoch_start(self, epoch: int) -> None:
        self.write("on_epoch_start", epoch)

    def on_round(self, record: RoundEnded) -> None:
        self.write("on_round", record.round)

    def on_evaluation(self, record: EvaluationEnded) -> None:
        self.write("on_evaluation", record.global_step)

    def on_epoch_end(self, metrics: EpochMetrics) -> None:
        self.write("on_epoch_end", metrics.epoch)

    def on_checkpoint(self, checkpoint: Any) -> None:
        self.write("on_checkpoint", checkpoint.version)

    def on_exception(self, error: BaseException) -> None:
        self.write("on_exception", error)

    def on_train_end(self, state: Any) -> None:
        self.write("on_train_end", state)


class Raises(Callback):
    """Raises in the given methods."""

    def __init__(self, *methods: str) -> None:
        for method in methods:
            setattr(self, method, self._raise)

    def _raise(self, _: Any) -> None:
        raise ValueError("boom")


class EndsRun(Raises):
    ends_run = True


class Stands(Callback):
    """Waits in `on_epoch_end` until it is released."""

    def __init__(self) -> None:
        self.stands, self.go = threading.Event(), threading.Event()

    def on_epoch_end(self, metrics: EpochMetrics) -> None:
        self.stands.set()
        assert self.go.wait(HANG_S)


class Case:
    """A run's records, and callbacks that observe them."""

    def __init__(self, *callbacks: Callback) -> None:
        self.records = Records()
        self.failed: list[BaseException] = []
        self.asked = 0
        self.observer = Observer(self.records, callbacks, self.failed.append)

    def start(self) -> None:
        self.observer.start("the run", self.error, self.state)

    def error(self) -> BaseException | None:
        return self.failed[0] if self.failed else None

    def state(self) -> str:
        self.asked += 1
        return "the state"

    def end(self) -> None:
        self.records.end(FINISH, over=True)

    def whole(self) -> None:
        """A whole run of one epoch."""
        self.start()
        self.records.add(EpochStarted(0))
        self.records.add(round_record(0))
        self.records.add(EvaluationEnded(1, 0, {"loss": 1.0}))
        self.records.add(epoch_record(0))
        self.records.add(Saved(1))
        self.end()
        assert self.observer.close(10)


@contextmanager
def let_go(stands: Stands) -> Iterator[None]:
    try:
        yield
    finally:
        stands.go.set()


def test_all_hear_everything_in_order_on_one_thread() -> None:
    book: list[tuple[str, str, Any]] = []
    first, second = Writes("a", book), Writes("b", book)
    case = Case(first, EarlyStopping(), second)
    case.records.add(round_record(0))  # training does not wait for the observer
    case.start()
    rounds = [round_record(number) for number in (1, 2)]
    for record in (epoch_record(0), Saved(1), EpochStarted(1), *rounds, epoch_record(1)):
        case.records.add(record)
    case.end()
    assert case.observer.close(10)
    heard = [
        ("on_train_start", "the run"),
        ("on_round", 0),
        ("on_epoch_end", 0),
        ("on_checkpoint", 1),
        ("on_epoch_start", 1),
        ("on_round", 1),
        ("on_round", 2),
        ("on_epoch_end", 1),
        ("on_train_end", "the state"),
    ]
    assert book == [(name, *said) for said in heard for name in ("a", "b")]
    assert first.threads == second.threads == {"flowdp-observer"}
    assert case.asked == 1
    assert case.observer.complaints == ()


@pytest.mark.parametrize("callbacks", [(), (EarlyStopping(),), (Callback(),)])
def test_without_anything_to_call_there_is_no_thread(callbacks: tuple[Callback, ...]) -> None:
    case = Case(*callbacks)
    case.start()
    assert case.observer._thread is None
    assert case.observer.close(0)
    assert not case.observer.is_own_thread()
    assert case.observer.stack == ""


@pytest.mark.parametrize("method", [name for name in METHODS if name != "on_exception"])
def test_what_a_callback_raises_does_not_reach_the_others(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    book: list[tuple[str, str, Any]] = []
    case = Case(Raises(method), Writes("a", book))
    case.whole()
    assert [said for _, said, _ in book] == [name for name in METHODS if name != "on_exception"]
    assert case.failed == []
    assert case.records.problems == (f"Raises.{method} raised ValueError: boom",)
    [message] = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert message.getMessage() == f"Raises.{method} raised ValueError: boom; the run does not end by it"
    assert message.exc_info is not None


def test_it_is_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    case = Case(Raises("on_round"), Raises("on_round", "on_epoch_end"))
    case.start()
    for number in range(3):
        case.records.add(round_record(number))
    case.records.add(epoch_record(0))
    case.end()
    assert case.observer.close(10)
    boom = "raised ValueError: boom"
    assert case.records.problems == (
        *[f"Raises.on_round {boom} (3 times)"] * 2,
        f"Raises.on_epoch_end {boom}",
    )
    assert len(caplog.records) == 3


@pytest.mark.parametrize("method", [name for name in METHODS if name != "on_exception"])
def test_it_ends_the_run_where_the_class_says_so(method: str, caplog: pytest.LogCaptureFixture) -> None:
    book: list[tuple[str, str, Any]] = []
    case = Case(EndsRun(method), Writes("a", book))
    case.whole()
    [error] = case.failed
    assert type(error) is FlowdpError
    assert str(error) == f"EndsRun.{method} raised ValueError: boom"
    assert isinstance(error.__cause__, ValueError)
    assert caplog.records[0].getMessage().endswith("; it ends the run")
    assert book[-1] == ("a", "on_train_end", "the state" if method == "on_train_end" else None)
    assert ("a", "on_exception", error) in book or method == "on_train_end"


def test_without_a_failure_callbacks_have_their_time() -> None:
    stands = Stands()
    case = Case(stands)
    with let_go(stands):
        case.start()
        case.records.add(epoch_record(0))
        case.end()
        assert stands.stands.wait(HANG_S)
        assert not case.observer.close(0.01)
        assert case.observer.inside == "Stands.on_epoch_end"
        assert "self.go.wait(HANG_S)" in case.observer.stack
        stands.go.set()
        assert case.observer.close()
    assert case.observer.inside == ""


@pytest.mark.parametrize("late", [False, True], ids=["before", "while somebody waits"])
def test_after_a_failure_one_that_does_not_return_is_left_behind(
    late: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(observer_module, "GRACE_S", 0.05)
    monkeypatch.setattr(observer_module, "LISTEN_S", 0.01)
    stands, book = Stands(), []
    case = Case(stands, Writes("a", book))
    unknown = iter([None] * 3 if late else ())
    case.error = lambda: next(unknown, RuntimeError("a step failed"))  # type: ignore[method-assign]
    with let_go(stands):
        case.start()
        case.records.add(epoch_record(0))
        case.end()
        assert stands.stands.wait(HANG_S)
        assert not case.observer.close()
        assert caplog.records[-1].getMessage().startswith("Stands.on_epoch_end does not return")
        assert "self.go.wait(HANG_S)" in caplog.text
        monkeypatch.setattr(observer_module, "GRACE_S", 1e9)  # a second close does not wait again
        assert not case.observer.close()
        stands.go.set()
        assert case.observer._thread is not None
        case.observer._thread.join(HANG_S)
    assert case.observer.close(0)
    assert book[-1] == ("a", "on_train_end", None)  # it is called at the end all the same
    assert len([one for one in caplog.records if one.levelno == logging.WARNING]) == 1


def test_a_callback_may_ask_whether_it_would_wait_for_itself() -> None:
    answers: list[bool] = []
    callback = Callback()
    case = Case()

    def ask(_: Any) -> None:
        answers.extend([case.observer.is_own_thread(), case.observer.close()])

    callback.on_epoch_end = ask  # type: ignore[method-assign]
    case.observer = Observer(case.records, [callback], case.failed.append)
    case.whole()
    assert answers == [True, False]
    assert not case.observer.is_own_thread()
