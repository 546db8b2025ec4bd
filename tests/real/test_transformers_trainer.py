"""The Trainer of transformers on several devices, by the class in docs/moving.md, beside its own on one."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flowdp
from tests.real.test_transformers import TOKENS, bert, gpt2, masked, padded, t5
from tests.real.ways import program, weights

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers: Any = pytest.importorskip(
        "transformers", reason="transformers is not installed (flowdp[real])"
    )
    pytest.importorskip("accelerate", reason="accelerate is not installed (flowdp[real])")

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and accelerate

FLOAT32 = 1e-6
SAMPLES = 48
SEVERAL = partial(flowdp.setup, devices=["cpu", "cpu"], partition_ratios=(0.3, 0.7), progress=False)

Made = tuple[Callable[[], nn.Module], Callable[[int], Any]]


# ---------------------------------------------------------------- models and their batches
def of_sequences(labels: int) -> nn.Module:
    config = bert().config
    config.num_labels = labels
    return transformers.BertForSequenceClassification(config)


def answering() -> nn.Module:
    return transformers.BertForQuestionAnswering(bert().config)


def with_labels(samples: int, make: Callable[[Tensor], dict[str, Tensor]]) -> Any:
    batch = padded(samples)
    del batch["labels"]
    return {**batch, **make(batch["input_ids"])}


MODELS: dict[str, Made] = {
    "gpt2": (gpt2, padded),  # divides the sum of its loss by the items of all batches of a step
    "t5": (t5, padded),  # a mean over the tokens that count
    "bert": (bert, masked),
    "classes": (
        partial(of_sequences, 3),
        partial(with_labels, make=lambda ids: {"labels": ids.sum(1) % 3}),
    ),
    "numbers": (
        partial(of_sequences, 1),
        partial(with_labels, make=lambda ids: {"labels": ids.double().mean(1) / TOKENS}),
    ),
    "answers": (  # without labels
        answering,
        partial(
            with_labels, make=lambda ids: {"start_positions": ids[:, 0] % 3, "end_positions": ids[:, 1] % 3}
        ),
    ),
}


# ---------------------------------------------------------------- both trainers
@pytest.fixture(scope="module")
def moved() -> Any:
    """The class on the page, without the run below it."""
    tree = ast.parse(program("From the Trainer of transformers"))
    tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ClassDef)]
    names: dict[str, Any] = {}
    exec(compile(tree, "docs/moving.md", "exec"), names)
    return names["Trainer"]


@pytest.fixture(autouse=True)
def _several(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    opened: list[flowdp.DataParallel] = []

    def setup(*args: Any, **options: Any) -> flowdp.DataParallel:
        opened.append(SEVERAL(*args, **options))
        return opened[-1]

    monkeypatch.setattr(flowdp, "setup", setup)
    yield
    for model in opened:
        model.close()


def make(kind: Any, folder: Path, name: str, **options: Any) -> Any:
    build, batch = MODELS[name]
    torch.manual_seed(0)
    model, train, held_out = build(), batch(SAMPLES), batch(20)
    args = transformers.TrainingArguments(
        str(folder),
        **({"per_device_train_batch_size": 8, "num_train_epochs": 2} | options),
        per_device_eval_batch_size=8,
        learning_rate=5e-3,
        logging_steps=1,
        eval_strategy="epoch",
        save_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    return kind(
        model=model,
        args=args,
        train_dataset=rows(train),
        eval_dataset=rows(held_out),
        compute_metrics=lambda found: {"logits": float(abs(first(found.predictions)).sum())},
    )


def rows(batch: Any) -> list[dict[str, Tensor]]:
    count = len(batch["input_ids"])
    return [{key: value[row] for key, value in batch.items()} for row in range(count)]


def first(predictions: Any) -> Any:
    return predictions[0] if isinstance(predictions, tuple) else predictions


def numbers(trainer: Any) -> list[dict[str, float]]:
    """What the trainer has logged, but for times."""
    kept = ("loss", "grad_norm", "eval_loss", "train_loss", "eval_logits", "learning_rate", "epoch")
    return [{key: log[key] for key in kept if key in log} for log in trainer.state.log_history]


def assert_as_one_device(found: Any, expected: Any, *, is_resumed: bool = False) -> None:
    """Compare all numbers and weights, but for the mean that a resumed run logs last, over its own steps."""
    logged = zip(numbers(found), numbers(expected), strict=True)
    for mine, other in list(logged)[: -1 if is_resumed else None]:
        assert mine == pytest.approx(other, rel=FLOAT32, abs=2 * FLOAT32)
    for key, value in weights(expected.model).items():
        torch.testing.assert_close(weights(found.model)[key], value, rtol=1e-4, atol=1e-5)


OPTIONS: list[dict[str, Any]] = [{}, {"gradient_accumulation_steps": 4}, {"max_grad_norm": 0.1}]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "accumulation", "clipping"])
@pytest.mark.parametrize("name", MODELS)
def test_all_losses_are_those_of_one_device(
    moved: Any, name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    alone = make(transformers.Trainer, tmp_path / "a", name, **options)
    together = make(moved, tmp_path / "b", name, **options)
    alone.train()
    together.train()
    assert isinstance(together.model_wrapped, flowdp.DataParallel)
    assert_as_one_device(together, alone)


@pytest.mark.parametrize("name", ["gpt2", "bert", "classes"])
def test_smoothed_labels(moved: Any, name: str, tmp_path: Path) -> None:
    """The loss is computed outside of the model, and shifts the labels of a causal one by its name."""
    options = {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}
    alone = make(transformers.Trainer, tmp_path / "a", name, **options)
    together = make(moved, tmp_path / "b", name, **options)
    alone.train()
    together.train()
    assert_as_one_device(together, alone)


def test_save_and_resume(moved: Any, tmp_path: Path) -> None:
    """A run that is resumed inside its second epoch, and one that goes on in a Trainer of one device."""
    whole = make(moved, tmp_path / "a", "gpt2")
    whole.train()
    resumed = make(moved, tmp_path / "b", "gpt2")
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-9"))
    assert_as_one_device(resumed, whole, is_resumed=True)
    alone = make(transformers.Trainer, tmp_path / "c", "gpt2")
    alone.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-9"))
    assert_as_one_device(whole, alone, is_resumed=True)
    whole.save_model(str(tmp_path / "last"))
    loaded = transformers.GPT2LMHeadModel.from_pretrained(str(tmp_path / "last"))
    for key, value in weights(whole.model).items():
        assert torch.equal(weights(loaded)[key], value)


def test_batch_sizes_are_those_of_all_devices(moved: Any, tmp_path: Path) -> None:
    """On a machine with two cards, where transformers would use nn.DataParallel with twice the batch."""

    class Two(transformers.TrainingArguments):
        def __post_init__(self) -> None:
            super().__post_init__()
            self._n_gpu = 2

    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    args = Two(str(tmp_path), per_device_train_batch_size=8, **quiet)
    build, batch = MODELS["gpt2"]
    trainer = moved(model=build(), args=args, train_dataset=rows(batch(SAMPLES)))
    assert len(next(iter(trainer.get_train_dataloader()))["input_ids"]) == 8
    trainer.train()
    assert trainer.state.global_step == 3 * SAMPLES // 8
    assert isinstance(trainer.model_wrapped, flowdp.DataParallel)


def test_train_twice_and_evaluate_after(moved: Any, tmp_path: Path) -> None:
    alone = make(transformers.Trainer, tmp_path / "a", "gpt2")
    together = make(moved, tmp_path / "b", "gpt2")
    for trainer in (alone, together):
        trainer.evaluate()
        trainer.train()
        trainer.train()
        trainer.evaluate()
    assert_as_one_device(together, alone)
    assert first(together.predict(together.eval_dataset).predictions) == pytest.approx(
        first(alone.predict(alone.eval_dataset).predictions), rel=1e-4, abs=1e-5
    )


@pytest.mark.posix
def test_in_a_notebook_a_cell_can_run_again(tmp_path: Path) -> None:
    """The program of the page in a kernel, twice, then a look at its model."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed (flowdp[browser])")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed (flowdp[browser])")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed (flowdp[browser])")
    prepare = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n" + (
        "import functools, flowdp, torch\n"
        "flowdp.setup = functools.partial(flowdp.setup, devices=['cpu', 'cpu'])\n"
        "torch.manual_seed(0)"
    )
    train = program("From the Trainer of transformers")
    look = "print(trainer.state.log_history[-1]['train_loss'], repr(trainer.model_wrapped))"
    cells = [nbformat.v4.new_code_cell(code) for code in (prepare, train, "trainer.train();", train, look)]
    book = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(book, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    [shown] = book.cells[-1].outputs
    loss, model = shown.text.split(maxsplit=1)
    assert 3 < float(loss) < 5
    assert "GPT2LMHeadModel" in model
