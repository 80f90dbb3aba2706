"""Attention under a plan that splits the sequence, as a function of whole arrays."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from colossax.config import AttentionConfig, MeshAxis, Plan
from colossax.pallas.attention import attention as on_one_device
from colossax.sharding import RowOrder, attention, in_order, use
from colossax.sharding.sequence import RingAxes, inverse_order
from tests.oracle import assert_trees_close


@dataclasses.dataclass(frozen=True)
class Layout:
    """Devices along each axis, what runs there, and how the tokens of a row lie meanwhile.

    In `natural` order the island itself may bring rows into a balanced one and back.
    """

    ring: int = 1
    outer: int = 1
    ulysses: int = 1
    tensor: int = 1
    scheme: str = "ring"
    order: str = "zigzag"

    @property
    def sizes(self):
        double = {MeshAxis.RING_OUT: self.outer, MeshAxis.RING_IN: self.ring}
        ring = {MeshAxis.RING: self.ring} if self.outer == 1 else double
        return ring | {MeshAxis.ULYSSES: self.ulysses, MeshAxis.TENSOR: self.tensor}

    @property
    def plan(self):
        plan = Plan(mesh=self.sizes, attention=AttentionConfig(scheme=self.scheme))
        return plan.bind(jax.devices()[: math.prod(self.sizes.values())])

    @property
    def axes(self):
        if self.outer == 1:
            return RingAxes(inner="ring", inner_size=self.ring)
        return RingAxes(
            inner="ring_in", inner_size=self.ring, outer="ring_out", outer_size=self.outer
        )

    @property
    def row_order(self):
        return RowOrder(ranks=self.outer * self.ring if self.order == "zigzag" else 1)

    def island(self, q, k, v, slopes, sinks, mask, **options):
        """Output and log-partition of arrays laid out in this order."""
        with use(self.plan), in_order(self.row_order):
            return attention(
                q, k, v, alibi_slopes=slopes, sinks=sinks, mask=mask, return_lse=True, **options
            )

    def __str__(self):
        ring = self.ring if self.outer == 1 else f"{self.outer}x{self.ring}"
        return f"{self.scheme} {ring},{self.ulysses},{self.tensor} {self.order}"

    def __call__(self, q, k, v, slopes, sinks, mask, **options):
        """Output and log-partition of whole arrays in natural order."""

        def lay_out(x):
            if x.ndim == 1:
                return x
            return jnp.take(x, self.row_order.indices(x.shape[1]), axis=1)

        operands = (lay_out(q), lay_out(k), lay_out(v), slopes, sinks, jax.tree.map(lay_out, mask))
        out, lse = self.island(*operands, **options)
        back = inverse_order(self.row_order.indices(q.shape[1]))
        return jnp.take(out, back, axis=1), jnp.take(lse, back, axis=2)


def truth(q, k, v, slopes, sinks, mask, **options):
    """One device, as it is written down."""
    return on_one_device(
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
