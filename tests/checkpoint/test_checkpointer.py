"""What was saved on one mesh comes back bit for bit on another."""

import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from colossax.checkpoint import Checkpointer, layout, reading, store, writing
from colossax.checkpoint.slots import box_shape
from colossax.errors import CheckpointError
from tests.checkpoint.support import (
    MODEL,
    assert_restored,
    content,
    layouts,
    mesh_of,
    plain,
    put,
    stack,
    wants,
)

NAMES = ["fsdp8", "fsdp4_tensor2", "one"]


@pytest.fixture
def small_files(monkeypatch):
    """Cuts that real sizes would have, at the tests' sizes."""
    monkeypatch.setattr(layout, "MERGE_BYTES", 1024)
    monkeypatch.setattr(layout, "FILE_BYTES", 2048)
    monkeypatch.setattr(layout, "BLOCK_BYTES", 512)


def saved(directory, arrays, documents=None, step=7):
    with Checkpointer(directory) as checkpointer:
        assert checkpointer.save(step, arrays, documents or {})
    return Checkpointer(directory)


@pytest.mark.parametrize("cuts", ["default", "small_files"])
@pytest.mark.parametrize("source, target", list(itertools.permutations(NAMES, 2)))
def test_any_mesh_to_any_mesh(devices, tmp_path, request, source, target, cuts):
    if cuts != "default":
        request.getfixturevalue(cuts)
    there, here = layouts()[source], layouts()[target]
    checkpointer = saved(tmp_path, put(MODEL, *there))
    asked = wants(MODEL, *here)
    assert_restored(checkpointer.restore(7, asked), asked)


WHOLE = [stack("model/params/layers/w", (8, 16, 8), 0, 8)]
THREE_FIVE = [stack("model/params/layers/w", (8, 16, 8), *at) for at in ((0, 3), (3, 5))]
ONE_SEVEN = [stack("model/params/layers/w", (8, 16, 8), *at) for at in ((0, None), (1, 7))]
SEVEN_ONE = [stack("model/params/layers/w", (8, 16, 8), *at) for at in ((0, 7), (7, None))]
CUTS = {"8": WHOLE, "3+5": THREE_FIVE, "1+7": ONE_SEVEN, "7+1": SEVEN_ONE}


def specs_of(slots):
    # The segments of a stack may be sharded differently.
    return [
        (P("x") if slot.layers is None else P(None, "x") if i else P(None, None, "x"))
        for i, slot in enumerate(slots)
    ]


@pytest.mark.catches("layer-of-segment")
@pytest.mark.parametrize("source, target", list(itertools.permutations(CUTS, 2)))
def test_segments_do_not_show_on_disk(devices, tmp_path, small_files, source, target):
    mesh = mesh_of(x=8)
    checkpointer = saved(tmp_path, put(CUTS[source], mesh, specs_of(CUTS[source])))
    asked = wants(CUTS[target], mesh, specs_of(CUTS[target]))
    assert_restored(checkpointer.restore(7, asked), asked)


def test_a_device_reads_no_more_than_its_own_region(devices, tmp_path, monkeypatch):
    slots = MODEL[:2]
    checkpointer = saved(tmp_path, put(slots, mesh_of(x=1), [P(), P()]))
    regions, placed = [], []
    start_read, device_put = store.start_read, jax.device_put

    def count_read(handle, box):
        regions.append(box_shape(box))
        return start_read(handle, box)

    def count_put(host, target):
        placed.append(host.shape)
        return device_put(host, target)

    monkeypatch.setattr(store, "start_read", count_read)
    monkeypatch.setattr(jax, "device_put", count_put)
    asked = wants(slots, mesh_of(x=8), [P("x"), P(None, "x")])
    arrays = checkpointer.restore(7, asked)
    assert regions == placed == [(12, 32)] * 8 + [(8, 4, 64)] * 8
    monkeypatch.undo()
    assert_restored(arrays, asked)


def test_a_replica_is_read_once(devices, tmp_path, monkeypatch):
    checkpointer = saved(tmp_path, put(MODEL[:1], mesh_of(x=8), [P("x")]))
    regions, start_read = [], store.start_read
    monkeypatch.setattr(store, "start_read", lambda *a: regions.append(a) or start_read(*a))
    asked = wants(MODEL[:1], mesh_of(x=4, y=2), [P("y")])
    assert_restored(checkpointer.restore(7, asked), asked)
    assert len(regions) == 2


def test_reading_is_bounded(devices, tmp_path, monkeypatch):
    checkpointer = saved(tmp_path, put(MODEL[1:2], mesh_of(x=1), [P()]))
    monkeypatch.setattr(reading, "READ_BYTES", 3 * 8 * 4 * 64 * 4)
    most, under_way, add, finish = [0], [0], store.InFlight.add, store.InFlight._finish_oldest

    def counting_add(self, size_bytes, start, done):
        def counting_start():
            under_way[0] += size_bytes
            most[0] = max(most[0], under_way[0])
            return start()

        add(self, size_bytes, counting_start, done)

    def counting_finish(self):
        under_way[0] -= self._waiting[0][0]
        finish(self)

    monkeypatch.setattr(store.InFlight, "add", counting_add)
    monkeypatch.setattr(store.InFlight, "_finish_oldest", counting_finish)
    asked = wants(MODEL[1:2], mesh_of(x=8), [P(None, "x")])
    assert_restored(checkpointer.restore(7, asked), asked)
    assert most[0] == reading.READ_BYTES


