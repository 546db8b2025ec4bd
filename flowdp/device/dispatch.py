"""Parts of torch that several threads may not use at once as they are.

An operator's Python object (`torch.ops.aten.add.Tensor`) is made when somebody first asks for it. In a
`TorchDispatchMode` (selective checkpoints, a counter of operations, `OwnDraws`) and for tensors with a
`__torch_dispatch__` of their own, C++ asks, and keeps a bare pointer. When two threads ask for the same one
at once, each makes its own, and the second takes the first one's place; the pointer may be that of the first.
The process then dies by a segmentation fault at any later use.

In a forked process whose parent has differentiated, the first thread that comes to autograd throws the
parent's engine away and makes another. A second thread may be in it by then: a segmentation fault, too. See
`prepare_torch`.

Whether a mode is entered, torch notes in flags of the process; each mode puts back at its end what it found.
Of two threads the second finds the first one's flag, and puts it back when both are out; then torch.compile
may leave models as they are for as long as the process lives: see `RankMode`.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import cache
from typing import Any

import torch
from torch.autograd.variable import Variable
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["RankMode", "make_operators", "prepare_torch"]


def prepare_torch() -> None:
    """Make what torch would make at its first use, in several threads at once.

    Threads:
        The one that starts the workers, before they exist.

    Source:
        torch 2.13, `PythonEngine::get_python_engine`, which any question to the engine comes to.
    """
    with _preparing:
        make_operators()
        Variable._execution_engine.is_checkpoint_valid()


_preparing = threading.Lock()
"""Two runs that start at once would make the operators in two threads at once."""


@cache
def make_operators() -> int:
    """Make the objects of all operators, once in the life of the process: some 0.1 s, 8 MB.

    Returns:
        How many there are.

    Source:
        torch 2.13, `OpOverloadPacket.__getattr__`, `c10::PyHandleCache::ptr_or`.
    """
    made = 0
    for operator in torch._C._dispatch_get_all_op_names():
        space, _, rest = operator.partition("::")
        name, _, overload = rest.partition(".")
        try:
            getattr(getattr(getattr(torch.ops, space), name), overload or "default")
        except (AttributeError, RuntimeError):  # a kernel without a schema: Python cannot reach it at all
            continue
        made += 1
    return made


class RankMode(TorchDispatchMode):
    """A mode that the threads of several ranks may be in at once, each in one of its own.

    Torch's flags are set while any of them is in one, and are what they were before when the last has left.

    Source:
        torch 2.13, `TorchDispatchMode.__enter__` and `__exit__`.
    """

    _lock = threading.Lock()
    _inside = 0
    _before: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Any:
        """Enter it, in this thread."""
        with RankMode._lock:
            mode = super().__enter__()  # type: ignore[no-untyped-call]
            if RankMode._inside == 0:
                RankMode._before = {name: flags[-1] for name, flags in self._flags().items()}
            RankMode._inside += 1
        return mode

    def __exit__(self, *error: object) -> None:
        """Leave it, in the same thread."""
        with RankMode._lock:
            RankMode._inside -= 1
            for name, flags in self._flags().items():
                flags[-1] = RankMode._inside > 0 or RankMode._before[name]
            super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _flags(self) -> dict[str, deque[Any]]:
        """The flags that torch has found at each entrance, and puts back."""
        return {
            name: flags
            for name, flags in vars(self).items()
            if name.startswith("old_") and isinstance(flags, deque)
        }
