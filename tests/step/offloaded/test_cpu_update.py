"""Layers that the CPU updates: the ordinary step's bits, both at once, refusals, `auto`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from colossax.config import OffloadConfig, Segment, from_json, to_json
from colossax.errors import OffloadError, PlanError
from colossax.offload import Rates, UpdateRate, cpu_share, resolved_segments, save_rates
from colossax.optim import adamw, sgd
from colossax.planner.deciding.cpu_share import bytes_per_direction
from colossax.run.checkpointing import RunCheckpoints
from colossax.step.offloaded.cpu_update import HostRows
from tests.cases import quick_first
from tests.step.offloaded.exact import CPU, compared
from tests.step.offloaded.streamed import FULL, HOST, by_path, host, offloaded, started, stepped
from tests.step.offloaded.test_streaming import assert_as_ordinary, cut, run

HALVES = (Segment(count=2), Segment())

RATES = Rates(
    device_kind="cpu",
    platform="gpu",  # on a CPU the share is 0
    jax=jax.__version__,
    to_device_bytes_per_s=5e10,
    to_host_bytes_per_s=5e10,
    both_ways_bytes_per_s=4e10,
    matmul_flops_per_s=7e14,
    updates=(
        UpdateRate(
            name="adamw",
            bytes_per_direction=12.0,
            cpu_parameters_per_s=2e9,
            device_parameters_per_s=1e11,
        ),
    ),
)


@pytest.fixture(scope="module")
def exact(request, tmp_path_factory):
    return compared(request, tmp_path_factory, "cpu")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COLOSSAX_CACHE", str(tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", quick_first(CPU, [CPU[0], CPU[-1]]), ids=lambda case: case.name)
def test_not_a_bit_changes(case, exact):
    found = exact[case.name]
    assert len(set(found["losses"])) == len(found["losses"])
    assert found["still"] == []
    assert set(found["start"].values()) == {0}
    assert found["losses"] == found["wanted"]
    assert set(found["off"].values()) == {0}


def test_steps_that_are_not_finite_change_nothing():
    assert_as_ordinary(run(host(cut(1), cpu_update=0.5)), 1)


def arrays(state):
    return jax.tree.map(np.asarray, state)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    """And what it saves does not show that the CPU had a share."""
    plan = host(cpu_update=0.5)
    state, step = started(plan, adamw(1e-2))
    state, _ = stepped(state, step, steps=2)
    kept = RunCheckpoints(tmp_path, step, keep=1, documents={}, report=pytest.fail)
    kept.save(state, 2)
    kept.finish()
    wanted = by_path(step, {kind: state[kind] for kind in ("params", "opt_state")})
    through, _ = stepped(state, step, steps=2)

    _, again = started(plan, adamw(1e-2))
    own = RunCheckpoints(tmp_path, again, keep=1, documents={}, report=pytest.fail)
    resumed, _ = stepped(own.restore(2), again, steps=2)
    jax.tree.map(np.testing.assert_array_equal, arrays(resumed), arrays(through))

    _, other = started(host(), adamw(1e-2))
    others = RunCheckpoints(tmp_path, other, keep=1, documents={}, report=pytest.fail)
    restored = others.restore(2)
    found = by_path(other, {kind: restored[kind] for kind in ("params", "opt_state")})
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_devices_are_started_first_and_not_waited_for(monkeypatch):
    """Nor is anything of theirs read before the CPU is done with all of its layers."""
    state, step = started(host(cpu_update=0.5), adamw(1e-2))
    events, theirs = [], set()
    on_devices, on_cpu = step.cpu._on_devices, step.cpu._update_layer
    wait, real_array = jax.block_until_ready, HostRows.array

    def device(*args):
        events.append("devices")
        found = on_devices(*args)
        theirs.update(id(leaf) for leaf in jax.tree.leaves(found))
        return found

    def cpu(key, i, *args):
        events.append(f"cpu {i}")
        return on_cpu(key, i, *args)

    def waited(x):
        if theirs.intersection(map(id, jax.tree.leaves(x))):
            events.append("wait for devices")
        return wait(x)

    def array(rows):
        events.append("put together")
        return real_array(rows)

    monkeypatch.setattr(step.cpu, "_on_devices", device)
    monkeypatch.setattr(step.cpu, "_update_layer", cpu)
    monkeypatch.setattr(jax, "block_until_ready", waited)
    monkeypatch.setattr(HostRows, "array", array)
    stepped(state, step, steps=1)
    assert theirs
    assert list(dict.fromkeys(events)) == ["devices", "cpu 0", "cpu 1", "put together"]


def test_each_side_updates_its_own_layers():
    """Without the devices' program theirs stay as they were, and without the CPU's update its."""
    state, step = started(host(cpu_update=0.25), sgd(0.1))
    before = by_path(step, arrays(state["params"]))
    step.cpu._on_devices = lambda stacks, *_: {
        key: dataclasses.replace(each, grads=None) for key, each in stacks.items()
    }
    after = by_path(step, arrays(stepped(state, step, steps=1)[0]["params"]))
    for name in (name for name in before if "layers" in name):
        moved = np.any((before[name] != after[name]).reshape(4, -1), axis=1)
        assert moved.tolist() == [True, False, False, False], name


def test_layers_are_updated_into_the_same_two_rooms():
    """One is written while the other's layer goes back to its stack."""
    state, step = started(host(cpu_update=1.0), adamw(1e-2))
    state, _ = stepped(state, step, steps=1)
    (rooms,) = step.cpu._room.values()
    assert len(rooms) == 2
    places = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(rooms)]
    stepped(state, step, steps=1)
    assert sorted(x.unsafe_buffer_pointer() for x in jax.tree.leaves(rooms)) == sorted(places)


