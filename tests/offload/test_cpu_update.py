"""An update shared by CPU and device: the bits of one loop, two at once, no thread left behind."""

import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from colossax.errors import InputError
from colossax.offload import cpu_rows, split_update

LAYERS = 7


@jax.jit
def adam(row, grad, scalars):
    """Another state, of two leaves, and a transcendental function, so that bits may differ."""
    m = 0.9 * row["m"] + 0.1 * grad
    v = 0.99 * row["v"] + 0.01 * jnp.square(grad)
    w = row["w"] - scalars["rate"] * m / (jnp.sqrt(v) + 1e-8) * jnp.exp(-0.1 * scalars["step"])
    return {"m": m, "v": v, "w": w}


def draw(seed):
    return np.random.default_rng(seed).normal(size=(16, 33)).astype(np.float32)


def layers(place):
    """Rows and gradients, each leaf as `place(layer)` says."""
    rows = [
        {name: draw([i, k]) ** (2 if name == "v" else 1) for k, name in enumerate("wmv")}
        for i in range(LAYERS)
    ]
    grads = [draw([i, 9]) for i in range(LAYERS)]
    return (
        [jax.device_put(row, place(i)) for i, row in enumerate(rows)],
        [jax.device_put(grad, place(i)) for i, grad in enumerate(grads)],
    )


SCALARS = {"rate": jnp.float32(0.01), "step": jnp.int32(3)}


def memory(device, kind):
    return SingleDeviceSharding(device, memory_kind=kind)


def buffer(x):
    return x.addressable_shards[0].data.unsafe_buffer_pointer()


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_the_bits_are_those_of_one_device(share, kind, devices):
    """Three steps; the rows stay where they were, in whichever memory."""
    home = memory(devices[0], kind)
    rows, grads = layers(lambda _: home)
    wanted, gradients = layers(lambda _: memory(devices[0], "device"))
    for _ in range(3):
        rows = split_update(adam, rows, grads, SCALARS, share=share, cpu=devices[1])
        wanted = [adam(row, grad, SCALARS) for row, grad in zip(wanted, gradients, strict=True)]
    jax.tree.map(np.testing.assert_array_equal, rows, wanted)
    assert all(x.sharding == home for x in jax.tree.leaves(rows))


def test_rows_are_split_over_devices_and_kept_where_the_cpu_is(devices):
    """A row kept on the CPU is not copied and stays there, those sharded over a mesh likewise."""
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.sharding.NamedSharding(mesh, jax.P("fsdp"), memory_kind="pinned_host")
    chosen = cpu_rows(LAYERS, 0.4)
    cpu = memory(devices[7], "device")
    rows, grads = layers(lambda i: cpu if i in chosen else sharded)
    seen = []

    def update(row, grad, scalars):
        seen.append(row["w"])
        return adam(row, grad, scalars)

    found = split_update(update, rows, grads, SCALARS, share=0.4, cpu=devices[7])
    wanted = [adam(row, g, SCALARS) for row, g in zip(*layers(lambda _: cpu), strict=True)]
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    for i, row in enumerate(found):
        assert row["w"].sharding == (cpu if i in chosen else sharded)
        assert (buffer(rows[i]["w"]) in map(buffer, seen)) == (i in chosen)


def test_both_compute_at_once(devices):
    """Neither side gets past its first update before the other has begun one; each on its own."""
    meeting = threading.Barrier(2)
    by, places = {}, {}

    def update(row, grad, scalars):
        me = threading.current_thread()
        if me not in by.values():
            meeting.wait(timeout=60)
        layer = int(row["layer"])
        by[layer], places[layer] = me, {row["layer"].device, grad["layer"].device}
        return row

    rows = [{"layer": jax.device_put(i, devices[0])} for i in range(6)]
    split_update(update, rows, rows, SCALARS, share=0.5, cpu=devices[1])
    here = {layer for layer, thread in by.items() if thread is threading.current_thread()}
    assert set(by) - here == set(cpu_rows(6, 0.5))
    assert len(here) == 3
    for layer in range(6):
        assert places[layer] == {devices[0 if layer in here else 1]}


def test_no_share_starts_no_thread(devices, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a thread was started")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    rows, grads = layers(lambda _: memory(devices[0], "device"))
    split_update(adam, rows, grads, SCALARS, share=0.0, cpu=devices[1])
    split_update(adam, rows, grads, SCALARS, share=0.05, cpu=devices[1])
    with pytest.raises(AssertionError, match="a thread was started"):
        split_update(adam, rows, grads, SCALARS, share=0.5, cpu=devices[1])


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_what_an_update_raises_reaches_the_caller(where, devices):
    """And no thread outlives it; when the device fails, the CPU does not go through the rest."""
    caller, done, failed = threading.current_thread(), [], threading.Event()

    def update(row, grad, scalars):
        mine = "device" if threading.current_thread() is caller else "cpu"
        if mine == where:
            failed.set()
            raise ArithmeticError(f"on the {mine}")
        assert failed.wait(timeout=60)
        done.append(mine)
        # A moment for the other side to say that it failed.
        threading.Event().wait(0.05)
        return row

    rows = [jax.device_put(np.float32(i), devices[0]) for i in range(40)]
    before = threading.active_count()
    with pytest.raises(ArithmeticError, match=f"on the {where}"):
        split_update(update, rows, rows, SCALARS, share=0.5, cpu=devices[1])
    assert threading.active_count() == before
    if where == "device":
        assert len(done) < 20


def test_few_rows_are_on_the_device_at_a_time(devices, monkeypatch):
    """Before the third is fetched, the first has been waited for."""
    events = []
    real = jax.block_until_ready

    def waited(x):
        events.append(("wait", int(real(x))))
        return x

    def update(row, grad, scalars):
        events.append(("update", int(row)))
        return row

    monkeypatch.setattr(jax, "block_until_ready", waited)
    rows = [jax.device_put(i, devices[0]) for i in range(4)]
    split_update(update, rows, rows, SCALARS, share=0.0, cpu=devices[1])
    assert events == [
        *[("update", 0), ("update", 1)],
        *[("wait", 0), ("update", 2)],
        *[("wait", 1), ("update", 3)],
    ]


@pytest.mark.parametrize(
    ("count", "share", "expected"),
    [
        (4, 0.0, ()),
        (4, 1.0, (0, 1, 2, 3)),
        (4, 0.5, (1, 3)),
        (10, 0.2, (4, 9)),
        (3, 0.1, ()),
        (0, 0.5, ()),
    ],
)
def test_rows_of_the_cpu_are_spread(count, share, expected):
    assert cpu_rows(count, share) == expected


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(InputError, match=r"share: found .*; give a share of the layers, from 0"):
        cpu_rows(4, share)


def test_rows_that_cannot_be_updated_are_refused(devices):
    rows, grads = layers(lambda _: memory(devices[0], "device"))
    with pytest.raises(InputError, match="grads: found 6 for 7 rows; give one to each row"):
        split_update(adam, rows, grads[1:], SCALARS, share=0.0, cpu=devices[1])
    remote = types.SimpleNamespace(is_fully_addressable=False)
    with pytest.raises(InputError, match=r"rows\[1\]: spans several processes, whose CPUs cannot"):
        split_update(adam, [rows[0], remote], grads[:2], SCALARS, share=0.5, cpu=devices[1])
