"""The only place that knows framework versions or private parts of JAX."""

import re
from collections.abc import Callable
from typing import Any

import jax
from jax.interpreters import partial_eval

LOWEST_JAX = (0, 10, 2)


def version_tuple(text: str) -> tuple[int, ...]:
    """`"0.12.0.1rc1"` as (0, 12, 0, 1)."""
    return tuple(int(re.match(r"\d*", part).group() or 0) for part in text.split(".")[:4])  # type: ignore[union-attr]


def require_supported_jax() -> None:
    """Refuse a JAX older than the oldest one the tests run on.

    Raises:
        ImportError: JAX is older than `LOWEST_JAX`.
    """
    if version_tuple(jax.__version__) < LOWEST_JAX:
        wanted = ".".join(map(str, LOWEST_JAX))
        raise ImportError(f"colossax needs jax >= {wanted}, found {jax.__version__}; upgrade jax")


def inputs_used(fn: Callable[..., Any], *args: Any) -> tuple[bool, ...]:
    """Which flattened inputs of `fn` its outputs depend on, after dead code is removed.

    Traces `fn` once; nothing is computed.
    """
    closed = jax.make_jaxpr(fn)(*args)
    _, used = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return tuple(used)


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Mesh axes along which a value inside `shard_map` may differ between devices."""
    kind = jax.typeof(x)
    older = getattr(kind, "vma", None)
    return frozenset(older) if older is not None else kind.manual_axis_type.varying
