"""A hint to the processor, for compiled loops: this array element will be used soon."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

_WRITE, _KEEP_CLOSE, _DATA = 1, 3, 1  # arguments of LLVM's prefetch


def _typed(typing, array, index):

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        element = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [element.type, number, number, number])
        hint = builder.module.declare_intrinsic("llvm.prefetch", [element.type], kind)
        builder.call(hint, [element, number(_WRITE), number(_KEEP_CLOSE), number(_DATA)])
        return context.get_dummy_value()

    return types.void(array, index), generate


#: Start to load `array[index]` (one dimension; any index, even past the end) and go on at once.
prefetch = cast(Callable[[np.ndarray, np.uint64], None], intrinsic(_typed))
