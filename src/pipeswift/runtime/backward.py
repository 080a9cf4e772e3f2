"""The backward in two halves: I makes the input's gradient and frees the graph, W makes the weights' gradients later.

In modules prepared by `attach`, operations on the module's weights (linear, convolution, embedding, products of
matrices) take a form of their own: their backward makes the input's gradient at once and leaves the weight's to a
`Pending`, which keeps what that product needs and where to sum it. A parameter that is used in any other way, too, gets
all of its gradient in I.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipeswift.runtime.casts import fitting, narrowed
from pipeswift.runtime.engine import no_view, running_backward, saving_hooks, will_accumulate
from pipeswift.runtime.ledger import Ledger
from pipeswift.runtime.pending import Pending
from pipeswift.runtime.rules import Rule, find

_WHOLE = Ledger()  # of backwards that are never cut in two


class _Active(threading.local):
    """The ledgers of the prepared modules whose forward runs, innermost last."""

    def __init__(self) -> None:
        self.ledgers: list[Ledger] = []


_active = _Active()


def splitting() -> bool:
    """Whether a prepared module's forward runs: a layer of one's own may then use `halves`."""
    return bool(_active.ledgers)


def halves(rule: Rule, x: Tensor, *weights: Tensor | None) -> Tensor:
    """y = rule.forward(x, *weights), with a backward in two halves; in one, where no prepared module's forward runs."""
    ledger = _active.ledgers[-1] if _active.ledgers else _WHOLE
    return _Halves.apply(ledger, rule, weights, x, *weights)  # pyright: ignore[reportReturnType]


class _Split(TorchFunctionMode):
    """A context around a forward, in which operations on weights take their two-halves form."""

    def __init__(self, ledger: Ledger):
        super().__init__()
        self._ledger = ledger
        self._hooks = saving_hooks()

    def __enter__(self) -> _Split:
        _active.ledgers.append(self._ledger)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _active.ledgers.pop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = find(func, args, kwargs) if self._may_split() else None
        if found is None:
            return func(*args, **kwargs)
        rule, x, weights = found
        used = weights
        if x.is_floating_point():
            dtypes = {tensor.dtype for tensor in (x, *weights) if tensor is not None}
            if torch.is_autocast_enabled(x.device.type) and torch.float64 not in dtypes:
                narrow = torch.get_autocast_dtype(x.device.type)
                x, *used = (narrowed(tensor, narrow) for tensor in (x, *weights))
                if any(tensor is not None and tensor.dtype != narrow for tensor in used):
                    return func(*args, **kwargs)  # an autocast around this one keeps a cast to another type
            elif len(dtypes) > 1:
                return func(*args, **kwargs)  # which says what is wrong
        return _Halves.apply(self._ledger, rule, weights, x, *used)

    def _may_split(self) -> bool:
        """Not where torch.compile looks on, and not in torch.func's transforms, to which `_Halves` means nothing.

        And not in a checkpoint that began in here: this context is not there when the checkpoint runs again.
        """
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return False
        return torch.is_grad_enabled() and saving_hooks() == self._hooks


def attach(module: nn.Module, ledger: Ledger) -> None:
    """Prepares every part of `module` that has parameters of its own.

    By hooks, since they run again where checkpointing runs a forward again, in whatever thread.
    """
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            continue  # it takes no hooks, and its operations are out of reach: all of its gradients come in I
        if any(True for _ in part.parameters(recurse=False)):
            _attach(part, ledger)


def _attach(part: nn.Module, ledger: Ledger) -> None:
    contexts: list[_Split] = []

    def enter(*_: object) -> None:
        if torch.compiler.is_compiling():
            return
        contexts.append(_Split(ledger))
        contexts[-1].__enter__()

    def leave(*_: object) -> None:
        if torch.compiler.is_compiling():
            return
        contexts.pop().__exit__(None, None, None)

    part.register_forward_pre_hook(enter)
    part.register_forward_hook(leave, always_call=True)


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ledger: Ledger, rule: Rule, weights: tuple[Tensor | None, ...], x: Tensor, *used: Tensor | None
    ) -> Tensor:
        """weights: leaves, or what the backward takes for such. used: these, or casts of them."""
        ctx.ledger, ctx.rule, ctx.weights = ledger, rule, weights
        ctx.casts = tuple(None if u is None or u is w else u.grad_fn for w, u in zip(weights, used, strict=True))
        ctx.save_for_backward(x)
        y = rule.forward(x, *(fitting(weight, x.dtype) for weight in used))
        return no_view(y) if y._is_view() else y  # a function's view may not be changed in place by what comes next

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (x,), (gradient,) = ctx.saved_tensors, gradients
        rule, weights, ledger = ctx.rule, ctx.weights, ctx.ledger
        _, _, _, to_x, *to_weights = ctx.needs_input_grad
        used = map(ledger.stand_in, weights) if ledger.stand_ins else weights
        made = rule.input(gradient, x, *(fitting(weight, x.dtype) for weight in used)) if to_x else None
        if not any(to_weights):
            return None, None, None, made, *(None for _ in weights)
        trained = tuple(w if to else None for w, to in zip(weights, to_weights, strict=True))
        left = Pending(rule, gradient, x, trained, ctx.casts, running_backward())
        waits = ledger.is_open and _can_wait(ctx)
        return None, None, None, made, *(ledger.leave(left) if waits else left.gradients())


def _can_wait(ctx: Any) -> bool:
    """Whether the weights' gradients only go into their `.grad`: nobody differentiates them or gets them now."""
    if torch.is_grad_enabled():
        return False
    nodes = [node for node, _ in ctx.next_functions[1:]]  # the first leads to x
    leaves = (node.next_functions[0][0] if node in ctx.casts else node for node in nodes if node is not None)
    return all(map(will_accumulate, leaves))
