"""The layers of a decoder share what is computed of their mask: none of it stands in their loop."""

import collections

import jax
import numpy as np
import optax
import pytest

from colossax.config import AttentionConfig, Plan, Precision
from colossax.models import LlamaConfig, maker
from colossax.pallas.attention.mask import RANGES
from colossax.pallas.target import target
from colossax.planner import boost
from colossax.tasks import next_token_loss
from tests.programs import equations

SEQ, ROWS, VOCAB = 48, 2, 32
LLAMA = {"vocab": VOCAB, "layers": 2, "mlp": 32, "max_seq": SEQ, "init_std": 0.1}
SMALL = LlamaConfig(**LLAMA, embed=16, heads=4, kv_heads=2, head_dim=8)
KERNELS = LlamaConfig(**LLAMA, embed=128, heads=2, kv_heads=1, head_dim=64)


def batch():
    """Three documents in a row and padding behind them, packed otherwise in each row."""
    rows = [np.repeat([0, 1, 2, -1], lengths) for lengths in ((20, 17, 7, 4), (9, 30, 9, 0))]
    segments = np.stack(rows).astype(np.int32)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, ROWS, SEQ)).astype(np.int32)
    return {
        "tokens": tokens[0],
        "targets": tokens[1],
        "segments": segments,
        "positions": np.stack([_restarting(row) for row in segments]),
        "weights": (segments >= 0).astype(np.float32),
    }


def _restarting(segments):
    return np.asarray([np.sum(segments[:i] == one) for i, one in enumerate(segments)], np.int32)


def step_of(config, plan):
    devices = jax.devices()[: int(np.prod(list(plan.mesh.values())))]
    return boost(maker(config), optax.sgd(1.0), next_token_loss(), plan, devices=devices)


def in_layers(jaxpr):
    """What is made of whole numbers and truths alone in the loop over layers, and ranges anywhere.

    Loops inside of it, over tiles, look at the tokens of each tile, as they must.
    """
    found, ranges = collections.Counter(), collections.Counter()
    for depth, one in equations(jaxpr):
        if RANGES in str(one.source_info.name_stack):
            ranges[depth] += 1
        made, of = ([x.aval for x in some] for some in (one.outvars, one.invars))
        whole = all(str(x.dtype).startswith(("int", "uint", "bool")) for x in (*made, *of))
        arrays = made and all(x.ndim for x in made)
        if depth == 1 and whole and arrays and one.primitive.name not in ("jit", "pjit"):
            found[one.primitive.name] += 1
    return found, ranges


PLACES = {
    "one CPU": (SMALL, {"fsdp": 1}, "auto", "cpu"),
    "ulysses": (SMALL, {"fsdp": 2, "ulysses": 2}, "auto", "cpu"),
    "one H100": (KERNELS, {"fsdp": 1}, "mosaic", "gpu"),
}


@pytest.mark.catches("ranges-in-every-layer")
@pytest.mark.parametrize("place", PLACES)
def test_no_layer_computes_ranges(place):
    """Loss and gradients of two scanned layers, packed rows: all of it stands outside."""
    config, mesh, kernel, platform = PLACES[place]
    precision = Precision(compute="bfloat16") if platform == "gpu" else Precision()
    plan = Plan(mesh=mesh, attention=AttentionConfig(kernel=kernel), precision=precision)
    state, step = step_of(config, plan)
    with target(platform, compute_capability=(9, 0) if platform == "gpu" else None):
        found, ranges = in_layers(jax.make_jaxpr(step.gradients)(state, batch()))
    assert set(found) <= {"iota"}, found  # the numbers of the tiles
    assert set(ranges) == {0} and ranges[0] > 20, ranges


@pytest.mark.parametrize("place", ["one CPU", "ulysses"])
def test_loss_and_gradients_are_the_same_bits(place, monkeypatch):
    config, mesh, _, _ = PLACES[place]
    state, step = step_of(config, Plan(mesh=mesh))
    found = jax.jit(step.gradients)(state, batch())
    monkeypatch.setattr("colossax.nn.decoder.with_ranges", lambda operands, _: operands.mask)
    state, step = step_of(config, Plan(mesh=mesh))
    expected = jax.jit(step.gradients)(state, batch())
    jax.tree.map(np.testing.assert_array_equal, found, expected)
