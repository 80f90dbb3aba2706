"""Arithmetic on arrays in host memory, found in a traced program before it is compiled."""

import math
from collections.abc import Iterator
from typing import Any

import jax

from colossax.aot.saved import call_stack, scopes

_MOVES = frozenset(
    "dynamic_slice dynamic_update_slice slice squeeze reshape expand_dims device_put copy copy_p"
    " optimization_barrier sharding_constraint reshard pcast pvary name".split()
)
"""Primitives that compile to copies, to slices and updates that are copied, or to nothing."""

_PLUMBING = frozenset(
    "while scan cond jit pjit closed_call core_call remat remat2 checkpoint custom_jvp_call"
    " custom_vjp_call custom_vjp_call_jaxpr shard_map run_state".split()
)
"""Primitives that pass their operands on to jaxprs of their own, which are looked at as well."""


def host_arithmetic(jaxpr: Any) -> list[str]:
    """Operations other than data movement on arrays in host memory, one sentence for each.

    The compiler would run them on the host, or read the host's memory from a kernel, both far
    slower than a copy. A broadcast counts too where it makes an array larger: what it fills is
    not kept when the result is then updated in place.

    Args:
        jaxpr: Of the whole program, `jax.jit(f).trace(...).jaxpr` or `jax.make_jaxpr(f)(...)`;
            a backward pass is seen in the jaxpr of a program that differentiates.
    """
    return [
        f"{eqn.primitive.name} on {_operands(eqn)} computes in host memory{_where(eqn)};"
        f" move the operands with jax.device_put(..., jax.memory.Space.Device) first"
        for scope in scopes(jaxpr)
        for eqn in scope.eqns
        if any(True for _ in _on_host(eqn)) and not _harmless(eqn)
    ]


def _on_host(eqn: Any) -> Iterator[Any]:
    for var in eqn.invars:
        if getattr(var.aval, "memory_space", None) == jax.memory.Space.Host:
            yield var.aval


def _harmless(eqn: Any) -> bool:
    name = eqn.primitive.name
    if name == "broadcast_in_dim":
        return math.prod(eqn.invars[0].aval.shape) == math.prod(eqn.outvars[0].aval.shape)
    return name in _MOVES or name in _PLUMBING


def _operands(eqn: Any) -> str:
    return ", ".join(aval.str_short() for aval in _on_host(eqn))


def _where(eqn: Any) -> str:
    stack = call_stack(eqn)
    return f" at {stack[0]}" if stack else ""
