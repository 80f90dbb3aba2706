"""Checkpoints that are missing, unfinished or damaged are refused by name."""

import json

import pytest
from jax.sharding import PartitionSpec as P

from colossax.checkpoint import Checkpointer, RecordReader, layout
from colossax.errors import CheckpointError, CheckpointWarning
from tests.checkpoint.support import MODEL, as_version_1, assert_restored, mesh_of, put, wants

RECORD = "model/params/layers/attn/q/w"


@pytest.fixture
def checkpoint(devices, tmp_path, monkeypatch):
    """Steps 1 and 2 of a small model, in files of one and of several blocks."""
    monkeypatch.setattr(layout, "FILE_BYTES", 4096)
    monkeypatch.setattr(layout, "MERGE_BYTES", 4096)
    monkeypatch.setattr(layout, "BLOCK_BYTES", 1024)
    with Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2):
            specs = [P("x"), P(None, None, "x"), P()]
            checkpointer.save(step, put(MODEL[:3], mesh_of(x=2), specs), {"plan": {"a": [1, 2]}})
    return tmp_path / "run"


def restore(directory, step=2):
    asked = wants(MODEL[:3], mesh_of(x=4, y=2), [P("y"), P(None, "x", "y"), P()])
    arrays = Checkpointer(directory).restore(step, asked)
    assert_restored(arrays, asked)


def files_of(directory, record):
    folder = directory / "2/arrays" / record
    return sorted(path for path in (folder / "c").rglob("*") if path.is_file())


def remove(path):
    path.unlink()


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def empty(path):
    path.write_bytes(b"")


def flip(at):
    def flip_bit(path):
        content = bytearray(path.read_bytes())
        content[int(at * (len(content) - 1))] ^= 0x10
        path.write_bytes(bytes(content))

    return flip_bit


DAMAGES = [remove, truncate, empty, flip(0.0), flip(0.5), flip(1.0)]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "record", ["model/params/layers.attn.q.w", "model/params/layers.norm.scale"]
)
def test_damaged_files(checkpoint, record, damage):
    restore(checkpoint)
    file = files_of(checkpoint, record)[5]
    damage(file)
    with pytest.raises(CheckpointError) as caught:
        restore(checkpoint)
    message = str(caught.value)
    assert f"step 2 is damaged: record '{record.replace('.', '/')}' cannot be read" in message
    assert str(file) in message
    assert message.endswith("restore step 1 instead")
    restore(checkpoint, step=1)
    with pytest.raises(CheckpointError, match="is damaged: record"):
        RecordReader(checkpoint).read(record.replace(".", "/"))


@pytest.mark.parametrize("damage", [remove, truncate, empty])
def test_damaged_metadata_of_a_record(checkpoint, damage):
    damage(checkpoint / "2/arrays/model/params/layers.attn.q.w/zarr.json")
    with pytest.raises(CheckpointError, match=f"is damaged: record '{RECORD}' cannot be read"):
        restore(checkpoint)


@pytest.mark.catches("record-shape")
def test_a_record_of_another_shape_than_the_manifest_says(checkpoint):
    folder = checkpoint / "2/arrays/model/params"
    other = (folder / "layers.norm.scale/zarr.json").read_bytes()
    (folder / "layers.attn.q.w/zarr.json").write_bytes(other)
    as_version_1(checkpoint, 2)  # which knows no checksum of it
    with (
        pytest.warns(CheckpointWarning, match="step 2 was written before"),
        pytest.raises(CheckpointError, match=r"it is bfloat16\[8, 32\], not float32\[8, 32, 64\]"),
    ):
        restore(checkpoint)


@pytest.mark.catches("manifest-checksum")
@pytest.mark.parametrize("damage", [truncate, empty, flip(0.5), flip(0.9)])
def test_damaged_manifest(checkpoint, damage):
    damage(checkpoint / "2/arrays/manifest.json")
    with pytest.raises(
        CheckpointError, match=r"step 2 is damaged: '.*manifest.json' cannot be read"
    ):
        restore(checkpoint)


def test_a_manifest_of_a_later_version(checkpoint):
    path = checkpoint / "2/arrays/manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 99}))
    with pytest.raises(CheckpointError, match="it has version 99, this library reads 1 and 2"):
        restore(checkpoint)


@pytest.mark.parametrize("damage", [remove, empty, flip(0.5)])
def test_damaged_document(checkpoint, damage):
    damage(checkpoint / "2/plan/metadata")
    with pytest.raises(CheckpointError, match="is damaged: document 'plan' cannot be read"):
        Checkpointer(checkpoint).documents(2)
    assert Checkpointer(checkpoint).documents(1) == {"plan": {"a": [1, 2]}}
    restore(checkpoint)


@pytest.mark.catches("checkpoint-document-checksum")
def test_a_document_that_is_still_json_is_damaged_all_the_same(checkpoint):
    path = checkpoint / "2/plan/metadata"
    path.write_bytes(path.read_bytes().replace(b"2", b"3"))
    with pytest.raises(CheckpointError, match="document 'plan' cannot be read .its checksum does"):
        Checkpointer(checkpoint).documents(2)


def test_missing_directory(devices, tmp_path):
    with pytest.raises(CheckpointError, match=r"directory '.*none' does not exist; give the dir"):
        restore(tmp_path / "none")


def test_a_file_where_the_directory_should_be(devices, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file; give the directory"):
        RecordReader(tmp_path / "file")


def test_directory_without_checkpoint(devices, tmp_path):
    with pytest.raises(CheckpointError, match="holds no finished checkpoint; give the directory"):
        restore(tmp_path, step=None)


@pytest.mark.catches("half-written-step")
def test_half_written_steps_are_no_steps(checkpoint):
    (checkpoint / "1").rename(checkpoint / "1.orbax-checkpoint-tmp")
    (checkpoint / "3.orbax-checkpoint-tmp").mkdir()
    (checkpoint / "4").mkdir()  # without a manifest
    (checkpoint / "notes").mkdir()
    assert Checkpointer(checkpoint).steps() == [2]
    (checkpoint / "2/arrays/manifest.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"\(only unfinished: 1.orbax-checkpoint-tmp, 3.orbax"
    ):
        restore(checkpoint, step=None)


def test_a_step_that_is_not_there(checkpoint):
    with pytest.raises(CheckpointError, match="holds no step 5; choose one of 1, 2"):
        restore(checkpoint, step=5)


def test_the_next_save_clears_what_a_killed_one_left(checkpoint):
    left = checkpoint / "9.orbax-checkpoint-tmp/arrays.orbax-checkpoint-tmp"
    left.mkdir(parents=True)
    (left / "chunk").write_bytes(b"x" * 100)
    (checkpoint / ".writable-3").write_text("x")
    assert left.exists() and Checkpointer(checkpoint).latest() == 2
    with Checkpointer(checkpoint) as checkpointer:
        checkpointer.save(3, put(MODEL[:1], mesh_of(x=1), [P()]), {})
    assert sorted(path.name for path in checkpoint.iterdir()) == ["1", "2", "3"]
