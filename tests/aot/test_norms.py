"""Bytes that norms move on an H100, in sizes of x, against the least there is."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from colossax.aot import compile_program, parse_target, target_devices, traffic
from colossax.pallas.norms import layer_norm, reference, rms_norm

pytestmark = pytest.mark.aot

ROWS, WIDTH = 16384, 4096
X_BYTES = 2 * ROWS * WIDTH
FORWARD, BACKWARD = 2, 3
"""The least: x read and y written; x and dy read and dx written."""

BOTH = ("rms_norm", "layer_norm")


@functools.cache
def device():
    return target_devices(parse_target("h100:1x1"))[0]


def shaped(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device()))


def moved(f, *args):
    """Bytes of a program over those of x."""
    args = jax.tree.map(lambda a: shaped(a.shape, a.dtype), args)
    program = compile_program(jax.jit(f).lower(*args))
    return sum(one.bytes for one in traffic(program.hlo)) / X_BYTES


def operands(name):
    vector = shaped((WIDTH,), jnp.float32)
    return shaped((ROWS, WIDTH), jnp.bfloat16), *(vector,) * (2 if name == "layer_norm" else 1)


def norm(name, module=None):
    ours = {"rms_norm": rms_norm, "layer_norm": layer_norm}
    return functools.partial(getattr(module, name) if module else ours[name], eps=1e-5)


def backward_alone(f, *args):
    """Its residuals are arguments, as they are where forward ran long before."""
    _, back = jax.eval_shape(lambda *a: jax.vjp(f, *a), *args)
    return moved(lambda back, dy: back(dy), back, args[0])


def keeping(f, x, *vectors):
    """Forward with what backward keeps, x itself aside, which is there already."""
    y, back = jax.vjp(f, x, *vectors)
    return y, [r for r in jax.tree.leaves(back) if (r.shape, r.dtype) != (x.shape, x.dtype)]


def recomputed(f, x, *vectors, dy):
    """Forward again and backward in one program, as in a layer that is not kept."""
    y, back = jax.vjp(f, x, *vectors)
    y, dy = jax.lax.optimization_barrier((y, dy))
    return y, back(dy)


@pytest.mark.parametrize("name", BOTH)
def test_forward_moves_the_least(name):
    assert moved(norm(name), *operands(name)) <= 1.02 * FORWARD


@pytest.mark.parametrize(("name", "most"), [("rms_norm", 1.02), ("layer_norm", 1.51)])
def test_forward_that_is_to_be_differentiated(name, most):
    """The mean is a result of its own, which costs a pass where x comes from memory."""

    assert moved(functools.partial(keeping, norm(name)), *operands(name)) <= most * FORWARD


def test_mean_comes_with_the_sum_that_makes_x():
    def after_sum(f, x, more, scale, bias):
        x = x + more
        return x, f(x, scale, bias)

    x, *vectors = operands("layer_norm")
    f = norm("layer_norm")
    alone = moved(functools.partial(after_sum, f), x, x, *vectors)
    kept = moved(functools.partial(after_sum, functools.partial(keeping, f)), x, x, *vectors)
    assert kept <= 1.005 * alone


@pytest.mark.parametrize("name", BOTH)
def test_backward(name):
    assert backward_alone(norm(name), *operands(name)) <= 1.75 * BACKWARD


@pytest.mark.parametrize(
    ("name", "ours", "derived"), [("rms_norm", 8.1, 8.0), ("layer_norm", 8.1, 12.0)]
)
def test_recomputed_forward_and_backward(name, ours, derived):
    """As in a layer whose activations are not kept: 7 would be forward and backward alone.

    RMSNorm shares its mean square with the forward pass beside it; that it is not kept from it
    spares a copy of x where x is a slice of a stack.
    """
    x, *vectors = operands(name)

    def both(module):
        f = functools.partial(recomputed, norm(name, module))
        return moved(lambda dy, *args: f(*args, dy=dy), x, x, *vectors)

    assert both(None) <= ours
    assert both(reference) >= derived


@pytest.mark.parametrize(("name", "least"), [("rms_norm", 1.6), ("layer_norm", 3.3)])
def test_gradient_that_jax_derives_moves_more(name, least):
    """Of LayerNorm twice as much; of RMSNorm no more once it is one program, see above."""

    def derived(dy, *args):
        return jax.vjp(norm(name, reference), *args)[1](dy)

    x, *vectors = operands(name)
    assert moved(derived, x, x, *vectors) >= least * BACKWARD
    apart = backward_alone(norm(name, reference), *operands(name))
    assert apart > 1.2 * backward_alone(norm(name), *operands(name))


@pytest.mark.parametrize(("name", "most"), [("rms_norm", 1.68), ("layer_norm", 1.01)])
def test_frozen_vectors_cost_nothing(name, most):
    """LayerNorm's dx alone is one kernel; column sums that nobody wants are not computed."""
    x, *vectors = operands(name)

    def frozen(x, dy, *vectors):
        return jax.vjp(lambda x: norm(name)(x, *vectors), x)[1](dy)

    assert moved(frozen, x, x, *vectors) <= most * BACKWARD


@pytest.mark.parametrize("name", BOTH)
def test_frozen_vectors_in_checkpointed_layers_cost_nothing(name):
    layers = 4
    x, *vectors = operands(name)
    stacks = tuple(shaped((layers, WIDTH), jnp.float32) for _ in vectors)

    def loss(x, stacks):
        def layer(x, own):
            return jnp.sin(norm(name)(x, *own)), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, stacks)[0].astype(jnp.float32))

    both = moved(jax.grad(loss, (0, 1)), x, stacks)
    alone = moved(jax.grad(loss), x, stacks)
    assert alone <= both - (2 * layers if name == "layer_norm" else 0)
