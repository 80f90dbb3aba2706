"""Floating-point operations of a step as it was traced."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from colossax.aot.saved import inner_jaxprs

_NOT_SEEN = {
    "pallas_call": "Pallas kernels",
    "ragged_dot_general": "ragged matmuls",
    "dot_product_attention_fwd": "cuDNN's attention",
    "dot_product_attention_bwd": "cuDNN's attention",
}
"""Primitives that multiply in a way that is not counted, and what people call them."""

_LOOPS = "all runs but one of loops that end by a condition"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedFlops:
    """FLOPs of one step over all devices.

    Attributes:
        flops: Two for each product that a matmul or convolution adds up, recomputation counted.
        left_out: What multiplies too and is not counted, for people.
        float8_flops: Of `flops`, those of matmuls whose two factors are in float8.
    """

    flops: int
    left_out: tuple[str, ...]
    float8_flops: int = 0


def traced_flops(jaxpr: Any) -> TracedFlops:
    """Matmuls and convolutions of a traced program, those in loops as often as they run.

    What stands in a `shard_map` runs on each device of its mesh axes; of a choice, the dearest
    branch counts.

    Args:
        jaxpr: Of the whole program, `jax.jit(f).trace(...).jaxpr`.
    """
    left_out: set[str] = set()
    plain = getattr(jaxpr, "jaxpr", jaxpr)
    flops = _flops(plain, _ALL, left_out)
    float8 = _flops(plain, {"dot_general": _of_float8}, set())
    return TracedFlops(flops=flops, left_out=tuple(sorted(left_out)), float8_flops=float8)


def equation_flops(eqn: Any) -> float:
    """Of one equation and what stands in it; of kernels that do not say theirs, none."""
    return float(_of(eqn, _ALL, set()))


def _flops(jaxpr: Any, counted: Mapping[str, Callable[[Any], int]], left_out: set[str]) -> int:
    """Of a program those that primitives of these names are said to take."""
    return sum(_of(eqn, counted, left_out) for eqn in jaxpr.eqns)


def _of(eqn: Any, counted: Mapping[str, Callable[[Any], int]], left_out: set[str]) -> int:
    name = eqn.primitive.name
    unseen = [said for part, said in _NOT_SEEN.items() if name.startswith(part)]
    left_out.update(unseen)
    if unseen:
        return 0
    if name in counted:
        return counted[name](eqn)
    inside = [_flops(inner, counted, left_out) for inner in inner_jaxprs(eqn)]
    if name == "while" and any(inside):
        left_out.add(_LOOPS)
    if name == "cond":
        return max(inside)
    return sum(inside) * _times(eqn)


def _times(eqn: Any) -> int:
    """How often what is inside runs, over all devices."""
    if eqn.primitive.name == "shard_map":
        mesh = eqn.params["mesh"]
        return math.prod(mesh.shape[axis] for axis in eqn.params["newly_manual_axes"])
    return eqn.params["length"] if eqn.primitive.name == "scan" else 1


def _of_matmul(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[i] for i in contracted)


def _of_float8(eqn: Any) -> int:
    narrow = all(str(factor.aval.dtype).startswith("float8") for factor in eqn.invars)
    return _of_matmul(eqn) if narrow else 0


def _of_convolution(eqn: Any) -> int:
    """Zeros between the elements of a dilated input are not counted."""
    kernel = eqn.invars[1].aval.shape
    of_one = math.prod(kernel) // kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    products = math.prod(eqn.outvars[0].aval.shape) * of_one
    return 2 * products // math.prod(eqn.params["lhs_dilation"])


_ALL = {"dot_general": _of_matmul, "conv_general_dilated": _of_convolution}