@pytest.mark.parametrize("failure", [RuntimeError("out of memory"), MemoryError("out of memory")])
def test_a_failure_of_the_cpu_reaches_the_caller(failure):
    state, step = started(host(cpu_update=0.5), sgd(0.1))

    def fail(*_):
        raise failure

    step.cpu._updates = dict.fromkeys(step.cpu._updates, fail)
    with pytest.raises(OffloadError, match=r"the CPU's update failed \(out of memory\).*resume"):
        stepped(state, step, steps=1)


@pytest.mark.parametrize("spec", [(None, "fsdp"), (None, None, "fsdp"), (None,)])
def test_rows_are_read_and_written_on_every_device(spec, devices):
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    values = np.arange(3 * 4 * 8, dtype=np.float32).reshape(3, 4, 8)
    where = NamedSharding(mesh, jax.P(*spec), memory_kind="pinned_host")
    stack = jax.block_until_ready(jax.device_put(values, where))
    rows = HostRows(stack, stacked=True)
    np.testing.assert_array_equal(rows.read(1), values[1])
    rows.write(2, values[0])
    assert rows.array() is stack
    for shard in stack.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data)[2], values[0][shard.index[1:]])
        np.testing.assert_array_equal(np.asarray(shard.data)[:2], values[:2][:, *shard.index[1:]])


def test_a_row_that_one_device_holds_is_not_copied():
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    for dtype in (jnp.float32, jnp.bfloat16):
        stack = jax.block_until_ready(jax.device_put(jnp.ones((4, 32, 16), dtype), where))
        row = HostRows(stack, stacked=True).read(2)
        assert row.dtype == dtype
        assert row.ctypes.data == stack.unsafe_buffer_pointer() + 2 * row.nbytes
        on_cpu = jax.device_put(row, jax.devices("cpu")[0])
        assert on_cpu.unsafe_buffer_pointer() == row.ctypes.data


# Which layers


def cpu_layers(layers=4, segments=FULL.segments, **settings):
    """Whether the CPU updates each layer."""
    plan = FULL.replace(segments=segments, offload=OffloadConfig(**settings))
    found = resolved_segments(plan, layers)
    return [run for segment in found for run in [segment.placement.updated_by_cpu] * segment.count]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({**HOST}, [0, 0, 0, 0]),
        ({**HOST, "cpu_update": "auto"}, [0, 0, 0, 0]),
        ({**HOST, "cpu_update": 0.0}, [0, 0, 0, 0]),
        ({**HOST, "cpu_update": 0.1}, [0, 0, 0, 0]),
        ({**HOST, "cpu_update": 0.5}, [1, 1, 0, 0]),
        ({**HOST, "cpu_update": 1}, [1, 1, 1, 1]),
        ({"parameters": 0.5, "optimizer": 1.0, "cpu_update": 1.0}, [1, 1, 0, 0]),
        ({**HOST, "disk": 0.25, "cpu_update": 1.0}, [0, 1, 1, 1]),
        ({**HOST, "disk": 0.5, "cpu_update": 0.5}, [0, 0, 1, 0]),
        ({**HOST, "cpu_update": 0.75, "segments": HALVES}, [1, 1, 1, 0]),
    ],
)
def test_the_cpu_gets_whole_layers_of_those_in_host_memory(settings, expected):
    assert cpu_layers(**settings) == [bool(x) for x in expected]


