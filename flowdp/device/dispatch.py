"""Parts of torch that several threads may not use at once as they are.

An operator's Python object (`torch.ops.aten.add.Tensor`) is made at its first use. In a
`TorchDispatchMode` (selective checkpoints, a counter of operations, `OwnDraws`) and for tensors with a
`__torch_dispatch__` of their own, C++ asks, and keeps a bare pointer. When two threads ask for the same one
at once, each makes its own, and the second takes the first one's place; the pointer may be that of the first.
The process then dies by a segmentation fault at any later use.

In a forked process whose parent has differentiated, the first thread that comes to autograd throws the
parent's engine away and makes another. A second thread may be in it by then: a segmentation fault, too. See
`prepare_torch`.

Torch notes entered modes in flags of the process, though modes belong to a thread; each mode restores at its
end the flags that it found. Of two threads whose modes overlap, the second finds the first one's flag, and
restores it when both are out: the flag stays set. For torch.compile of torch 2.8 that is a reason to leave a
function uncompiled for as long as the process lives; that of 2.13 looks at the thread's own modes, unless
`inline_torch_dispatch_torch_compile` is off. So modes of ranks leave the flags alone (`RankMode`).
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import torch
from torch.autograd.variable import Variable
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["RankMode", "make_operators", "prepare_torch"]


def prepare_torch() -> None:
    """Make torch ready for several threads.

    Objects that torch makes at their first use are made now: several threads would make them at once.

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

    It leaves torch's flags of the process as they are, so that modes of other threads find nothing of it
    there. It sets the flag of its thread, by which guards of compiled code look at modes.

    Source:
        torch 2.13, `TorchDispatchMode.__enter__` and `__exit__`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Any:
        """Enter it, in this thread."""
        _python_dispatch._push_mode(self)
        _tell_guards(_modes())
        return self

    def __exit__(self, *error: object) -> None:
        """Leave it, in the same thread."""
        _python_dispatch._pop_mode()
        _tell_guards(_modes())


def _modes() -> list[TorchDispatchMode]:
    """The modes that the calling thread has entered."""
    return _python_dispatch._get_current_dispatch_mode_stack()


def _tell_guards(modes: list[TorchDispatchMode]) -> None:
    """Set the flag of the calling thread that makes guards of compiled code look at modes."""
    tell = getattr(_python_dispatch, "set_is_in_mode_without_ignore_compile_internals", None)
    if tell is not None:
        tell(any(not mode.ignore_compile_internals() for mode in modes))
