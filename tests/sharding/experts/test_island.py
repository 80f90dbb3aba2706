"""Tokens through experts on any mesh, in any form: what one device without either computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.config import ExpertRates
from colossax.errors import PlanError
from colossax.pallas.grouped_matmul import grouped_matmul
from colossax.sharding import use
from colossax.sharding.experts.island import LocalExperts, through_experts
from colossax.sharding.experts.layout import layout_of
from tests.oracle import assert_trees_close
from tests.sharding.experts.plans import (
    DIMS,
    MESHES,
    SPLIT,
    B,
    D,
    Gated,
    K,
    S,
    arrays,
    dense,
    loads,
    plan,
)


def value_and_gradients(function, names):
    """By load: the output and counts, and gradients; all of one compiled program."""
    x, weights, scale, by = arrays()

    def total(x, weights, scale, expert):
        y, *counts = function(x, weights, expert, scale)
        return jnp.sum(y * by), (y, counts)

    compiled = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))
    return {name: compiled(x, weights, scale, loads()[name]) for name in names}


def island(bound, weights):
    shapes = tuple((name, w.shape, DIMS[name]) for name, w in weights.items())
    return layout_of(bound, (B, S, D), K, float(K), shapes, jnp.dtype("float32"))


@functools.cache
def wanted():
    return value_and_gradients(lambda *given: (dense(*given), 0), loads())


def found(asked, names):
    with use(asked) as bound:
        layout = island(bound, arrays()[1])

        def function(x, weights, expert, scale):
            return through_experts(layout, Gated(), x, weights, expert, scale)

        return layout, value_and_gradients(function, names)


def check(asked, *names):
    """The layout, and by load how many passes it took."""
    layout, results = found(asked, names)
    passes = {}
    for name, ((_, (y, counts)), gradients) in results.items():
        (_, (y_wanted, _)), gradients_wanted = wanted()[name]
        assert_trees_close((y, *gradients), (y_wanted, *gradients_wanted))
        assert counts[1] == 0
        passes[name] = int(counts[0])
    return layout, passes


QUICK = [
    ("expert8", "passes", "one"),
    ("expert4-tensor2", "gather", "even"),
    ("expert2-ring2-tensor2", "passes", "padded"),
    ("fsdp4-tensor2", "weights", "starved"),
]


@pytest.mark.catches("experts-learn-from-some")
@pytest.mark.catches("passes-one-short")
@pytest.mark.parametrize(("mesh", "dispatch", "load"), QUICK)
def test_any_mesh_and_form_is_one_device(mesh, dispatch, load):
    check(plan(MESHES[mesh], dispatch), load)


@pytest.mark.sweep
@pytest.mark.parametrize("dispatch", ["passes", "gather", "weights"])
@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_form_and_load_is_one_device(mesh, dispatch):
    check(plan(MESHES[mesh], dispatch), *loads())


@pytest.mark.sweep
@pytest.mark.parametrize("group", ["expert", "tensor", "expert,tensor", "ring,tensor", "none"])
@pytest.mark.parametrize("name", [None, SPLIT])
@pytest.mark.parametrize("dispatch", ["passes", "gather"])
def test_every_group_is_one_device(dispatch, name, group):
    check(plan({"expert": 2, "ring": 2, "tensor": 2}, dispatch, group, name=name), *loads())


def test_on_one_device_nothing_is_sent():
    layout, passes = check(plan({"data": 1}).bind(jax.devices()[:1]), "even")
    assert (layout.way, layout.group, passes) == ("weights", (), {"even": 1})


@pytest.mark.parametrize("capacity", [0.5, 1.25, 100.0])
def test_what_no_buffer_takes_goes_in_further_passes(capacity):
    asked = plan({"expert": 8}, "passes", capacity=capacity)
    layout, passes = check(asked, "one")
    rows = B * S // 8  # of each device, all for one other
    assert passes["one"] == -(-rows // layout.slots)
    assert layout.slots == {0.5: 8, 1.25: 8, 100.0: 16}[capacity]


@pytest.mark.catches("dropped-uncounted")
def test_with_a_capacity_the_last_rows_are_dropped_and_counted():
    asked = plan({"expert": 8}, "capacity", capacity=1.0)
    layout, results = found(asked, ["one"])
    (_, (y, counts)), _ = results["one"]
    assert layout.slots == 8
    assert counts == [1, B * S - 8 * 8]
    kept = np.asarray(wanted()["one"][0][1][0]).copy()
    kept.reshape(8, -1, D)[:, 8:] = 0
    np.testing.assert_allclose(y, kept, atol=1e-5)


@pytest.mark.sweep
@pytest.mark.catches("rows-stay-on-their-node")
def test_in_chunks_one_is_sent_while_another_is_computed():
    asked = plan({"expert": 4, "tensor": 2}, "passes", "expert,tensor", chunks=2, hierarchical=True)
    layout, passes = check(asked, "one", "none")
    assert layout.pipelined and layout.hierarchical
    # Of one destination the rows of a device, and two at least where there are none.
    assert passes == {"one": -(-B * S // 8 // layout.slots), "none": 2}


@pytest.mark.sweep
@pytest.mark.catches("chunk-sent-in-vain")
def test_chunks_between_the_first_and_the_last_come_back_in_their_place():
    asked = plan(MESHES["data2-expert2-tensor2"], "passes", "expert", chunks=2, capacity=0.5)
    _, passes = check(asked, "starved")
    assert passes["starved"] >= 3


@pytest.mark.sweep
@pytest.mark.parametrize("chunks", [2, 3, 16])
@pytest.mark.parametrize("mesh", ["expert8", "expert4-tensor2", "expert2-ring2-tensor2"])
@pytest.mark.parametrize("capacity", [0.5, 4.0])
def test_any_number_of_chunks_is_one_device(mesh, chunks, capacity):
    check(plan(MESHES[mesh], "passes", chunks=chunks, capacity=capacity), *loads())
    check(
        plan(MESHES[mesh], "passes", "expert", chunks=chunks, capacity=capacity, name=SPLIT),
        *loads(),
    )


@pytest.mark.sweep
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("group", ["expert,tensor", "ring,tensor", "expert,ring,tensor"])
def test_rows_that_travel_axis_by_axis_get_to_the_same_experts(group, chunks):
    mesh = MESHES["expert2-ring2-tensor2"]
    check(plan(mesh, "passes", group, chunks=chunks, hierarchical=True), *loads())


@pytest.mark.sweep
@pytest.mark.parametrize("chunks", [2, 4])
def test_with_a_capacity_all_chunks_together_have_it(chunks):
    asked = plan({"expert": 8}, "capacity", capacity=8.0, chunks=chunks)
    layout, _ = check(asked, *loads())
    assert layout.slots * layout.passes == 16 and layout.pipelined
    layout, results = found(plan({"expert": 8}, "capacity", capacity=0.5, chunks=chunks), ["one"])
    assert results["one"][0][1][1][1] == B * S - 8 * layout.slots * layout.passes


def test_rows_of_a_group_of_one_axis_travel_at_once():
    asked = plan({"expert": 8}, "passes", hierarchical=True)
    with use(asked) as bound, pytest.raises(PlanError, match="are split over expert alone"):
        island(bound, arrays()[1])


def test_chunks_of_auto_are_what_rates_make_best():
    rates = ExpertRates(exchange_s=1e-9, bytes_per_s=1e9, compute_s=1e-9, flops_per_s=1e12)
    with use(plan({"expert": 8}, "passes", chunks="auto", rates=rates)) as bound:
        assert island(bound, arrays()[1]).pipelined
    with use(plan({"expert": 8}, "passes", chunks="auto")) as bound:
        with pytest.raises(PlanError, match="experts.rates, which are not known"):
            island(bound, arrays()[1])


@pytest.mark.catches("experts-spare-nothing")
def test_products_leave_room_for_the_exchanges_beside_them(monkeypatch):
    spared = set()

    def counted(rows, w, sizes, *, spare_multiprocessors, **_):
        spared.add(spare_multiprocessors)
        return grouped_matmul(rows, w, sizes)

    monkeypatch.setattr("colossax.sharding.experts.island.grouped_matmul", counted)
    x, weights, scale, _ = arrays()
    for chunks, beside in ((1, False), (2, True)):
        with use(plan(MESHES["expert8"], "passes", chunks=chunks)) as bound:
            layout = island(bound, weights)
            jax.eval_shape(
                functools.partial(through_experts, layout, Gated()),
                x,
                weights,
                loads()["one"],
                scale,
            )
        assert {count > 0 for count in spared} == {beside}
        spared.clear()


def test_gathering_sends_less_where_the_group_is_no_larger_than_the_choices():
    ways = {}
    for size in (2, 4, 8):
        with use(plan({"expert": size, "data": -1})) as bound:
            ways[size] = island(bound, arrays()[1]).way
    assert ways == {2: "gather", 4: "passes", 8: "passes"}


@pytest.mark.catches("biases-added-narrow")
def test_gradients_of_biases_add_up_as_wide_as_those_of_matrices():
    """A bfloat16 sum of ones ends at 256."""
    sizes = jnp.array([4000, 96])

    def total(into):
        arrays = {"bias": jnp.zeros((2, 3), jnp.bfloat16)}
        local = LocalExperts(arrays=arrays, gradients={"bias": into}, sizes=sizes, share=1)
        return jnp.sum(local.of_rows("bias", 4096), dtype=jnp.float32)

    found = jax.grad(total)(jnp.zeros((2, 3)))
    np.testing.assert_array_equal(found, np.broadcast_to(sizes[:, None], (2, 3)))
