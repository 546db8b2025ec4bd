"""Derivatives that a call on several devices would lose without an error.

Each device has a graph of its own, which ends at its parameters and at its part of the arguments. A tensor
that a forward finds anywhere else (in a global, in an object that a closure holds) lies in none of the
caller's graphs, so it would get no gradient, or the first device's alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flowdp.errors import FlowdpError

__all__ = ["check_graph_ends", "check_transforms"]


def check_graph_ends(
    outputs: Sequence[Tensor], wanting: Sequence[Tensor], parameters: Sequence[Sequence[Tensor]], rank: int
) -> None:
    """Check that the graph of a rank's outputs ends at tensors that the rank knows.

    Args:
        outputs: Outputs of the rank.
        wanting: Its arguments that ask for a gradient.
        parameters: Parameters of each rank; the first's are the user's, which no other may use.
        rank: Index of the rank.

    Raises:
        FlowdpError: It ends at another tensor that requires grad.
    """
    known = [*parameters[rank], *wanting]
    ends = {id(tensor) for tensor in known}
    seen = {tensor.grad_fn for tensor in known if tensor.grad_fn is not None}
    held = _references_of_a_graph()
    todo = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        # Nothing but the graph holds a leaf that forward has made, to differentiate with respect to it.
        if isinstance(leaf, Tensor) and id(leaf) not in ends and sys.getrefcount(leaf) > held:
            _refuse(leaf, is_users=any(leaf is tensor for tensor in parameters[0]))
        todo += [after for after, _ in node.next_functions if after is not None]


def _references_of_a_graph() -> int:
    """Count of references to a leaf that only a graph and one variable hold, in this version of torch."""
    node: Any = torch.zeros(1).requires_grad_().clone().grad_fn
    leaf = node.next_functions[0][0].variable
    return sys.getrefcount(leaf)


def _refuse(leaf: Tensor, *, is_users: bool) -> None:
    if is_users:
        raise FlowdpError(
            f"a replica's forward uses a parameter of shape {tuple(leaf.shape)} of the module that was given "
            "to setup(), so its gradient would be lost: a function that was set as an attribute or as a hook "
            "finds it in a global, or in an object of the loop; let it use the module that it is called with "
            "(types.MethodType, the first argument of a hook), or give replica= to setup()"
        )
    raise FlowdpError(
        f"the module's forward uses a tensor of shape {tuple(leaf.shape)} that requires grad and is neither "
        "its parameter nor an argument of the call, so its gradient would be lost: make it a parameter of "
        "the module, or give it as an argument; if it is not trained, requires_grad_(False)"
    )


def check_transforms() -> None:
    """Check that no derivative is asked for that does not go through several graphs.

    Raises:
        FlowdpError: Forward-mode differentiation, a transform of torch.func, or a trace is under way.
    """
    is_transform = torch._C._functorch.peek_interpreter_stack() is not None
    if is_transform or forward_ad._current_level >= 0:
        kind = "a transform of torch.func" if is_transform else "forward-mode differentiation"
        raise FlowdpError(
            f"{kind} does not go through a call that several devices do: call the module itself, .module, or "
            "take derivatives by torch.autograd.grad(create_graph=True)"
        )
    if torch._C._get_tracing_state() is not None:
        raise FlowdpError(
            "a trace (torch.jit, torch.onnx) does not go through a call that several devices do: trace the "
            "module itself, .module"
        )
