"""Checkpoints written and read tensor by tensor."""

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from colossax.checkpoint import Checkpointer, RecordReader, RecordWriter, layout
from colossax.errors import CheckpointError
from tests.checkpoint.support import (
    MODEL,
    assert_restored,
    content,
    finish_children,
    layouts,
    mesh_of,
    put,
    start_child,
    value_of,
    wants,
)

PARAMS = MODEL[:4]


def write_all(directory, slots=PARAMS, documents=None):
    with RecordWriter(directory) as writer:
        for slot in slots:
            writer.declare(slot.name, slot.shape, slot.dtype, layered=slot.layered)
        for slot in reversed(slots):
            whole = content(slot.name, slot.shape, slot.dtype)
            for layer in reversed(range(slot.shape[0])) if slot.layered else [None]:
                writer.write(slot.name, whole if layer is None else whole[layer], layer)
        writer.finish(documents or {})


@pytest.mark.parametrize("cut", [False, True])
def test_an_import_is_restored_like_any_checkpoint(devices, tmp_path, monkeypatch, cut):
    if cut:
        monkeypatch.setattr(layout, "FILE_BYTES", 1000)
        monkeypatch.setattr(layout, "BLOCK_BYTES", 300)
    write_all(tmp_path, documents={"model": {"layers": 8}})
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.steps() == [0]
    assert checkpointer.documents() == {"model": {"layers": 8}}
    mesh, specs = layouts()["fsdp8"]
    asked = wants(PARAMS, mesh, specs[:4])
    assert_restored(checkpointer.restore(None, asked), asked)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_training_goes_on_in_an_imported_directory(devices, tmp_path):
    write_all(tmp_path)
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, put(MODEL, *layouts()["fsdp8"]), {})
    assert checkpointer.steps() == [1, 2]


def test_reader(devices, tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        for step in (4, 5):
            checkpointer.save(step, put(MODEL, *layouts()["fsdp8"]), {"step": step})
    reader = RecordReader(tmp_path)
    assert (reader.step, reader.documents()) == (5, {"step": 5})
    assert reader.records() == {slot.name: (slot.shape, slot.dtype) for slot in MODEL}
    for slot in MODEL:
        whole = reader.read(slot.name)
        assert whole.dtype == slot.dtype and whole.tobytes() == value_of(slot).tobytes()
        assert reader.layered(slot.name) == slot.layered
    q = MODEL[1]
    assert (reader.read(q.name, 3) == value_of(q)[3]).all()
    region = (slice(2, 5), slice(None), slice(7, 9))
    assert (reader.read_region(q.name, region) == value_of(q)[region]).all()
    assert RecordReader(tmp_path, step=4).documents() == {"step": 4}
    assert RecordReader(tmp_path / "4").step == 4


def test_reader_refuses(devices, tmp_path):
    write_all(tmp_path)
    reader = RecordReader(tmp_path)
    with pytest.raises(CheckpointError, match="step 0 has no record 'model/params/nope'"):
        reader.read("model/params/nope")
    for name, layer in ((PARAMS[0].name, 0), (PARAMS[1].name, 8)):
        with pytest.raises(ValueError, match=rf"has no layer {layer}"):
            reader.read(name, layer)


def test_one_layer_is_readable_without_the_others(devices, tmp_path):
    write_all(tmp_path)
    folder = tmp_path / "0/arrays/model/params/layers.attn.q.w/c"
    for layer in range(8):
        if layer != 3:
            for path in (folder / str(layer)).rglob("*"):
                path.unlink() if path.is_file() else None
    reader = RecordReader(tmp_path)
    assert (reader.read(PARAMS[1].name, 3) == value_of(PARAMS[1])[3]).all()
    with pytest.raises(CheckpointError, match="is damaged"):
        reader.read(PARAMS[1].name, 4)


def test_a_directory_that_holds_a_checkpoint_is_refused(devices, tmp_path):
    write_all(tmp_path)
    with pytest.raises(CheckpointError, match="already holds step 0; choose another directory"):
        RecordWriter(tmp_path)


def test_an_unfinished_import_leaves_nothing(devices, tmp_path):
    with pytest.raises(KeyboardInterrupt), RecordWriter(tmp_path) as writer:
        writer.declare("model/params/w", (4,), np.dtype("float32"))
        writer.write("model/params/w", np.ones(4, np.float32))
        assert list(tmp_path.iterdir())
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written(devices, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        CheckpointError, match=r"directory '.*file/run' \(.*Not a directory.*\); make"
    ):
        RecordWriter(tmp_path / "file/run")


def test_a_full_disk(devices, tmp_path, file_size_limit):
    array = np.ones((50, 100), np.float32)
    refusal = r"directory '.*' cannot be written \(File too large\); make room or choose another"
    with RecordWriter(tmp_path) as writer:
        writer.declare("model/params/w", array.shape, array.dtype)
        file_size_limit(5000)
        with pytest.raises(CheckpointError, match=refusal):
            writer.write("model/params/w", array)
        file_size_limit()
        writer.write("model/params/w", array)
        file_size_limit(10)
        with pytest.raises(CheckpointError, match=r"could not be saved .* \(File too large\)"):
            writer.finish({})
    file_size_limit()
    assert not list(tmp_path.iterdir())


def test_writer_refuses(devices, tmp_path):
    f32 = np.dtype("float32")
    with RecordWriter(tmp_path) as writer:
        writer.declare("model/params/w", (3, 4), f32, layered=True)
        with pytest.raises(ValueError, match="is declared twice"):
            writer.declare("model/params/w", (3, 4), f32)
        with pytest.raises(ValueError, match=r"declared float32\[3, 4\], given float32\[5\] to"):
            writer.write("model/params/w", np.ones(5, f32), 0)
        with pytest.raises(ValueError, match=r"given float64\[4\] to write"):
            writer.write("model/params/w", np.ones(4), 0)
        writer.write("model/params/w", np.ones(4, f32), 0)
        with pytest.raises(ValueError, match="has no layer 0 left to write"):
            writer.write("model/params/w", np.ones(4, f32), 0)
        with pytest.raises(
            CheckpointError, match=r"layers \[1, 2\] of record 'model/params/w' not"
        ):
            writer.finish({})
    assert not list(tmp_path.iterdir())


def test_memory_of_an_import_does_not_grow_with_depth(tmp_path):
    (grown,) = map(int, finish_children(start_child("import_layers", tmp_path, 40, 1024, 1024)))
    reader = RecordReader(tmp_path)
    name = "model/params/layers/mlp/w"
    assert reader.records()[name][0] == (40, 1024, 1024)
    assert (reader.read(name, 39) == 39).all()
    assert grown < 24 << 20, f"writing 160 MB grew the process by {grown >> 20} MB"


def test_importing_then_sharding_over_layers(devices, tmp_path):
    write_all(tmp_path)
    asked = wants(PARAMS[1:2], mesh_of(x=8), [P("x")])
    assert_restored(Checkpointer(tmp_path).restore(0, asked, exact=False), asked)
