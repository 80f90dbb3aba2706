"""An engine whose pages are shared by the devices of a ring says what one device says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from colossax.config import Plan
from colossax.inference import make_engine
from colossax.inference.engine.sizing import layout_bytes
from colossax.inference.plan import unrolled
from colossax.pallas.attention import Pages
from tests.cases import quick_first
from tests.inference.engine.test_engine import SMALL, alone, requests, tokens
from tests.inference.engine.test_staged import bound_of as staged_bound
from tests.inference.test_generator import CONFIGS, LLAMA, build, single

pytestmark = pytest.mark.slow

MESHES = {
    "ring2 tensor2": {"ring": 2, "tensor": 2},
    "ring3": {"ring": 3},
    "ring8": {"ring": 8},
    "ring_out2 ring_in2 tensor2": {"ring_out": 2, "ring_in": 2, "tensor": 2},
    "data2 ring4": {"data": 2, "ring": 4},
}


def bound_of(mesh, config=LLAMA):
    plan = unrolled(Plan(mesh=mesh), build(config, single())[0])
    return plan.bind(jax.devices()[: int(np.prod(list(mesh.values())))])


def made(bound, config=LLAMA, **options):
    spec, params = build(config, bound)
    return make_engine(spec, bound, params, **SMALL | options)


@pytest.mark.catches("ring-reads-pages-of-others")
@pytest.mark.catches("ring-forgets-the-largest")
@pytest.mark.catches("ring-has-all-pages")
@pytest.mark.parametrize("name", quick_first(MESHES, ["ring2 tensor2"]))
def test_each_as_if_alone(name):
    """Chunks, shared pages and preemption; a device has its share of the cache and no more."""
    mesh = MESHES[name]
    one = made(bound_of(mesh))
    assert tokens(one.generate_all(requests())) == alone("llama")
    assert one.stats.scheduler.preemptions and one.stats.scheduler.reused
    size = int(np.prod([n for axis, n in mesh.items() if axis.startswith("ring")]))
    each = -(-SMALL["pages"] // size)
    for engine in getattr(one, "engines", [one]):
        shapes = {x.sharding.shard_shape(x.shape) for x in engine._state.cache.values()}
        assert shapes == {(3, each, 4, 2 // mesh.get("tensor", 1), 8)}
        whole = engine.sizes.page_tokens * each * size * 3 * 2 * 2 * 8 * 4
        assert layout_bytes(engine.program.cache) == whole // size // mesh.get("tensor", 1)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["mistral", "bloom", "gpt2"])
def test_families(name):
    """Windows begin behind pages that no token sees; slopes go by positions."""
    found = made(bound_of({"ring": 4}, CONFIGS[name]), CONFIGS[name]).generate_all(requests())
    assert tokens(found) == alone(name)


@pytest.mark.sweep
def test_a_ring_in_each_stage():
    found = made(staged_bound({"stage": 2, "ring": 2, "tensor": 2}), pages=36)
    assert tokens(found.generate_all(requests())) == alone("llama")


def test_each_page_is_in_one_place():
    """Written down by hand: six pages on three devices, page p in row p // 3 of device p mod 3."""
    bound = bound_of({"ring": 3})
    table = np.asarray([[4, 1, 3, 0], [5, 2, 0, 0]], np.int32)

    def held_local(table):
        pages = Pages(table=table, groups=jnp.zeros((1, 1), jnp.int32), ring=("ring",))
        rows, numbers = pages.held(None)
        seat = jnp.asarray([0, 1, 0], jnp.int32)
        row, _ = pages.row_and_column(seat, jnp.asarray([0, 5, 9], jnp.int32), (1, 2, 4), None)
        return rows[None], numbers[None], row[None]

    mapped = jax.shard_map(
        held_local, mesh=bound.mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec("ring")
    )
    rows, numbers, row = (np.asarray(x) for x in mapped(table))
    seen = [
        [
            [(int(n), int(r)) for n, r in zip(*one, strict=True) if n < 4]
            for one in zip(a, b, strict=True)
        ]
        for a, b in zip(numbers, rows, strict=True)
    ]
    assert seen == [
        [[(2, 1), (3, 0)], [(2, 0), (3, 0)]],
        [[(0, 1), (1, 0)], []],
        [[], [(0, 1), (1, 0)]],
    ]
    # Tokens at 0, 5 and 9 of pages of four: pages 4, 2 and 3, each written where it is.
    assert row.tolist() == [[2, 2, 1], [1, 2, 2], [2, 0, 2]]
