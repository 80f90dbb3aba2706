"""A file is read only where it was written: exchanged, foreign and forged ones are refused."""

import itertools
import json
import warnings
import zlib

import numpy as np
import pytest

from colossax.checkpoint import Checkpointer, RecordReader, layout, seals
from colossax.checkpoint.manifest import Manifest
from colossax.checkpoint.slots import record_folder
from colossax.errors import CheckpointError, CheckpointWarning, DamagedCheckpointError
from tests.checkpoint.support import as_version_1, plain, rewrite_manifest, stack, value_of

Q, NORM, TABLE, COUNT = (f"model/params/{name}" for name in ("layers/q", "norm", "table", "count"))
SLOTS = [
    stack(Q, (3, 8, 32), 0, 3),
    plain(NORM, (32,), "bfloat16"),
    plain(TABLE, (20, 32)),
    plain(COUNT, (), "int32"),
    plain("model/optimizer/mu/table", (20, 32)),
]


@pytest.fixture(autouse=True)
def nobody_deletes(monkeypatch):
    """Nothing is waited for: what is damaged here is not about to be deleted."""
    monkeypatch.setattr("colossax.checkpoint.folder._DELETING_S", 0.0)


@pytest.fixture
def checkpoint(devices, tmp_path, monkeypatch):
    """Steps 1 and 2 of a small model, in files of one block and of several; all differ."""
    monkeypatch.setattr(layout, "FILE_BYTES", 1024)
    monkeypatch.setattr(layout, "MERGE_BYTES", 1024)
    monkeypatch.setattr(layout, "BLOCK_BYTES", 512)
    with Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2):
            arrays = [(slot, jax_array(value_of(slot), step)) for slot in SLOTS]
            checkpointer.save(step, arrays, {"plan": {"a": step}, "position": {"batch": step}})
    return tmp_path / "run"


def jax_array(values, step):
    import jax

    return jax.numpy.asarray(values + np.asarray(step, values.dtype))


def read_all(directory):
    """Every value and document of both steps."""
    for step in (1, 2):
        reader = RecordReader(directory, step)
        assert reader.documents()["plan"] == {"a": step}
        for slot in SLOTS:
            expected = value_of(slot) + np.asarray(step, slot.dtype)
            assert reader.read(slot.name).tobytes() == expected.tobytes()


def refusal(directory):
    """Why not all of both steps can be read; None where it can."""
    try:
        read_all(directory)
    except DamagedCheckpointError as error:
        assert "\n" not in str(error) and "is damaged: " in str(error)
        return str(error)
    return None


def exchange(one, other):
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def chunks(checkpoint):
    return sorted(p for p in checkpoint.rglob("*") if p.is_file() and "c" in p.parts[-4:])


@pytest.mark.catches("seal-not-compared")
def test_every_file_exchanged_with_every_other_is_refused(checkpoint):
    read_all(checkpoint)
    files = chunks(checkpoint)
    assert len(files) == 2 * (3 + 1 + 4 + 1 + 4)
    assert any(len(file.read_bytes()) > 1024 + 4 for file in files), "none of several blocks"
    for one, other in itertools.combinations(files, 2):
        exchange(one, other)
        assert (found := refusal(checkpoint)) and (str(one) in found or str(other) in found)
        exchange(one, other)
    read_all(checkpoint)


@pytest.mark.catches("metadata-not-compared")
def test_every_json_exchanged_with_every_other_is_refused_or_the_same(checkpoint):
    files = sorted(p for p in checkpoint.rglob("*") if p.is_file())
    files = [file for file in files if file not in chunks(checkpoint)]
    ours = {"manifest.json", "metadata", "zarr.json", "_METADATA"}
    for one, other in itertools.combinations(files, 2):
        if one.read_bytes() == other.read_bytes() or not ours & {one.name, other.name}:
            continue
        exchange(one, other)
        assert refusal(checkpoint) is not None, (one, other)
        exchange(one, other)
    read_all(checkpoint)


