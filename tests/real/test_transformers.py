"""GPT-2, T5 and BERT of transformers as documented: padded batches, the loss computed in the model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flowdp
from tests.real.ways import SHARES, Shares, Weights, assert_same, check, spreading, weights

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers: Any = pytest.importorskip(
        "transformers", reason="transformers is not installed (flowdp[real])"
    )

TOKENS = 23
IGNORED = -100
FLOAT32 = 1e-6  # these models compute their own loss


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=TOKENS,
        n_positions=16,
        n_embd=8,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=TOKENS,
        d_model=8,
        d_kv=4,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=TOKENS,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=16,
    )
    return transformers.BertForMaskedLM(config)


def padded(samples: int, length: int = 10) -> Any:
    """A batch as a tokenizer makes it, padded, with labels."""
    ids = torch.randint(1, TOKENS, (samples, length))
    lengths = torch.randint(3, length + 1, (samples, 1))
    mask = (torch.arange(length) < lengths).long()
    ids = ids * mask
    labels = ids.masked_fill(mask == 0, IGNORED)
    return transformers.BatchEncoding({"input_ids": ids, "attention_mask": mask, "labels": labels})


def masked(samples: int) -> Any:
    """A batch for masked language modelling: only some tokens count."""
    batch = padded(samples)
    chosen = (torch.rand(batch["labels"].shape) < 0.3) & (batch["attention_mask"] == 1)
    chosen[:, 0] = True
    batch["labels"] = batch["input_ids"].masked_fill(~chosen, IGNORED)
    return batch


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], Callable[..., Tensor]]] = {
    # The causal loss is that of the next token, so the first label of a row has none.
    "gpt2": (gpt2, padded, lambda labels, **_: (labels[:, 1:] != IGNORED).sum()),
    "t5": (t5, padded, lambda labels, **_: (labels != IGNORED).sum()),
    "bert": (bert, masked, lambda labels, **_: (labels != IGNORED).sum()),
}


def fine_tuning(name: str) -> Callable[[Callable[..., Any]], Weights]:
    build, batch, tokens = MODELS[name]

    def script(spread: Callable[..., Any]) -> Weights:
        model: Any = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        scheduler = transformers.get_scheduler("linear", optimizer, num_warmup_steps=1, num_training_steps=4)
        batches = [batch(8) for _ in range(4)]
        model = spread(model, optimizer, reduce=tokens)  # changed
        model.train()
        for inputs in batches:
            outputs = model(**inputs)
            loss = outputs.loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            logits = model(**batches[0]).logits
        return {**weights(model), "logits": logits}

    return script


@pytest.mark.parametrize("shares", SHARES, ids=len)
@pytest.mark.parametrize("name", MODELS)
def test_the_script_trains_the_same_weights(name: str, shares: Shares) -> None:
    check(fine_tuning(name), shares, atol=FLOAT32)


@pytest.mark.parametrize("name", MODELS)
def test_without_reduce_the_first_call_is_refused(name: str) -> None:
    build, batch, _ = MODELS[name]
    torch.manual_seed(0)
    with spreading((0.5, 0.5)) as spread, pytest.raises(flowdp.FlowdpError, match="reduce="):
        spread(build())(**batch(8))


def test_a_batch_encoding_as_one_argument() -> None:
    """A module of the user that takes the tokenizer's batch as it is."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = bert().bert
            self.head = nn.Linear(8, 3)

        def forward(self, batch: Any) -> Tensor:
            hidden = self.body(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
            return self.head(hidden.last_hidden_state[:, 0])

    torch.manual_seed(0)
    batch = padded(8)
    model = Classifier()
    expected = model(batch)
    with spreading((0.25, 0.75)) as spread:
        torch.testing.assert_close(spread(model)(batch), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_a_trainer_trains_the_same_weights(name: str) -> None:
    build, batch, tokens = MODELS[name]
    torch.manual_seed(0)
    alone, data = build(), dict(batch(32))
    torch.manual_seed(0)
    together = build()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=5e-3)
    for start in (0, 16):
        optimizer.zero_grad()
        alone(**{key: value[start : start + 16] for key, value in data.items()}).loss.backward()
        optimizer.step()
    flowdp.Trainer(
        model=together,
        optimizer=lambda params: torch.optim.AdamW(params, lr=5e-3),
        loss=lambda model, batch: {"loss": model(**batch).loss, "weight": tokens(**batch)},
        dataset=data,
        per_device_batch_size=4,
        batch_size=16,
        epochs=1,
        reading=flowdp.ReadingOptions(shuffle=False),
        policy="exact",
        devices=["cpu", "cpu"],
        progress=False,
    ).start().join()
    assert_same(weights(together), weights(alone), FLOAT32)
