"""Every public name of flowdp."""

from flowdp.checkpoint.writer import Checkpoint
from flowdp.collective.local_group import local_groups
from flowdp.collective.process_group import ProcessGroup, Work
from flowdp.data_parallel.loss_context import LossContext
from flowdp.data_parallel.setup import setup
from flowdp.data_parallel.windows import Window, WindowResult
from flowdp.data_parallel.wrapper import DataParallel
from flowdp.ddp.buckets import GradientBucket
from flowdp.ddp.distributed import DistributedDataParallel
from flowdp.ddp.manual import Ddp
from flowdp.ddp.synchronizer import GradientSynchronizer
from flowdp.device.discovery import devices
from flowdp.device.draws import seed_everything
from flowdp.device.worker_context import current_worker, record_scalar
from flowdp.engine.evaluation import EvaluationOptions
from flowdp.errors import (
    CheckpointError,
    CollectiveAborted,
    CollectiveError,
    CollectiveTimeout,
    DataError,
    DeviceError,
    FlowdpError,
    MachineLostError,
    MachineWaitsError,
    OptionError,
    OutOfDeviceMemory,
    ProtocolError,
    StallError,
    StateError,
    StepError,
)
from flowdp.observe.callbacks import EMA, Callback, EarlyStopping, OnCheckpoint
from flowdp.observe.loggers.files import CSVLogger, JSONLLogger
from flowdp.observe.loggers.log import Log, RunLogger
from flowdp.observe.loggers.services import MLflowLogger, TensorBoardLogger, WandbLogger
from flowdp.options import (
    CadenceOptions,
    CaptureOptions,
    CheckpointOptions,
    FailureOptions,
    MachineOptions,
    OuterOptions,
    ProcessTuning,
    ReadingOptions,
    RuntimeOptions,
)
from flowdp.policy.efficiency import EfficiencyReport
from flowdp.policy.el_che import ElChe
from flowdp.policy.tally import EpochMetrics, MetricArray, RankMetrics
from flowdp.protocol.commands import EvaluationEnded, RoundEnded
from flowdp.replica.learning_rate import SchedulerOptions
from flowdp.sim.plan import Prediction, simulate
from flowdp.timeline.timeline import Timeline
from flowdp.trainer.elastic import run_elastic
from flowdp.trainer.result import Status, TrainedState, load_checkpoint
from flowdp.trainer.run import Run, runs
from flowdp.trainer.trainer import Trainer
from flowdp.trainer.tuning.batch_size import BatchSizes, DeviceBatchSizes, find_batch_size
from flowdp.trainer.tuning.compare import ComparedRun, Comparison, compare
from flowdp.trainer.tuning.learning_rate import LrCurve, find_lr

__all__ = [  # noqa: RUF022 - in the order in which a reader meets them
    "Trainer",
    "CadenceOptions",
    "CaptureOptions",
    "CheckpointOptions",
    "EvaluationOptions",
    "FailureOptions",
    "MachineOptions",
    "ReadingOptions",
    "RuntimeOptions",
    "SchedulerOptions",
    "Callback",
    "EarlyStopping",
    "EMA",
    "OnCheckpoint",
    "Log",
    "RunLogger",
    "CSVLogger",
    "JSONLLogger",
    "TensorBoardLogger",
    "WandbLogger",
    "MLflowLogger",
    "ProcessTuning",
    "Run",
    "runs",
    "Status",
    "TrainedState",
    "load_checkpoint",
    "run_elastic",
    "Checkpoint",
    "EpochMetrics",
    "RankMetrics",
    "MetricArray",
    "RoundEnded",
    "EvaluationEnded",
    "Timeline",
    "EfficiencyReport",
    "setup",
    "DataParallel",
    "LossContext",
    "Window",
    "WindowResult",
    "Ddp",
    "DistributedDataParallel",
    "local_groups",
    "ProcessGroup",
    "Work",
    "GradientBucket",
    "GradientSynchronizer",
    "record_scalar",
    "current_worker",
    "devices",
    "seed_everything",
    "find_lr",
    "LrCurve",
    "find_batch_size",
    "BatchSizes",
    "DeviceBatchSizes",
    "compare",
    "Comparison",
    "ComparedRun",
    "simulate",
    "Prediction",
    "ElChe",
    "FlowdpError",
    "OptionError",
    "OuterOptions",
    "DataError",
    "StepError",
    "DeviceError",
    "OutOfDeviceMemory",
    "CollectiveError",
    "CollectiveAborted",
    "CollectiveTimeout",
    "MachineLostError",
    "MachineWaitsError",
    "StallError",
    "CheckpointError",
    "StateError",
    "ProtocolError",
]