def test_off_and_nothing_are_the_step_without_it():
    for settings in ({}, {"cpu_update": 0.0}, {"cpu_update": 0.1}):
        _, step = started(host(**settings), sgd(0.1))
        assert step.cpu is None
        assert step.note is None
        assert step.streaming.later == {}


def test_the_setting_survives_json():
    for share in ("off", "auto", 0.25):
        offload = OffloadConfig(**HOST, cpu_update=share)
        assert from_json(OffloadConfig, to_json(offload), where="offload") == offload


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), True, "half"])
def test_what_is_no_share_is_refused(share):
    with pytest.raises(PlanError, match=r"cpu_update: found .*; give off, auto, or the share"):
        OffloadConfig(**HOST, cpu_update=share)


@pytest.mark.parametrize("clipping", ["two_pass", "layer", "speculate"])
@pytest.mark.parametrize("share", [0.5, "auto"])
def test_clipping_that_keeps_no_gradients_is_refused(clipping, share):
    with pytest.raises(PlanError, match=f"clipping '{clipping}': .*; give clipping stack, or"):
        OffloadConfig(**HOST, cpu_update=share, clipping=clipping)


def test_clipping_layer_by_layer_is_refused_however_the_cpu_was_named():
    named = Segment(remat="full", offload="parameters+optimizer+cpu")
    plan = FULL.replace(segments=(named,), offload=OffloadConfig(clipping="layer"))
    with pytest.raises(PlanError, match="clipping 'layer': .*; give clipping stack"):
        started(plan, sgd(0.1), clip_norm=1.0)


def test_the_cpu_updates_nothing_outside_of_its_memory():
    for kinds in ("cpu", "optimizer+cpu", "parameters+cpu", "parameters+optimizer+disk+cpu"):
        with pytest.raises(PlanError, match=r"; write parameters\+optimizer\+cpu"):
            Segment(offload=kinds)
    for plan in (FULL, offloaded(optimizer=1.0), offloaded(fused=True)):
        shared = dataclasses.replace(plan.offload, cpu_update=0.5)
        with pytest.raises(PlanError, match="found 0.5, and no layer has parameters and optimizer"):
            started(plan.replace(offload=shared), sgd(0.1))


def test_it_is_no_pure_function():
    state, step = started(host(cpu_update=0.5), sgd(0.1))
    with pytest.raises(PlanError, match=r"no pure function; call the step itself"):
        jax.eval_shape(step.pure, state, {})


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(PlanError, match="several processes hold parts of each layer.*; give off"):
        started(host(cpu_update=0.5), sgd(0.1))
    _, step = started(host(cpu_update="auto"), sgd(0.1))
    assert step.note == (
        "plan.offload.cpu_update auto: off, several processes hold parts of each layer"
    )


# Decided by rates


def test_auto_without_rates_is_off_and_says_so(cache):
    _, step = started(host(cpu_update="auto"), adamw(1e-2))
    assert step.cpu is None
    assert step.note == (
        "plan.offload.cpu_update auto: off, nothing was measured for 'cpu'; colossax bench offload"
        " does it"
    )


def test_auto_is_the_closed_form_of_the_rates(cache):
    save_rates(RATES)
    _, step = started(host(cpu_update="auto"), adamw(1e-2))
    share = cpu_share(RATES, 12.0)
    assert 0.25 < share < 0.75
    assert step.bound.plan.offload.cpu_update == share
    assert sum(part.count for part in step.streaming.on_cpu.values()) == round(4 * share)
    assert step.note == (
        f"plan.offload.cpu_update auto: the CPU updates {share:.0%} of the layers in host memory,"
        " as rates say"
    )


def test_auto_is_off_where_it_does_not_pay(cache):
    save_rates(dataclasses.replace(RATES, platform="cpu"))
    _, step = started(host(cpu_update="auto"), adamw(1e-2))
    assert step.cpu is None
    assert step.note.endswith("auto: off, by the rates that were measured it does not pay")


@pytest.mark.parametrize(
    ("optimizer", "dtype", "expected"),
    [
        (adamw(1e-2), "float32", 12),
        (adamw(1e-2, moment_dtype="bfloat16"), "float32", 10),
        (sgd(1e-2), "float32", 4),
        (sgd(1e-2, momentum=0.9), "bfloat16", 6),
    ],
)
def test_bytes_that_an_update_moves(optimizer, dtype, expected):
    assert bytes_per_direction(optimizer, dtype) == expected
