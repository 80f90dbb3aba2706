"""The layers of a decoder share what is computed of their mask: none of it stands in their loop."""

import collections
import dataclasses
import functools

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
from tests.cases import quick_first
from tests.programs import equations

SEQ, ROWS, VOCAB = 64, 2, 32
LLAMA = {"vocab": VOCAB, "layers": 2, "mlp": 32, "max_seq": SEQ, "init_std": 0.1}
SMALL = LlamaConfig(**LLAMA, embed=16, heads=4, kv_heads=2, head_dim=8)
KERNELS = LlamaConfig(**LLAMA, embed=128, heads=2, kv_heads=1, head_dim=64)


def batch():
    """Three documents in a row and padding behind them, packed otherwise in each row."""
    rows = [np.repeat([0, 1, 2, -1], lengths) for lengths in ((28, 23, 9, 4), (15, 37, 12, 0))]
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


def in_layers(jaxpr, deepest=1):
    """What is made of whole numbers and truths alone in the loop over layers, and ranges anywhere.

    Of loops inside of it those down to `deepest`: over tiles, they look at the tokens of each tile,
    as they must; those over the steps of a ring have no need to.
    """
    found, ranges = collections.Counter(), collections.Counter()
    for depth, one in equations(jaxpr):
        if RANGES in str(one.source_info.name_stack):
            ranges[depth] += 1
        made, of = ([x.aval for x in some] for some in (one.outvars, one.invars))
        whole = all(str(x.dtype).startswith(("int", "uint", "bool")) for x in (*made, *of))
        arrays = made and all(x.size > 1 for x in made)
        if 1 <= depth <= deepest and whole and arrays and one.primitive.name not in ("jit", "pjit"):
            found[one.primitive.name] += 1
    return found, ranges


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """A plan, and whether its programs are traced for a CPU or for an H100."""

    mesh: dict[str, int]
    scheme: str = "auto"
    gpu: bool = False

    @property
    def plan(self):
        attention = AttentionConfig(kernel="mosaic" if self.gpu else "auto", scheme=self.scheme)
        precision = Precision(compute="bfloat16") if self.gpu else Precision()
        return Plan(mesh=self.mesh, attention=attention, precision=precision)

    def traced(self):
        """The gradients of two scanned layers for packed rows."""
        state, step = step_of(KERNELS if self.gpu else SMALL, self.plan)
        capability = (9, 0) if self.gpu else None
        with target("gpu" if self.gpu else "cpu", compute_capability=capability):
            return jax.make_jaxpr(step.gradients)(state, batch())


RINGS = {
    "ring": Place(mesh={"fsdp": 2, "ring": 4}),
    "ring in natural order": Place(mesh={"ring": 4}, scheme="ring"),
    "all_gather": Place(mesh={"ring": 4}, scheme="all_gather"),
    "usp": Place(mesh={"ring": 2, "ulysses": 2}),
    "double ring": Place(mesh={"ring_out": 2, "ring_in": 4}),
    "ring of H100s": Place(mesh={"fsdp": 2, "ring": 4}, gpu=True),
    "all_gather on H100s": Place(mesh={"ring": 4}, scheme="all_gather", gpu=True),
}
PLACES = {
    "one CPU": Place(mesh={"fsdp": 1}),
    "ulysses": Place(mesh={"fsdp": 2, "ulysses": 2}),
    "one H100": Place(mesh={"fsdp": 1}, gpu=True),
    **RINGS,
}


@functools.cache
def traced(place):
    """The program of a place, for all tests that look at it."""
    return PLACES[place].traced()


@pytest.mark.catches("ranges-in-every-layer")
@pytest.mark.catches("ring-ranges-in-every-layer")
@pytest.mark.parametrize("place", quick_first(PLACES, ["one CPU", "usp", "ring of H100s"]))
def test_no_layer_computes_ranges(place):
    """Loss and gradients of two scanned layers, packed rows: all of it stands outside.

    Inside are the numbers of tiles; and, of what a ring carries, the part of a step is picked.
    """
    picked = {"dynamic_slice", "squeeze"} if place in RINGS else set()
    found, ranges = in_layers(traced(place), deepest=2 if PLACES[place].gpu else 1)
    assert set(found) <= {"iota", *picked}, found
    assert set(ranges) == {0} and ranges[0] > 20, ranges


@pytest.mark.parametrize("place", quick_first(RINGS, ["usp"]))
def test_no_whole_number_travels_in_a_layer(place):
    sent = ("ppermute", "all_gather", "all_to_all")
    within = [one for depth, one in equations(traced(place)) if depth]
    dtypes = {str(one.outvars[0].aval.dtype) for one in within if one.primitive.name in sent}
    assert dtypes and all("float" in dtype for dtype in dtypes), dtypes


@pytest.mark.parametrize(
    "place",
    quick_first([x for x in PLACES if not PLACES[x].gpu], ["one CPU", "ring", "usp"]),
)
def test_loss_and_gradients_are_the_same_bits(place, monkeypatch):
    plan = PLACES[place].plan
    state, step = step_of(SMALL, plan)
    found = jax.jit(step.gradients)(state, batch())
    monkeypatch.setattr("colossax.nn.decoder.masks.with_ranges", lambda operands, _: operands.mask)
    state, step = step_of(SMALL, plan)
    expected = jax.jit(step.gradients)(state, batch())
    jax.tree.map(np.testing.assert_array_equal, found, expected)
