"""A roofline over operations: the seconds that a computation would take on a machine of stated rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten

#: Attention on a CPU is counted as the kernel of the same kind for accelerators is.
_COUNTED_AS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}
_FREE = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}


class Roofline(TorchDispatchMode):
    """A context that adds up `seconds`: for each operation the longer of its FLOPs and its bytes over their rates.

    flops: floating point operations per second. bandwidth: of memory, bytes per second. Every operation reads its
    inputs and writes its outputs; views are free (Williams et al. 2009, Roofline, sec. 3).
    """

    def __init__(self, flops: float, bandwidth: float):
        super().__init__()
        self._flops, self._bandwidth = flops, bandwidth
        self.seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        kind = func._overloadpacket
        entered, left = _tensors((args, kwargs)), _tensors(out)
        if kind not in _FREE and not (_nothing_new(entered, left) and not func._schema.is_mutable):
            read = entered[1:] + left if kind is _aten.embedding else entered  # of its table, the rows it hands on
            moved = sum(map(_touched, (*read, *left)))
            self.seconds += max(_count(kind, args, kwargs, out) / self._flops, moved / self._bandwidth)
        return out


def _count(kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    formula: Callable[..., float] | None = flop_registry.get(_COUNTED_AS.get(kind, kind))
    return formula(*args, **kwargs, out_val=out) if formula else 0.0


def _nothing_new(entered: list[Tensor], left: list[Tensor]) -> bool:
    """Views, tensors without elements, questions about a tensor."""
    memories = {tensor.untyped_storage()._cdata for tensor in entered}
    return all(not tensor.numel() or tensor.untyped_storage()._cdata in memories for tensor in left)


def _touched(tensor: Tensor) -> int:
    """Bytes; an expanded tensor has fewer than it seems."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
