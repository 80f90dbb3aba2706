"""Each expert of a record is readable alone, and records move between any groups of devices."""

import functools
import json
import zlib

import jax
import numpy as np
import pytest
import tensorstore
from jax.sharding import PartitionSpec as P

from colossax.checkpoint import ArraySlot, Checkpointer, RecordReader, RecordWriter, slot_of
from colossax.checkpoint.folder import ARRAYS_ITEM, MANIFEST
from colossax.checkpoint.layout import choose_layout
from colossax.checkpoint.manifest import Manifest
from colossax.config import ExpertsConfig, Plan, Segment
from colossax.nn import Decoder
from colossax.optim import adamw
from colossax.planner import build_step
from colossax.tasks import next_token_loss
from tests.cases import quick_first
from tests.checkpoint.support import content, mesh_of, put, value_of
from tests.step.test_experts import config

F32 = np.dtype("float32")
UP = ArraySlot(
    name="model/params/layers/experts/up",
    shape=(3, 8, 64, 32),
    dtype=F32,
    first=0,
    layers=3,
    experts=1,
)


def read_bytes(read):
    """What a call returns, and bytes that it reads of records' values."""
    metric = "/tensorstore/kvstore/file/bytes_read"

    def total():
        found = tensorstore.experimental_collect_matching_metrics(metric)
        return sum(each["value"] for metric in found for each in metric["values"])

    before = total()
    return read(), total() - before


@pytest.mark.catches("experts-share-a-block")
@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_an_expert_is_read_alone(group, devices, tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, put([UP], mesh_of(expert=group), [P(None, "expert")]), {})
    reader, whole = RecordReader(tmp_path), content(UP.name, UP.shape, F32)
    assert reader.experts(UP.name) == 8
    each = whole[0, 0].nbytes
    for layer, expert in [(0, 0), (1, 5), (2, 7)]:
        found, count = read_bytes(functools.partial(reader.read, UP.name, layer, expert))
        np.testing.assert_array_equal(found, whole[layer, expert])
        assert each <= count < 1.2 * each
    np.testing.assert_array_equal(reader.read(UP.name, expert=3), whole[:, 3])
    files = [path for path in tmp_path.rglob("c/*/*/*/*") if path.is_file()]
    assert len(files) == 3  # small experts of one process share a layer's file


def test_an_import_has_experts_apart_too(tmp_path):
    whole = content(UP.name, UP.shape, F32)
    with RecordWriter(tmp_path) as writer:
        writer.declare(UP.name, UP.shape, F32, layered=True, experts=UP.experts)
        for layer in range(3):
            writer.write(UP.name, whole[layer], layer)
        writer.finish({})
    read = functools.partial(RecordReader(tmp_path).read, UP.name, 1, 2)
    found, count = read_bytes(read)
    np.testing.assert_array_equal(found, whole[1, 2])
    assert count < 1.2 * found.nbytes


def test_blocks_of_large_experts_are_cut_further_and_files_hold_few_of_them():
    shape = (2, 16, 2048, 768)
    whole = {tuple((0, size) for size in shape): frozenset((0,))}
    made = choose_layout(shape, F32, True, [whole], experts=1)
    assert made.file == (1, 4, 2048, 768) and made.block[1] == 1
    assert 4 * np.prod(made.block) <= 2 << 20


@pytest.mark.catches("expert-of-another-dim")
def test_an_expert_that_is_not_there_is_refused(devices, tmp_path):
    dense = ArraySlot(name="model/params/head", shape=(8, 4), dtype=F32)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, put([UP, dense], mesh_of(expert=1), [P(), P()]), {})
    reader = RecordReader(tmp_path)
    with pytest.raises(ValueError, match=r"'model/params/layers/experts/up' \[3, 8, .* expert 8"):
        reader.read(UP.name, 0, 8)
    with pytest.raises(ValueError, match=r"record 'model/params/head' \[8, 4\] has no expert 0"):
        reader.read(dense.name, expert=0)
    assert reader.experts(dense.name) is None