def test_saving_copies_shards_and_runs_nothing_on_the_device(devices, tmp_path, monkeypatch):
    copied, compiled, host_copy = [], [], writing.host_copy
    monkeypatch.setattr(writing, "host_copy", lambda s: copied.append(s.shape) or host_copy(s))
    arrays = put(MODEL[:2], mesh_of(x=8), [P("x"), P(None, "x")])
    live = len(jax.live_arrays())

    def listen(event, seconds, **_):
        compiled.append(event) if "compile" in event else None

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        saved(tmp_path, arrays)
        assert not compiled
        jax.jit(lambda x: x + 1)(jnp.ones(3))
        assert compiled, "the listener hears nothing"
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert sorted(copied) == sorted([(12, 32)] * 8 + [(8, 4, 64)] * 8)
    del arrays
    assert len(jax.live_arrays()) <= live


def test_arrays_may_be_donated_once_save_returns(devices, tmp_path, monkeypatch):
    go, start_write = threading.Event(), store.start_write

    def held(*args):
        assert go.wait(30)
        return start_write(*args)

    monkeypatch.setattr(store, "start_write", held)
    mesh, specs = layouts()["fsdp8"]
    arrays = put(MODEL, mesh, specs)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.save(1, arrays, {})
        assert checkpointer.latest() is None, "saving did not happen in the background"
        for _, array in arrays:
            jax.block_until_ready(jax.jit(lambda x: x * 0, donate_argnums=0)(array))
            assert array.is_deleted()
        go.set()
    asked = wants(MODEL, mesh, specs)
    assert_restored(checkpointer.restore(1, asked), asked)


def test_without_asynchrony_a_save_is_finished_when_it_returns(devices, tmp_path):
    checkpointer = Checkpointer(tmp_path, asynchronous=False)
    mesh, specs = layouts()["fsdp4_tensor2"]
    assert checkpointer.save(3, put(MODEL, mesh, specs), {"position": 3})
    assert checkpointer.steps() == [3]
    asked = wants(MODEL, mesh, specs)
    assert_restored(checkpointer.restore(None, asked), asked)
    checkpointer.close()


@pytest.mark.parametrize("keep, left", [(1, [5]), (3, [3, 4, 5]), (None, [1, 2, 3, 4, 5])])
def test_keeps_the_latest(devices, tmp_path, keep, left):
    arrays = put(MODEL[:1], mesh_of(x=8), [P("x")])
    with Checkpointer(tmp_path, keep=keep) as checkpointer:
        for step in range(1, 5):
            checkpointer.save(step, arrays, {})
    with Checkpointer(tmp_path, keep=keep) as checkpointer:  # a resumed run keeps counting
        checkpointer.save(5, arrays, {})
    assert checkpointer.steps() == left


def test_a_step_that_is_there_is_left_as_it_is(devices, tmp_path):
    arrays = put(MODEL[:1], mesh_of(x=8), [P("x")])
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.save(1, arrays, {"run": "first"})
        checkpointer.wait()
        assert not checkpointer.save(1, arrays, {"run": "second"})
    assert checkpointer.documents() == {"run": "first"}


def test_documents(devices, tmp_path):
    documents = {
        "plan": {"mesh": {"fsdp": 8}},
        "position": 12345678901234567890,
        "tokenizer": "ab\n\u2603" * 1000,
        "nothing": None,
    }
    checkpointer = saved(tmp_path, put(MODEL[:1], mesh_of(x=1), [P()]), documents)
    assert checkpointer.documents(7) == checkpointer.documents() == documents


@pytest.mark.parametrize("name", ["arrays", "metrics", "a/b", ""])
def test_document_names_that_are_taken(devices, tmp_path, name):
    with pytest.raises(ValueError, match=f"no document may be named '{name}'"):
        Checkpointer(tmp_path).save(1, [], {name: 1})
    assert not list(tmp_path.iterdir())


def test_leaving_with_an_error_still_finishes_the_save(devices, tmp_path):
    with pytest.raises(KeyboardInterrupt), Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, put(MODEL[:1], mesh_of(x=8), [P("x")]), {})
        raise KeyboardInterrupt
    assert checkpointer.steps() == [1]


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int32", "uint32", "int8", "bool"]
)
@pytest.mark.parametrize("shape", [(), (5,), (0, 3)])
def test_dtypes_and_scalars(devices, tmp_path, dtype, shape):
    slots = [plain("model/params/w", shape, dtype)]
    if dtype == "bool":
        arrays = [(slots[0], jnp.ones(shape, bool))]
        back = saved(tmp_path, arrays).restore(7, [(slots[0], arrays[0][1].sharding)])
        assert back[0].dtype == bool and back[0].shape == shape and np.asarray(back[0]).all()
        return
    asked = wants(slots, mesh_of(x=8), [P()])
    checkpointer = saved(tmp_path, put(slots, mesh_of(x=1), [P()]))
    assert_restored(checkpointer.restore(7, asked), asked)


