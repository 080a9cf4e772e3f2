"""The backward in two halves: I makes the input's gradient and frees the graph, W makes the weights' gradients later.

In modules prepared by `attach`, operations on the module's weights (linear, convolution, embedding, products of
matrices) take a form of their own: their backward makes the input's gradient at once and leaves the weight's to a
`Pending`, which keeps what that product needs and nothing else. Any other use of a parameter gets its gradient in I.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipeswift.runtime.rules import Gradients, Rule, find


class Pending(NamedTuple):
    """Work left for W."""

    rule: Rule
    gradient: Tensor
    x: Tensor
    parameters: tuple[Tensor | None, ...]

    def gradients(self) -> Gradients:
        weights = tuple(_cast(parameter, self.x.dtype) for parameter in self.parameters)
        return self.rule.weights(self.gradient, self.x, *weights)


class Ledger:
    """Where a stage's backwards leave their pendings; None: nowhere, weights' gradients are made at once.

    An object that the graph refers to, and no thread-local: on an accelerator backwards run in threads of autograd's.

    stand_ins: by the id of a weight, what the input's gradient is made with instead of it.
    """

    def __init__(self) -> None:
        self.pendings: list[Pending] | None = None
        self.stand_ins: dict[int, Tensor] = {}

    def stand_in(self, weight: Tensor) -> Tensor:
        return self.stand_ins.get(id(weight), weight)


_WHOLE = Ledger()  # of backwards that are never cut in two


@torch.no_grad()
def weight_gradients(pendings: Sequence[Pending]) -> None:
    """W: adds each parameter's gradient to its `.grad`, after summing over its uses, as autograd does."""
    last_use = {id(w): (n, i) for n, pending in enumerate(pendings) for i, w in enumerate(pending.parameters)}
    sums: dict[int, Tensor] = {}
    for n, pending in enumerate(pendings):
        for i, (parameter, gradient) in enumerate(zip(pending.parameters, pending.gradients(), strict=True)):
            if parameter is None:
                continue
            key = id(parameter)
            if gradient is not None:
                if gradient.dtype != parameter.dtype:
                    gradient = gradient.to(parameter.dtype)
                sums[key] = sums[key] + gradient if key in sums else gradient
            if last_use[key] == (n, i) and key in sums:  # at once, while it lies in the cache
                _accumulate(parameter, sums.pop(key))


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def joined(pendings: Sequence[Pending]) -> list[Pending]:
    """The pendings of several micro-batches, those of one operation on one weight laid together to one product.

    The sum over micro-batches then happens inside the product, so its last bits differ from those of one after another.
    """
    groups: dict[Any, list[Pending]] = {}
    for pending in pendings:
        alike = pending.rule, pending.x.dtype, tuple(map(id, pending.parameters))
        groups.setdefault(alike if pending.rule.join else id(pending), []).append(pending)
    return [group[0] if len(group) == 1 else _join(group) for group in groups.values()]


def _join(group: Sequence[Pending]) -> Pending:
    rule, _, _, parameters = group[0]
    assert rule.join is not None
    return Pending(rule, rule.join([p.gradient for p in group]), rule.join([p.x for p in group]), parameters)


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
    return _Halves.apply(ledger, rule, x, *weights)  # pyright: ignore[reportReturnType]


class _Split(TorchFunctionMode):
    """A context around a forward, in which operations on weights take their two-halves form."""

    def __init__(self, ledger: Ledger):
        super().__init__()
        self._ledger = ledger

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
        # Inside torch.func's transforms, a function of two halves would have to say what it is to each of them.
        transformed = torch._C._are_functorch_transforms_active()
        found = find(func, args, kwargs) if torch.is_grad_enabled() and not transformed else None
        if found is None:
            return func(*args, **kwargs)
        rule, x, weights = found
        if x.is_floating_point():
            dtypes = {tensor.dtype for tensor in (x, *weights) if tensor is not None}
            if torch.is_autocast_enabled(x.device.type) and torch.float64 not in dtypes:
                x = x.to(torch.get_autocast_dtype(x.device.type))
            elif len(dtypes) > 1:
                return func(*args, **kwargs)  # which says what is wrong
        return halves(rule, x, *weights)


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
        contexts.append(_Split(ledger))
        contexts[-1].__enter__()

    def leave(*_: object) -> None:
        contexts.pop().__exit__(None, None, None)

    part.register_forward_pre_hook(enter)
    part.register_forward_hook(leave, always_call=True)


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ledger: Ledger, rule: Rule, x: Tensor, *weights: Tensor | None) -> Tensor:
        ctx.ledger, ctx.rule, ctx.weights = ledger, rule, weights
        ctx.save_for_backward(x)
        return rule.forward(x, *(_cast(weight, x.dtype) for weight in weights))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (x,), (gradient,) = ctx.saved_tensors, gradients
        rule, weights, ledger = ctx.rule, ctx.weights, ctx.ledger
        _, _, to_x, *to_weights = ctx.needs_input_grad
        used = map(ledger.stand_in, weights) if ledger.stand_ins else weights
        made = rule.input(gradient, x, *(_cast(weight, x.dtype) for weight in used)) if to_x else None
        none = (None,) * len(weights)
        if not any(to_weights):
            return None, None, made, *none
        trained = tuple(w if to else None for w, to in zip(weights, to_weights, strict=True))
        # Detached, since what leads back to the graph would keep it alive until W.
        left = Pending(rule, gradient, x.detach(), trained)
        if ledger.pendings is None:
            return None, None, made, *left.gradients()
        ledger.pendings.append(left)
        return None, None, made, *none


def _cast(weight: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A weight as the operation sees it: under autocast its input is narrower than the weight."""
    if weight is None or weight.dtype == dtype or not dtype.is_floating_point:
        return weight  # a call of `to` that changes nothing takes as long as the product of a small layer
    return weight.to(dtype)