def test_what_was_written_before_is_restored_and_does_not_name_experts(devices, tmp_path):
    old = ArraySlot(name=UP.name, shape=UP.shape, dtype=F32, first=0, layers=3)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, put([old], mesh_of(expert=1), [P()]), {})
    ((_, array),) = put([UP], mesh_of(expert=4), [P(None, "expert")])
    (restored,) = Checkpointer(tmp_path).restore(1, [(UP, array.sharding)])
    np.testing.assert_array_equal(np.asarray(restored), np.asarray(array))
    reader = RecordReader(tmp_path)
    assert reader.experts(UP.name) is None
    with pytest.raises(ValueError, match="has no expert 0"):
        reader.read(UP.name, 0, 0)


@pytest.mark.catches("expert-dim-believed")
def test_a_manifest_that_says_a_wrong_dim_is_damaged(devices, tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, put([UP], mesh_of(expert=1), [P()]), {})
    manifest = json.loads((tmp_path / "1" / ARRAYS_ITEM / MANIFEST).read_bytes())
    body = json.loads(manifest["body"])
    for wrong in (2, 4, -1):
        body["records"][UP.name]["experts"] = wrong
        with pytest.raises(ValueError, match=f"an expert at a time in dim {wrong}"):
            Manifest.from_json(_with_body(manifest, body))


def _with_body(manifest, body):
    text = json.dumps(body)
    return json.dumps({**manifest, "crc32": zlib.crc32(text.encode()), "body": text}).encode()


GROUPS = {
    "1": Plan(mesh={"data": 1}),
    "2": Plan(mesh={"expert": 2, "fsdp": 4}),
    "4": Plan(mesh={"expert": 4, "fsdp": 2}),
    "8": Plan(mesh={"expert": 8}),
    "folded expert, tensor": Plan(mesh={"expert": 2, "tensor": 4}),
    "folded ring, tensor": Plan(mesh={"ring": 2, "tensor": 2, "fsdp": 2}),
    "experts over tensor too": Plan(
        mesh={"expert": 2, "tensor": 4}, experts=ExpertsConfig(group="expert")
    ),
    "segments": Plan(mesh={"expert": 4}, segments=(Segment(count=1), Segment())),
}


@functools.cache
def step_of(group):
    plan = GROUPS[group]
    size = int(np.prod(list(plan.mesh.values())))
    made = config("sparse")
    return build_step(
        lambda rngs: Decoder(made, rngs=rngs),
        adamw(3e-3),
        next_token_loss(),
        plan,
        devices=jax.devices()[:size],
    )


def filled(step):
    """A state of numbers that are nowhere twice, laid out by the step's plan."""
    records = {}

    def one(leaf, sharding, slot):
        records[slot.name] = content(slot.name, slot.shape, slot.dtype)
        return jax.device_put(value_of(slot), sharding)

    slots = param_slots(step)
    params = jax.tree.map(one, step.abstract["params"], step.shardings["params"], slots)
    return params, records


def param_slots(step):
    return jax.tree.map(lambda info: slot_of(info, "model/params"), step.spec.infos)


MOVES = [(one, other) for one in GROUPS for other in GROUPS if one != other]
QUICK = [("4", "folded expert, tensor"), ("folded ring, tensor", "2")]


@pytest.mark.catches("experts-share-a-block")
@pytest.mark.parametrize(("source", "target"), quick_first(MOVES, QUICK))
def test_a_checkpoint_moves_between_groups(source, target, devices, tmp_path):
    one, other = step_of(source), step_of(target)
    params, records = filled(one)
    pairs = list(zip(jax.tree.leaves(param_slots(one)), jax.tree.leaves(params), strict=True))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, pairs, {})
    slots, shardings = param_slots(other), jax.tree.leaves(other.shardings["params"])
    wants = list(zip(jax.tree.leaves(slots), shardings, strict=True))
    restored = Checkpointer(tmp_path).restore(1, wants)
    for array, (slot, sharding) in zip(restored, wants, strict=True):
        assert array.sharding == sharding
        np.testing.assert_array_equal(np.asarray(array), value_of(slot))
    reader = RecordReader(tmp_path)
    alone = [name for name in records if reader.experts(name)]
    assert sorted(name.split("/")[-1] for name in alone) == ["down", "gate", "up"]
    for name in alone:
        found, count = read_bytes(functools.partial(reader.read, name, 2, 5))
        np.testing.assert_array_equal(found, records[name][2, 5])
        assert count < 1.2 * found.nbytes
