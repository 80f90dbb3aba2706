"""What the matmuls of a layer send, counted in compiled programs, equals the formulas."""

import contextlib

import jax
import jax.numpy as jnp
import pytest

from colossax.aot import collectives
from colossax.sharding import linear, linears, recomputing, use
from colossax.sharding.matmul.cost import Widths, sent_items
from tests.cases import quick_first
from tests.sharding.matmul.layouts import PLANS

B, S, H = 16, 32, 64
HEAD = ("heads", "head_dim")
M = B * S
WIDTHS = Widths(into_in=2 * H, into_out=7 * H, out_in=5 * H, out_out=2 * H, weights=12 * H * H)
SHAPES = {"q": (H, 8, H // 8), "o": (8, H // 8, H), "up": (H, 4 * H), "down": (4 * H, H)}
SHAPES |= {"k": SHAPES["q"], "v": SHAPES["q"]}


def layer(x, w):
    """The matmuls of a GPT layer, with something cheap in place of attention."""
    q, k, v = linears(x, [(w[name], ("embed", *HEAD), None) for name in "qkv"])
    x = x + linear(q * k + v, w["o"], (*HEAD, "embed"), contract=2)
    return x + linear(
        jax.nn.relu(linear(x, w["up"], ("embed", "mlp"))), w["down"], ("mlp", "embed")
    )


def moved(bound, *, recomputed=False):
    """What a device sends forward and backward, which are compiled apart.

    In one program the compiler would find that both gather the same and gather once.
    """
    x = jax.ShapeDtypeStruct((B, S, H), jnp.float32)
    w = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    with use(bound), recomputing() if recomputed else contextlib.nullcontext():
        forward = jax.jit(lambda x, w: jax.vjp(layer, x, w))
        y, pull = jax.eval_shape(forward, x, w)
        programs = [forward.lower(x, w), jax.jit(lambda pull, dy: pull(dy)).lower(pull, y)]
    texts = [program.compile().as_text() for program in programs]
    return [one for text in texts for one in collectives(text, bound.mesh)]


def items(found):
    return sum(one.ring_bytes for one in found) / 4


@pytest.mark.parametrize("name", quick_first(PLANS, 3))
def test_layouts_send_what_the_formula_says(devices, name):
    bound = PLANS[name].bind(devices)
    found = moved(bound)
    assert items(found) == pytest.approx(sent_items(bound, M, WIDTHS), rel=1e-6)
    passed = {one.kind for one in found if one.axes in (("tensor",), ("row",), ("col",))}
    if name.startswith(("1d-sp", "cannon")):
        assert passed == {"collective-permute"}
    else:
        assert "collective-permute" not in passed


@pytest.mark.parametrize("name", ["2d-2x4", "2.5d-fsdp2", "cannon-fsdp2", "3d-2x2x2", "1d-sp4"])
def test_backward_of_a_recomputed_layer_does_not_gather_again(devices, name):
    bound = PLANS[name].bind(devices)
    found = items(moved(bound, recomputed=True))
    assert found == pytest.approx(sent_items(bound, M, WIDTHS, kept=True), rel=1e-6)
    assert found < sent_items(bound, M, WIDTHS)
