"""Environments of benchmarks' processes."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["SHARED_CARD"]

SHARED_CARD: Mapping[str, str] = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "4",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}
"""Environment of several NCCL ranks on one card: their kernels wait for each other, so all must fit on it at
once, and no two streams may share one of its queues."""
