"""What a model without layer stacks keeps of a forward pass for its backward."""

import math
from typing import Any

from colossax.aot.saved import inner_jaxprs

_MULTIPLY = ("dot_general", "conv_general_dilated")
_FORGET = ("checkpoint", "remat", "remat2")
"""Primitives that compute again in backward what stands in them."""


def kept_bytes_of(jaxpr: Any) -> float:
    """Bytes of all that matmuls and convolutions read and write, each array once.

    Between them the compiler computes again what is elementwise. Of what is recomputed as a whole
    the inputs are kept; what stands in a loop, as often as it runs.

    Args:
        jaxpr: Of a forward pass.
    """
    found: dict[Any, float] = {}
    inside = 0.0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in (*_MULTIPLY, *_FORGET):
            read = [*eqn.invars, *(eqn.outvars if name in _MULTIPLY else ())]
            found |= {var: _bytes(var.aval) for var in read if not hasattr(var, "val")}
            continue
        times = eqn.params["length"] if name == "scan" else 1
        each = [times * kept_bytes_of(inner) for inner in inner_jaxprs(eqn)]
        inside += max(each, default=0.0) if name == "cond" else sum(each)
    return inside + sum(found.values())


def _bytes(aval: Any) -> float:
    return float(math.prod(aval.shape) * aval.dtype.itemsize)
