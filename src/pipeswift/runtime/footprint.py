"""How many bytes are alive: what autograd keeps between forward and backward, or every tensor made in a context."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Footprint:
    """A context in which saved tensors are counted; each piece of memory once, that of `excluded` (weights) never.

    bytes: what is kept now. peak: the most that was kept at once.
    """

    def __init__(self, excluded: Iterable[Tensor] = ()):
        self._excluded = {tensor.untyped_storage()._cdata for tensor in excluded}
        self._kept: dict[int, list[int]] = {}  # identity -> [bytes, times saved]
        self.bytes = 0
        self.peak = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._save, _Saved.tensor_of)

    def __enter__(self) -> Footprint:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def with_also(self, tensors: Iterable[Tensor]) -> int:
        """`bytes`, and those of other tensors that are kept, such as what I leaves for W."""
        others = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
        return self.bytes + sum(size for memory, size in others.items() if memory not in self._kept)

    def _save(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        memory = storage._cdata  # an address would be 0 for all tensors without values
        saved = _Saved(tensor)
        if memory not in self._excluded:
            entry = self._kept.setdefault(memory, [storage.nbytes(), 0])
            self.bytes += entry[0] if entry[1] == 0 else 0
            entry[1] += 1
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(saved, self._free, memory).atexit = False
        return saved

    def _free(self, memory: int) -> None:
        entry = self._kept[memory]
        entry[1] -= 1
        if not entry[1]:
            self.bytes -= entry[0]
            del self._kept[memory]


class _Saved:
    """What the graph holds instead of the tensor; it goes when the graph lets go."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def tensor_of(self) -> Tensor:
        return self.tensor


class LiveBytes(TorchDispatchMode):
    """A context that knows the tensors made inside it; `bytes()` is what is still alive of them, each memory once."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in inputs:
                storage = tensor.untyped_storage()
                self._storages[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return result

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Counts their memory no more, as it is somebody else's now."""
        for tensor in tensors:
            self._storages.pop(tensor.untyped_storage().data_ptr(), None)

    def bytes(self) -> int:
        return sum(size for reference, size in self._storages.values() if not reference.expired())