def test_every_changed_byte_of_what_is_checked_is_refused(checkpoint):
    small = [p for p in checkpoint.rglob("*") if p.name in ("zarr.json", "_METADATA", "metadata")]
    for file in [*small, *(checkpoint / str(step) / "arrays/manifest.json" for step in (1, 2))]:
        content = file.read_bytes()
        for at in range(0, len(content), 41):
            file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            assert refusal(checkpoint) is not None, (file, at)
        file.write_bytes(content)


@pytest.mark.catches("seal-of-one-block")
def test_blocks_exchanged_within_a_file_are_refused(checkpoint):
    file = checkpoint / "2/arrays/model/params/layers.q/c/1/0/0"
    content = file.read_bytes()
    half = (len(content) - 2 * 16 - 4) // 2
    file.write_bytes(content[half : 2 * half] + content[:half] + content[2 * half :])
    assert "is not the file that was written there" in (refusal(checkpoint) or "")
    other = file.parents[2] / "2/0/0"
    foreign = other.read_bytes()[half : 2 * half]
    file.write_bytes(content[:half] + foreign + content[2 * half :])
    assert "is not the file that was written there" in (refusal(checkpoint) or "")


@pytest.mark.catches("manifest-of-any-step")
def test_a_step_under_another_number_is_refused(checkpoint):
    (checkpoint / "2").rename(checkpoint / "3")
    with pytest.raises(DamagedCheckpointError, match="is damaged: .* .it is that of step 2"):
        RecordReader(checkpoint)


@pytest.mark.catches("seal-without-place")
@pytest.mark.catches("seal-without-header")
def test_a_seal_is_of_its_place(checkpoint):
    folder = checkpoint / "1/arrays/model/params/table"
    other = folder / "c/1/0"
    other.write_bytes((folder / "c/0/0").read_bytes())
    manifest = Manifest.from_json((checkpoint / "1/arrays/manifest.json").read_bytes())
    dtype, shape = np.dtype("float32"), manifest.records[TABLE].layout
    assert shape is not None
    headers = [
        seals.header_of(1, TABLE, dtype, shape),
        seals.header_of(2, TABLE, dtype, shape),
        seals.header_of(1, NORM, dtype, shape),
        seals.header_of(1, TABLE, np.dtype("int32"), shape),
    ]
    found = {seals.seal(header, folder, (0, 0), shape, dtype) for header in headers}
    assert len(found) == 4 and b"little" in headers[0]
    assert seals.seal(headers[0], folder, (1, 0), shape, dtype) not in found


@pytest.mark.catches("version-1-unsaid")
def test_version_1_reads_with_one_line_of_warning(checkpoint):
    for step in (1, 2):
        as_version_1(checkpoint, step)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        read_all(checkpoint)
        read_all(checkpoint)
    assert [warning.category for warning in said] == [CheckpointWarning] * 2
    text = str(said[0].message)
    assert text.startswith(f"checkpoint '{checkpoint}' step 1 was written before files were bound")
    assert "\n" not in text


def altered(text, old, new):
    assert old in text
    return text.replace(old, new, 1)


FORGED_METADATA = {
    "the other byte order": (NORM, '"little"', '"big"'),
    "the other byte order of blocks": (TABLE, '"little"', '"big"'),
    "no checksums": (TABLE, ',{"name":"crc32c"}', ""),
    "a chunk of 2^40": (TABLE, '"chunk_shape":[', f'"chunk_shape":[{2**40},'),
    "huge chunks": (TABLE, '"chunk_shape":[5,32]', f'"chunk_shape":[{2**40},{2**40}]'),
    "a chunk of nothing": (TABLE, '"chunk_shape":[5,32]', '"chunk_shape":[0,32]'),
    "huge blocks": (Q, '"chunk_shape":[1,8,16]', f'"chunk_shape":[1,8,{2**40}]'),
    "another transposition": (TABLE, '"codecs":[', '"codecs":[{"name":"transpose"},'),
    "other keys": (TABLE, '"name":"default"', '"name":"v2"'),
    "other integers": (COUNT, '"int32"', '"uint32"'),
    "python's objects": (TABLE, '"float32"', '"object"'),
    "deep": (TABLE, '{"chunk_grid"', "[" * 200_000),
}


