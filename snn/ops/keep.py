"""A list of the values whose flag is set: for the CPU kernels, in vector instructions where there are some.

Numba does not see a change of this file: after one, delete the kernels that it has compiled (`*.nbi`).
"""

from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from snn.ops.cpu_kernel import Array, cpu_kernel

VECTOR = 64  # bytes
HAS_COMPRESS = get_host_cpu_features().get("avx512vbmi2", False)  # of 16-bit values, in one instruction


@cpu_kernel
def keep(flags: Array, values: Array, to: Array) -> Any:
    """Write those of the `values` whose flag is 1, not 0, to the front of `to`; return how many they are.

    Without a branch: each value is written, and stays if its flag is 1; so entries of `to` beyond the last
    are overwritten, but no more than there are flags. The values are unsigned integers.
    """
    n = np.uintp(0)
    lanes = VECTOR // values.itemsize
    whole = len(flags) // lanes * lanes if HAS_COMPRESS else 0
    for low in range(0, whole, lanes):
        n += _keep_vector(flags, values, np.uintp(low), to, n)
    for i in range(whole, len(flags)):
        to[n] = values[i]
        n += np.uintp(flags[i])
    return np.int64(n)


def _vector_code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """Emit the LLVM code of `_keep_vector`."""
    flags, values, low, to, n = arguments
    flags_type, values_type, _, to_type, _ = signature.args
    size = context.get_abi_sizeof(context.get_value_type(values_type.dtype))
    lanes = VECTOR // size

    def vector(array_type: Any, array: Any, start: Any) -> Any:
        kind = ir.VectorType(context.get_value_type(array_type.dtype), lanes)
        data = context.make_array(array_type)(context, builder, array).data
        return kind, builder.bitcast(builder.gep(data, [start]), kind.as_pointer())

    flag_kind, flag = vector(flags_type, flags, low)
    kind, value = vector(values_type, values, low)
    _, target = vector(to_type, to, n)
    kept = builder.icmp_unsigned("!=", builder.load(flag, align=1), ir.Constant(flag_kind, None))
    compress = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(kind, [kind, kept.type, kind]),
        f"llvm.experimental.vector.compress.v{lanes}i{8 * size}",
    )
    anything = ir.Constant(kind, ir.Undefined)
    builder.store(
        builder.call(compress, [builder.load(value, align=size), kept, anything]), target, align=size
    )
    count = builder.ctpop(builder.bitcast(kept, ir.IntType(lanes)))
    return builder.zext(count, context.get_value_type(types.uintp))


def _keep_vector_typed(context: Any, flags: Any, values: Any, low: Any, to: Any, n: Any) -> Any:
    """:func:`keep` from `flags[low]` and `values[low]` on, for a vector of values, to `to[n]` and on."""
    return types.uintp(flags, values, low, to, n), _vector_code


_keep_vector: Any = intrinsic(_keep_vector_typed)
