"""Parameters that are not trained, and writes to them: a teacher that follows the weights, for instance.

They are in no mean, so a write stays on its device. Torch counts no writes through `.data`, and some writes
change nothing; so the bits are summed. Such a pass over the parameters costs less than a forward.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flowdp.errors import CollectiveError
from flowdp.policy.schedule import Recheck

__all__ = ["FrozenCheck", "frozen_sums"]


class FrozenCheck:
    """Check that nothing writes to a replica's frozen parameters.

    At the meetings 1, 2, 4, 8, ..., at the first of each epoch, and at the end.

    Args:
        module: The replica's.
        remedy: What the user can do, for the error.

    Threads:
        The worker of the rank.

    Streams:
        All is enqueued on the current one, and waited for.
    """

    def __init__(self, module: nn.Module, remedy: str) -> None:
        self._module = module
        self._remedy = remedy
        self._epoch = -1
        self._due = Recheck()
        self._noted: Mapping[str, int] = {}

    def begin(self) -> None:
        """Note the parameters, before the first step."""
        self._noted = self._read()

    def met(self, epoch: int) -> None:
        """Check them at a meeting, where that is due.

        Raises:
            CollectiveError: One has changed.
        """
        if self._due.is_due or epoch != self._epoch:
            self._epoch = epoch
            self.check()
        self._due.passed()

    def check(self) -> None:
        """Check them now.

        Raises:
            CollectiveError: One has changed.
        """
        changed = self.changed()
        if changed:
            more = f" and {len(changed) - 1} more have" if len(changed) > 1 else " has"
            raise CollectiveError(
                f"frozen parameter {changed[0]!r}{more} changed since the run started: the loss, the model's "
                f"forward or a callback writes there. {self._remedy}"
            )

    def changed(self) -> list[str]:
        """Names of those whose bits are not those noted; one that is not among them any more is left out."""
        now = self._read()
        return [name for name, value in self._noted.items() if now.get(name, value) != value]

    def _read(self) -> Mapping[str, int]:
        sums = frozen_sums(self._module)
        return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)) if sums else {}


def frozen_sums(module: nn.Module) -> dict[str, Tensor]:
    """The sum of the bits of each frozen parameter by its name. Int64, shape [], on its device.

    Without the weights of embeddings that shorten the rows which they read (`max_norm`): that changes no
    forward, wherever it has been done.
    """
    shortened = {
        part.weight
        for part in module.modules()
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None
    }
    return {
        name: _sum(parameter)
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad and parameter not in shortened and _is_plain(parameter)
    }


def _is_plain(parameter: nn.Parameter) -> bool:
    """Whether its bits can be read as one memory."""
    return (
        parameter.layout is torch.strided
        and parameter.device.type != "meta"
        and not parameter.is_quantized
        and not is_lazy(parameter)
        and not is_traceable_wrapper_subclass(parameter)
    )


def _sum(parameter: Tensor) -> Tensor:
    bits = parameter.detach().contiguous().reshape(-1).view(torch.uint8)
    if bits.storage_offset() % 8:
        bits = bits.clone()
    whole = len(bits) - len(bits) % 8
    return bits[:whole].view(torch.int64).sum() + bits[whole:].sum()