def test_zeros_are_not_taken_for_missing(devices, tmp_path):
    slot = stack("model/optimizer/mu/layers/w", (4, 8), 0, 4)
    checkpointer = saved(tmp_path, [(slot, jnp.zeros((4, 8)))])
    (back,) = checkpointer.restore(7, wants([slot], mesh_of(x=2), [P("x")]))
    assert not np.asarray(back).any()


def test_nans_and_signed_zeros_keep_their_bits(devices, tmp_path):
    bits = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 1, 0xFF800000], np.uint32)
    slot = plain("model/params/w", bits.shape)
    checkpointer = saved(tmp_path, [(slot, jnp.asarray(bits.view(np.float32)))])
    (back,) = checkpointer.restore(7, wants([slot], mesh_of(x=2), [P("x")]))
    assert np.asarray(back).view(np.uint32).tolist() == bits.tolist()


@pytest.mark.catches("dtype-converted-unasked")
def test_another_dtype_only_when_asked(devices, tmp_path):
    checkpointer = saved(tmp_path, put(MODEL[:1], mesh_of(x=8), [P("x")]))
    half = [plain(MODEL[0].name, MODEL[0].shape, "bfloat16")]
    asked = wants(half, mesh_of(x=8), [P("x")])
    with pytest.raises(
        CheckpointError, match=r"holds 'model/params/embed/table' as float32, not bf"
    ):
        checkpointer.restore(7, asked)
    (back,) = checkpointer.restore(7, asked, convert=True)
    want = content(MODEL[0].name, MODEL[0].shape, "float32").astype(jnp.bfloat16)
    assert np.asarray(back).tobytes() == want.tobytes()


def test_parameters_alone(devices, tmp_path):
    mesh, specs = layouts()["fsdp8"]
    checkpointer = saved(tmp_path, put(MODEL, mesh, specs))
    for folder in ("optimizer", "rng"):
        for path in sorted((tmp_path / "7/arrays/model" / folder).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    asked = wants(MODEL[:4], mesh, specs[:4])
    assert_restored(checkpointer.restore(7, asked), asked)


def test_restored_arrays_keep_their_memory_kind(devices, tmp_path):
    checkpointer = saved(tmp_path, put(MODEL[:1], mesh_of(x=8), [P("x")]))
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    for kind in kinds:
        sharding = NamedSharding(mesh_of(x=8), P("x"), memory_kind=kind)
        (back,) = checkpointer.restore(7, [(MODEL[0], sharding)])
        assert back.sharding.memory_kind == kind
        assert {s.data.sharding.memory_kind for s in back.addressable_shards} == {kind}


def test_of_another_model(devices, tmp_path):
    mesh, specs = layouts()["one"]
    checkpointer = saved(tmp_path, put(MODEL, mesh, specs))

    def refusal(slots, **options):
        with pytest.raises(CheckpointError) as caught:
            checkpointer.restore(7, wants(slots, mesh, [P()] * len(slots)), **options)
        return str(caught.value)

    name = "model/params/layers/attn/q/w"
    wider = [MODEL[0], stack(name, (8, 32, 128), 0, 8), *MODEL[2:]]
    assert f"'{name}' is float32[8, 32, 64] there and float32[8, 32, 128] here" in refusal(wider)
    deeper = [MODEL[0], stack(name, (9, 32, 64), 0, 9), *MODEL[2:]]
    assert "float32[8, 32, 64] there and float32[9, 32, 64] here" in refusal(deeper)
    more = [*MODEL[:2], stack("model/params/layers/attn/q/b", (8, 64), 0, 8), *MODEL[2:]]
    assert "is of another model: it has no 'model/params/layers/attn/q/b'" in refusal(more)
    fewer = [MODEL[0], *MODEL[2:]]
    assert f"it has '{name}', which this model has not" in refusal(fewer)
    assert checkpointer.restore(7, wants(fewer, mesh, [P()] * 6), exact=False)
    unstacked = [MODEL[0], plain(name, (8, 32, 64)), *MODEL[2:]]
    assert "(one of them a layer stack)" in refusal(unstacked)


def test_an_array_that_is_not_what_its_slot_says(devices, tmp_path):
    with pytest.raises(
        ValueError, match=r"m/p/w: the array is float32\[2\], its slot float32\[3\]"
    ):
        Checkpointer(tmp_path).save(1, [(plain("m/p/w", (3,)), jnp.ones(2))], {})


def test_reading_touches_nothing(devices, tmp_path):
    checkpointer = Checkpointer(tmp_path / "none")
    assert (checkpointer.steps(), checkpointer.latest()) == ([], None)
    checkpointer.wait()
    checkpointer.close()
    assert not (tmp_path / "none").exists()
