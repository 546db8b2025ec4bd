"""Loggers for TensorBoard, Weights & Biases and MLflow, each by its own package, an extra of flowdp.

The packages are imported when a logger is made or a run begins, never by `import flowdp`.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowdp.errors import OptionError
from flowdp.observe.loggers.files import check_folder, free_path
from flowdp.observe.loggers.log import Every, Log, Number, Setting
from flowdp.policy.formats import format_error
from flowdp.validators import check_installed

__all__ = ["MLflowLogger", "TensorBoardLogger", "WandbLogger"]

log = logging.getLogger("flowdp")


class TensorBoardLogger(Log):
    """Writes the numbers of a run as TensorBoard's event files.

    The horizontal axis is the number of steps of all ranks; the settings are the run's hyper-parameters. A
    resumed run lets TensorBoard hide the numbers behind its checkpoint; a new one puts the event files that
    are there into a subfolder, a run of its own for TensorBoard.

    ::

        flowdp.Trainer(..., callbacks=[flowdp.TensorBoardLogger("runs/a")])

    Args:
        dir: The folder; `tensorboard --logdir` takes it or one above it.
        every: See `Log`.

    Raises:
        OptionError: TensorBoard is not installed, or the folder cannot be written to.
    """

    def __init__(self, dir: str | os.PathLike[str], *, every: Every = "epoch") -> None:
        check_installed("TensorBoardLogger", "tensorboard", "tensorboard")
        if not isinstance(dir, (str, os.PathLike)) or not str(dir):
            raise OptionError(f"TensorBoardLogger needs the path of a folder, not {dir!r}")
        check_folder("TensorBoardLogger", Path(dir))
        super().__init__(self, every=every)
        self._folder = Path(dir)
        self._writer: Any = None
        self._ending: Any = None  # the summary that ends a run which has not failed

    def begin(self, settings: Mapping[str, Setting], step: int) -> None:
        """See `RunLogger`."""
        from torch.utils.tensorboard import SummaryWriter  # slow to import
        from torch.utils.tensorboard.summary import hparams

        if step == 0:
            self._set_aside()
        self._writer = SummaryWriter(self._folder, purge_step=step + 1 if step else None)
        # As `add_hparams` does, which would write them into a folder, and so a run, of their own.
        given = {name: str(value) if value is None else value for name, value in settings.items()}
        *summaries, self._ending = hparams(given, {"train/loss": 0.0})
        for summary in summaries:
            self._writer.file_writer.add_summary(summary)
        self._writer.flush()

    def log(self, numbers: Mapping[str, Number], step: int) -> None:
        """See `RunLogger`."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def end(self, status: str) -> None:
        """See `RunLogger`."""
        if status != "failed":
            self._writer.file_writer.add_summary(self._ending)
        self._writer.close()

    def _set_aside(self) -> None:
        """Move the event files of another run into a subfolder."""
        files = list(self._folder.glob("events.out.tfevents.*"))
        if not files:
            return
        earlier = free_path(self._folder / "earlier")
        earlier.mkdir()
        for file in files:
            file.rename(earlier / file.name)
        log.warning("%s has event files of another run, which are in %s from now on", self._folder, earlier)


class WandbLogger(Log):
    """Logs a run to Weights & Biases.

    The horizontal axis is `global_step`. Where the process has a run of wandb's already (`wandb.init()` in
    the script), that is used, and left open. With an `id`, a resumed run continues that of W&B; its numbers
    behind the checkpoint, which come a second time, stay there twice.

    ::

        flowdp.Trainer(..., callbacks=[flowdp.WandbLogger("digits", mode="offline")])

    Args:
        project: Project of W&B; None: its default.
        every: See `Log`.
        **init: Other arguments of `wandb.init`, such as `name`, `id`, `dir` and `mode`.

    Raises:
        OptionError: wandb is not installed.
    """

    def __init__(self, project: str | None = None, *, every: Every = "epoch", **init: Any) -> None:
        check_installed("WandbLogger", "wandb", "wandb")
        super().__init__(self, every=every)
        self._init: dict[str, Any] = {"project": project, **init}
        self._service: Any = None
        self._is_own = True

    def begin(self, settings: Mapping[str, Setting], step: int) -> None:  # noqa: ARG002 - W&B appends
        """See `RunLogger`."""
        import wandb

        self._is_own = wandb.run is None
        resume = {"resume": "allow"} if self._init.get("id") is not None else {}
        self._service = wandb.init(**(resume | self._init)) if self._is_own else wandb.run
        self._service.config.update(dict(settings), allow_val_change=True)
        if self._is_own:
            # Its own axis counts the calls of log: of a step that were to fall wandb would drop the numbers.
            self._service.define_metric("*", step_metric="global_step")

    def log(self, numbers: Mapping[str, Number], step: int) -> None:
        """See `RunLogger`."""
        self._service.log({"global_step": step, **numbers})

    def end(self, status: str) -> None:
        """See `RunLogger`."""
        self._service.summary["status"] = status
        if self._is_own:
            self._service.finish(exit_code=int(status == "failed"))


