"""Every scheme on a mesh of fake devices, as a function of whole arrays in natural order."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from colossax.pallas.attention import attention
from colossax.sharding.sequence import (
    RingAxes,
    gather_attention_local,
    inverse_order,
    ring_attention_local,
    ring_self_attention_local,
    ulysses_local,
    zigzag_order,
)
from tests.oracle import assert_trees_close

SCHEMES = {
    "ring": ring_attention_local,
    "gather": gather_attention_local,
    "rsa": ring_self_attention_local,
}
AXES = ("ring_out", "ring", "ulysses", "tensor")
RING = ("ring_out", "ring")
SEQ = (*RING, "ulysses")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Devices along each axis, and what runs there."""

    ring: int = 1
    outer: int = 1
    ulysses: int = 1
    tensor: int = 1
    scheme: str = "ring"
    order: str = "zigzag"

    @property
    def mesh(self):
        shape = (self.outer, self.ring, self.ulysses, self.tensor)
        devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
        return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))

    @property
    def axes(self):
        if self.outer == 1:
            return RingAxes(inner="ring", inner_size=self.ring)
        return RingAxes(inner="ring", inner_size=self.ring, outer="ring_out", outer_size=self.outer)

    def local(self, q, k, v, slopes, sinks, mask, **options):
        """The scheme on one device's parts; returns output and log-partition."""
        inner = functools.partial(
            SCHEMES[self.scheme],
            mask=mask,
            scale=q.shape[-1] ** -0.5,
            axes=self.axes,
            order=self.order,
            **options,
        )
        return ulysses_local(
            inner, q, k, v, axis="ulysses", size=self.ulysses, alibi_slopes=slopes, sinks=sinks
        )

    def island(self, operands, **options):
        """`shard_map` of it over arrays laid out in this order."""
        tokens = P(None, SEQ, "tensor")

        def of_mask(x):
            return P() if x.ndim == 1 else P(None, RING)

        q, k, v, slopes, sinks, mask = operands
        per_head = (None if x is None else P("tensor") for x in (slopes, sinks))
        return jax.shard_map(
            functools.partial(self.local, **options),
            mesh=self.mesh,
            in_specs=(tokens, tokens, tokens, *per_head, jax.tree.map(of_mask, mask)),
            out_specs=(tokens, P(None, "tensor", SEQ)),
            check_vma=False,
        )

    def __str__(self):
        ring = self.ring if self.outer == 1 else f"{self.outer}x{self.ring}"
        return f"{self.scheme} {ring},{self.ulysses},{self.tensor} {self.order}"

    def __call__(self, q, k, v, slopes, sinks, mask, **options):
        """Output and log-partition of whole arrays in natural order."""
        ranks = self.outer * self.ring

        def lay_out(x):
            return x if x.ndim == 1 else jnp.take(x, _places(self.order, x.shape[1], ranks), axis=1)

        operands = (lay_out(q), lay_out(k), lay_out(v), slopes, sinks, jax.tree.map(lay_out, mask))
        out, lse = self.island(operands, **options)(*operands)
        back = inverse_order(_places(self.order, q.shape[1], ranks))
        return jnp.take(out, back, axis=1), jnp.take(lse, back, axis=2)


def _places(order, length, ranks):
    """Natural index of the token at each place."""
    return zigzag_order(length, ranks) if order == "zigzag" else np.arange(length)


def truth(q, k, v, slopes, sinks, mask, **options):
    """One device, as it is written down."""
    return attention(
        q,
        k,
        v,
        mask=mask,
        alibi_slopes=slopes,
        sinks=sinks,
        return_lse=True,
        implementation="reference",
        **options,
    )


def operands(heads=8, kv_heads=2, s=32, t=None, b=2, h=4, hv=None, slopes=False, sinks=False):
    """q, k, v, slopes and sinks."""
    keys = jax.random.split(jax.random.key(0), 5)
    t = s if t is None else t
    hv = h if hv is None else hv
    shapes = (b, s, heads, h), (b, t, kv_heads, h), (b, t, kv_heads, hv)
    arrays = [2 * jax.random.normal(r, x) for r, x in zip(keys, shapes, strict=False)]
    return (
        *arrays,
        jax.random.uniform(keys[3], (heads,)) / 4 if slopes else None,
        jax.random.normal(keys[4], (heads,)) if sinks else None,
    )


def loss(out, lse):
    """Of output and log-partition, so that both have cotangents that differ everywhere."""
    weight = jnp.sin(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
    seen = ~jnp.isneginf(lse)
    return jnp.sum(out * weight) + jnp.sum(jnp.where(seen, jnp.cos(jnp.where(seen, lse, 0)), 0))


def results(attend, *arrays, mask, **options):
    """Output, log-partition and the gradients of all arrays given."""

    def run(arrays, mask):
        def of(arrays):
            out, lse = attend(*arrays, mask, **options)
            return loss(out, lse), (out, lse)

        gradients, (out, lse) = jax.grad(of, has_aux=True)(arrays)
        return {"out": out, "lse": lse, "gradients": gradients}

    return jax.jit(run)(arrays, mask)


def assert_close(found, wanted, tolerance=1e-5):
    """Like `assert_trees_close`; where nothing is seen both log-partitions are -inf."""
    empty = np.isneginf(wanted["lse"])
    np.testing.assert_array_equal(np.isneginf(found["lse"]), empty)

    def finite(tree):
        return {**tree, "lse": np.where(empty, 0, tree["lse"])}

    assert_trees_close(finite(found), finite(wanted), tolerance=tolerance)
