"""The way into autograd's engine: where a gradient enters the graph, and how a backward starts there."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward


def edge_of(tensor: Tensor) -> GradientEdge:
    """Where the gradient of `tensor`, which needs one, enters the graph; it keeps the graph alive, and no value.

    The node of a custom function, held from Python, does not keep its graph alive, and a leaf has none: that of a view
    stands in.
    """
    node = tensor.grad_fn
    if node is None or isinstance(node, torch._C._FunctionBase):
        node = tensor.view_as(tensor).grad_fn
        assert node is not None, "made where gradients are recorded"
        return GradientEdge(node, 0)
    return GradientEdge(node, tensor.output_nr)


def inner(leaf: Tensor) -> Tensor:
    """A leaf as layers should see it: inside the graph, over the same memory, as it is in one process.

    A leaf itself may not be changed in place, nor may a view of it; and autocast would take it for a weight, and sum
    the gradients of its uses in the narrow type.
    """
    return no_view(leaf) if leaf.requires_grad else leaf


def no_view(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of its own, which autograd does not take for a view."""
    made = torch.ops.aten._unsafe_view.default(tensor, tensor.shape)
    if made.stride() != tensor.stride():
        made.data = tensor  # the strides of dimensions of size 1 tell formats such as channels_last apart
    return made


def run_backward(edges: tuple[GradientEdge, ...], gradients: tuple[Tensor, ...]) -> None:
    """What `torch.autograd.backward(edges, gradients)` does, without what that looks at before, in Python.

    A gradient must have its output's shape: one that only expands to it is summed without a word. To a process that was
    asleep those looks cost more than a tenth of a millisecond.
    """
    _engine_run_backward(edges, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)


def running_backward() -> int:
    """Number of the backward that runs: a backward that is started inside another has one of its own."""
    return torch._C._current_graph_task_id()


def will_accumulate(node: Node) -> bool:
    """Whether this is a leaf's node and the backward that runs adds to the leaf's `.grad`; else somebody may wait."""
    try:
        return hasattr(node, "variable") and torch._C._will_engine_execute_node(node)
    except RuntimeError:  # it runs in torch.autograd.grad, which returns that gradient
        return False


def saving_hooks() -> object:
    """The hooks that get what operations save for their backward, as a checkpoint's do; None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore[reportAttributeAccessIssue]