class MLflowLogger(Log):
    """Logs a run to MLflow.

    The step of each number is the number of steps of all ranks. MLflow takes few characters in names: each
    other one is written as an underscore. A resumed run continues the newest run of that name in the
    experiment; numbers behind its checkpoint, which come a second time, stay there twice.

    ::

        flowdp.Trainer(..., callbacks=[flowdp.MLflowLogger("digits", run_name="a")])

    Args:
        experiment: Name of the experiment; made where it is not there.
        run_name: Name of the run; None: MLflow draws one, and a resumed run is a new one.
        tracking_uri: Address of the store; None: MLflow's own choice, which is `MLFLOW_TRACKING_URI`, else
            `mlflow.db` or `mlruns` in the working directory, by its version.
        every: See `Log`.

    Raises:
        OptionError: MLflow is not installed, or refuses the store.
    """

    def __init__(
        self,
        experiment: str = "Default",
        *,
        run_name: str | None = None,
        tracking_uri: str | os.PathLike[str] | None = None,
        every: Every = "epoch",
    ) -> None:
        check_installed("MLflowLogger", "mlflow", "mlflow")
        from mlflow import MlflowClient, get_tracking_uri
        from mlflow.exceptions import MlflowException

        store = get_tracking_uri() if tracking_uri is None else os.fspath(tracking_uri)
        try:
            self._client = MlflowClient(tracking_uri=store)
        except (MlflowException, ImportError) as error:
            raise OptionError(
                f"MLflow refuses the store {store!r} ({format_error(error):.200}): give "
                "MLflowLogger(tracking_uri='sqlite:///mlflow.db'), which needs SQLAlchemy and Alembic (pip "
                "install 'flowdp[mlflow]'), or the address of a server, 'http://localhost:5000'; a folder, "
                "'./mlruns', is taken with MLFLOW_ALLOW_FILE_STORE=true in the environment"
            ) from error
        super().__init__(self, every=every)
        self._experiment, self._name = experiment, run_name
        self._id = ""

    def begin(self, settings: Mapping[str, Setting], step: int) -> None:
        """See `RunLogger`."""
        from mlflow.entities import Param

        known = self._client.get_experiment_by_name(self._experiment)
        experiment = (
            self._client.create_experiment(self._experiment) if known is None else known.experiment_id
        )
        runs = self._client.search_runs([experiment], order_by=["start_time DESC"]) if step else []
        run = next((run for run in runs if self._name and run.info.run_name == self._name), None)
        if run is None:
            run = self._client.create_run(experiment, run_name=self._name)
        else:
            self._client.update_run(run.info.run_id, status="RUNNING")
        self._id = run.info.run_id
        # MLflow lets no parameter change; those of a resumed run stay as they were at first.
        params = [Param(_key(name), str(value)) for name, value in settings.items()]
        fresh = [param for param in params if param.key not in run.data.params]
        for start in range(0, len(fresh), 100):  # what one request takes
            self._client.log_batch(self._id, params=fresh[start : start + 100])

    def log(self, numbers: Mapping[str, Number], step: int) -> None:
        """See `RunLogger`."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [Metric(_key(name), float(value), now_ms, step) for name, value in numbers.items()]
        for start in range(0, len(metrics), 1000):
            self._client.log_batch(self._id, metrics=metrics[start : start + 1000])

    def end(self, status: str) -> None:
        """See `RunLogger`."""
        self._client.set_terminated(self._id, "FAILED" if status == "failed" else "FINISHED")


def _key(name: str) -> str:
    """Name of a number as MLflow takes it."""
    return re.sub(r"[^\w\-. :/]", "_", name)
