"""Tests of nanoGPT's loop: loss in the model, accumulation, clipping, a manual schedule, evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from tests.real.ways import SHARES, Shares, Weights, assert_same, check, spreading, weights


@dataclass
class GPTConfig:
    block_size: int = 8
    vocab_size: int = 17
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 8


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd),
            nn.GELU(),
            nn.Linear(4 * config.n_embd, config.n_embd),
        )

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (
            part.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).split(c, dim=2)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(seen.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "h": nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
                "ln_f": nn.LayerNorm(config.n_embd),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        parts: Any = self.transformer
        _, t = idx.size()
        assert t <= self.config.block_size
        x = parts.wte(idx) + parts.wpe(torch.arange(t, device=idx.device))
        for block in parts.h:
            x = block(x)
        x = parts.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

    def configure_optimizers(self, weight_decay: float, learning_rate: float) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def nanogpt(spread: Callable[..., Any]) -> Weights:
    data = torch.randint(17, (300,))

    def get_batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(data) - 8, (8,))
        return (
            torch.stack([data[i : i + 8] for i in starts]),
            torch.stack([data[i + 1 : i + 9] for i in starts]),
        )

    model: Any = GPT(GPTConfig())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = model.configure_optimizers(0.1, 1e-2)
    model = spread(model, optimizer)  # changed

    @torch.no_grad()
    def estimate_loss() -> Tensor:
        model.eval()
        losses = torch.zeros(2)
        for k in range(2):
            losses[k] = model(*get_batch())[1].item()
        model.train()
        return losses.mean()

    seen = []
    inputs, targets = get_batch()
    for iter_num in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 0.5 * (1.0 + math.cos(math.pi * iter_num / 4))
        if iter_num % 2 == 0:
            seen.append(estimate_loss())
        for _ in range(2):
            with nullcontext():
                _, loss = model(inputs, targets)
                loss = loss / 2
            inputs, targets = get_batch()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return {**weights(model), "seen": torch.stack(seen)}


@pytest.mark.parametrize("shares", SHARES, ids=len)
def test_the_script_trains_the_same_weights(shares: Shares) -> None:
    check(nanogpt, shares)


def test_targets_that_are_left_out_need_reduce() -> None:
    """cross_entropy averages over the targets that count: samples with fewer weigh less."""
    idx, targets = torch.randint(17, (8, 8)), torch.randint(17, (8, 8))
    targets[1, 2:] = -1
    with spreading((0.5, 0.5)) as spread, pytest.raises(flowdp.FlowdpError, match="reduce"):
        spread(GPT(GPTConfig()))(idx, targets)
    torch.manual_seed(0)
    alone = GPT(GPTConfig())
    torch.manual_seed(0)
    with spreading((0.5, 0.5)) as spread:
        both = spread(GPT(GPTConfig()), reduce=lambda idx, targets: (targets != -1).sum())
        for model in (alone, both):
            model(idx, targets)[1].backward()
        for one, other in zip(alone.parameters(), both.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("devices", [2, 3])
def test_a_trainer_trains_the_same_weights(devices: int) -> None:
    torch.manual_seed(0)
    idx, targets = torch.randint(17, (32, 8)), torch.randint(17, (32, 8))
    alone, together = GPT(GPTConfig()), GPT(GPTConfig())
    together.load_state_dict(alone.state_dict())
    optimizer = alone.configure_optimizers(0.1, 1e-2)
    for start in (0, 16):
        optimizer.zero_grad()
        alone(idx[start : start + 16], targets[start : start + 16])[1].backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        optimizer.step()
    flowdp.Trainer(
        model=together,
        optimizer=lambda model: model.configure_optimizers(0.1, 1e-2),
        loss=lambda model, batch: model(*batch)[1],
        dataset=(idx, targets),
        per_device_batch_size=4,
        batch_size=16,
        max_grad_norm=1.0,
        epochs=1,
        reading=flowdp.ReadingOptions(shuffle=False),
        policy="exact",
        devices=["cpu"] * devices,
        progress=False,
    ).start().join()
    assert_same(weights(together), weights(alone))