@pytest.mark.catches("zarr-metadata-believed")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("case", FORGED_METADATA)
@pytest.mark.filterwarnings("ignore::colossax.errors.CheckpointWarning")
def test_forged_metadata_of_a_record_is_refused_before_it_is_used(checkpoint, case, version):
    record, old, new = FORGED_METADATA[case]
    relative = record_folder(record)
    path = checkpoint / "2/arrays" / relative / "zarr.json"
    path.write_text(altered(path.read_text(), old, new))

    def fitting(body):
        body["metadata"][f"{relative}/zarr.json"] = zlib.crc32(path.read_bytes())

    as_version_1(checkpoint, 2) if version == 1 else rewrite_manifest(checkpoint, 2, fitting)
    found = refusal(checkpoint)
    assert found and f"record '{record}' cannot be read (" in found and len(found) < 700


FORGED_MANIFESTS = {
    "dtype object": lambda body: body["records"][TABLE].update(dtype="object"),
    "dtype of dates": lambda body: body["records"][TABLE].update(dtype="timedelta64[ns]"),
    "dtype null": lambda body: body["records"][TABLE].update(dtype=None),
    "shape of 2^40 each": lambda body: body["records"][TABLE].update(shape=[2**40, 2**40]),
    "shape below 0": lambda body: body["records"][TABLE].update(shape=[-1, 32]),
    "shape of texts": lambda body: body["records"][TABLE].update(shape=["20", 32]),
    "shape of truths": lambda body: body["records"][TABLE].update(shape=[True, 32]),
    "files of 2^40": lambda body: body["records"][TABLE].update(file=[2**40, 32]),
    "no seals": lambda body: body["records"][TABLE].update(seals=[]),
    "seals of texts": lambda body: body["records"][TABLE].update(seals=["1", "2", "3"]),
    "big-endian": lambda body: body["records"][TABLE].update(byte_order="big"),
    "another format": lambda body: body["records"][TABLE].update(format="pickle"),
    "no record": lambda body: body["records"].update({TABLE: None}),
    "a record outside": lambda body: body["records"].update({"../../x": body["records"][TABLE]}),
    "a document outside": lambda body: body["documents"].update({"../1/plan": 3}),
    "documents that are none": lambda body: body.update(documents=[]),
    "no step": lambda body: body.pop("step") and None,
    "a list": lambda body: [body],
    "10,000 digits": lambda body: json.dumps(body).replace('"step": 2', '"step": ' + "9" * 10_000),
    "deep": lambda body: '{"records":' + "[" * 200_000,
    "half a character": lambda body: json.dumps(body).replace("norm", "\\ud800"),
}


@pytest.mark.catches("manifest-believed")
@pytest.mark.parametrize("case", FORGED_MANIFESTS)
def test_forged_manifests_are_refused(checkpoint, case):
    rewrite_manifest(checkpoint, 2, FORGED_MANIFESTS[case])
    with pytest.raises(CheckpointError, match="manifest.json' cannot be read") as refused:
        RecordReader(checkpoint)
    assert len(str(refused.value)) < 500 and "\n" not in str(refused.value)


def test_a_version_that_is_no_number(checkpoint):
    path = checkpoint / "2/arrays/manifest.json"
    for version in (None, "1", 99, [1], True):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"version": version}))
        with pytest.raises(CheckpointError, match="manifest.json' cannot be read"):
            RecordReader(checkpoint)
