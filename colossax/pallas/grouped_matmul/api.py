"""One grouped matmul, several implementations: the call, its checks, its gradients."""

import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from colossax.pallas.choice import Choice, choose
from colossax.pallas.target import current_target
from colossax.pallas.varying import vary_alike

from . import interpret, mosaic_gpu, reference, xla
from .spec import GroupedSpec

IMPLEMENTATIONS: dict[str, ModuleType] = {
    "mosaic": mosaic_gpu,
    "xla": xla,
    "interpret": interpret,
    "reference": reference,
}
"""Fastest first; `xla` takes everything, so `auto` never comes to those behind it."""

UNPROVEN = "mosaic"
"""What `auto` takes only once it has proved itself on the device that is there."""

declined_by = Choice("grouped_matmul", IMPLEMENTATIONS, UNPROVEN).declined_by

_PERSISTENT = ("mosaic", "interpret")


def grouped_matmul(
    x: Float[Array, "t d"],
    w: Float[Array, "e d f"],
    group_sizes: Int[Array, " e"],
    *,
    gradient_into: Float[Array, "e d f"] | None = None,
    weight_first: bool = False,
    implementation: str = "auto",
    spare_multiprocessors: int = 0,
) -> Float[Array, "t f"]:
    """Every group of rows times a matrix of its own: the experts of a mixture, on one device.

        out[r] = x[r] @ w[i]    for sum(group_sizes[:i]) <= r < sum(group_sizes[:i + 1])

    Rows behind the last group give 0 and have no gradient. Groups may be empty.

    Args:
        x: Rows in the order of their groups.
        w: A matrix per group, in x's dtype.
        group_sizes: Not negative; they sum to t or less.
        gradient_into: Of w's shape; it then has the gradient by w, in its own dtype, and w has
            none: for sums in more digits than x has. Its values are not read.
        weight_first: Backward computes the gradient by w before that by x, so that an x made anew
            for it need not stay while what follows from its gradient is computed.
        implementation: `auto` takes the first that accepts, `mosaic` only once proved on the
            device that is there; or `mosaic`, `xla`, `interpret`,
            `reference`.
        spare_multiprocessors: That kernels whose blocks stay until all is done leave to what runs
            beside them, such as collectives; the others' blocks make room one after the other.

    Returns:
        In x's dtype, summed in float32. The gradients by x and w are grouped matmuls too, in the
        dtype of x; none reads a transposed copy. (`mosaic` rounds that by w to x's dtype before it
        is cast to another.)

    Raises:
        ValueError: Shapes or dtypes contradict one another, or `implementation` is no name.
        NotImplementedError: The implementation named does not take this call, says why.

    Cost: 2 t d f FLOPs forward, the same for each gradient, and up to e tiles of rows more.
    """
    _check(x, w, group_sizes, spare_multiprocessors)
    if gradient_into is not None and gradient_into.shape != w.shape:
        raise ValueError(
            f"grouped_matmul: gradient_into {gradient_into.shape} has the gradient by w {w.shape};"
            " they must be of one shape"
        )
    spec = GroupedSpec(
        rows=x.shape[0],
        groups=w.shape[0],
        features_in=x.shape[1],
        features_out=w.shape[2],
        dtype=x.dtype,
    )
    given = ("grouped_matmul", IMPLEMENTATIONS, spec, current_target(), implementation)
    chosen = choose(*given, unproven=UNPROVEN)
    # The hand-written gradients vary over a mesh as all operands together do.
    options = {"spared": spare_multiprocessors} if chosen in _PERSISTENT else {}
    fixed = (chosen, tuple(options.items()), weight_first)
    return _multiply(*fixed, *vary_alike((x, w, gradient_into, group_sizes)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _multiply(
    chosen: str,
    options: Any,
    _weight_first: bool,
    x: Array,
    w: Array,
    into: Array | None,
    group_sizes: Array,
) -> Array:
    out = IMPLEMENTATIONS[chosen].multiply(x, w, group_sizes, **dict(options))
    return vary_alike((out, x))[0]


def _forward(
    chosen: str,
    options: Any,
    weight_first: bool,
    x: Array,
    w: Array,
    into: Array | None,
    group_sizes: Array,
) -> tuple[Array, Any]:
    like = None if into is None else jnp.zeros((0,), into.dtype)
    out = _multiply(chosen, options, weight_first, x, w, into, group_sizes)
    return out, (x, w, like, group_sizes)


def _backward(
    chosen: str, options: Any, weight_first: bool, saved: Any, dy: Array
) -> tuple[Array | None, ...]:
    x, w, like, group_sizes = saved
    implementation = IMPLEMENTATIONS[chosen]
    dtype = x.dtype if like is None else like.dtype
    dw = implementation.weight_gradient(x, dy, group_sizes, dtype=dtype)
    if weight_first:
        dw, dy = jax.lax.optimization_barrier((dw, dy))
    dx = implementation.multiply(dy, w, group_sizes, transposed=True, **dict(options))
    dx, dw, _ = vary_alike((dx, dw, x))
    return (dx, dw, None, None) if like is None else (dx, None, dw, None)


_multiply.defvjp(_forward, _backward)


def _check(x: Array, w: Array, group_sizes: Array, spared: int) -> None:
    shapes = f"x {x.shape}, w {w.shape}, group_sizes {group_sizes.shape}"
    if x.ndim != 2 or w.ndim != 3 or w.shape[1] != x.shape[1]:
        raise ValueError(f"grouped_matmul: {shapes} do not fit; they are [t, d], [e, d, f], [e]")
    if group_sizes.shape != w.shape[:1]:
        raise ValueError(f"grouped_matmul: {shapes}: give one size for each of {w.shape[0]} groups")
    if 0 in (*x.shape, *w.shape):
        raise ValueError(f"grouped_matmul: {shapes}: no dim may be 0")
    if spared < 0:
        raise ValueError(f"grouped_matmul: spare_multiprocessors is {spared}; give 0 or more")
    if w.dtype != x.dtype:
        raise ValueError(
            f"grouped_matmul: dtypes {x.dtype} of x, {w.dtype} of w differ; cast first"
        )
