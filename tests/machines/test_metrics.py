"""An evaluation by several machines has the numbers of one device that sees all samples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.machines.launch import Job

pytest.importorskip("torchmetrics")

from tests.machines.metrics import CASES, REFUSED, numbers, trainer

pytestmark = pytest.mark.posix

MACHINES = 2


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """A job that has evaluated all cases."""
    with Job("tests.machines.metrics", *CASES, REFUSED, processes=MACHINES) as done:
        done.ended()
        yield done


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_of_one_device(job: Job, case: str) -> None:
    alone = numbers(trainer(case, 1, machines=False).start())
    assert len(alone) == (4 if case == "by steps" else 2)
    found = job.wait_for("evaluated", MACHINES * len(alone), lambda one: one["case"] == case)
    for index, wanted in enumerate(alone):
        first, second = (one for one in found if one["index"] == index)
        assert (first["eval"], first["arrays"]) == (second["eval"], second["arrays"])
        assert first["eval"] == pytest.approx(wanted["eval"], rel=1e-5)
        assert first["arrays"].keys() == wanted["arrays"].keys()
        for name, values in first["arrays"].items():
            assert values == pytest.approx(wanted["arrays"][name], rel=1e-5)


def test_a_metric_that_machine_0_never_has_is_an_error_on_all(job: Job) -> None:
    for one in job.wait_for("refused", MACHINES, lambda one: one["case"] == REFUSED):
        assert "updated on another machine and not on machine 0" in one["error"]
