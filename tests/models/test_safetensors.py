"""Our reader and writer against the `safetensors` library."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from colossax.errors import WeightsError
from colossax.models.safetensors import INDEX, SINGLE, OutTensor, Reader, write_folder


def numbers(shape, dtype, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


TENSORS = {
    "half": numbers((3, 5), np.float16),
    "brain": numbers((7,), ml_dtypes.bfloat16),
    "single": numbers((4, 2, 3), np.float32),
    "scalar": numbers((), np.float32),
}


def out(name, value, pieces=2):
    def blocks():
        return [value] if value.ndim == 0 else np.array_split(value, pieces)

    return OutTensor(name=name, shape=value.shape, dtype=value.dtype, blocks=blocks)


def same(found, wanted):
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.catches("rows-of-a-tensor")
def test_reads_what_the_library_wrote(tmp_path):
    save_file(TENSORS, tmp_path / SINGLE)
    reader = Reader(tmp_path)
    assert reader.tensors.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        same(reader.read(name), value)
    same(reader.read("single", 1, 2), TENSORS["single"][1:3])
    same(reader.read("brain", 6, 1), TENSORS["brain"][6:])


def test_library_reads_what_is_written(tmp_path):
    write_folder(tmp_path, [out(*item) for item in TENSORS.items()], max_shard_bytes=10**6)
    found = load_file(tmp_path / SINGLE)
    assert found.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        same(found[name], value)
    assert [file.name for file in tmp_path.iterdir()] == [SINGLE]


def test_wide_types_lie_aligned(tmp_path):
    write_folder(tmp_path, [out(*item) for item in TENSORS.items()], max_shard_bytes=10**6)
    for stored in Reader(tmp_path).tensors.values():
        assert stored.start % {"F32": 4, "F16": 2, "BF16": 2}[stored.dtype] == 0


@pytest.mark.catches("shard-size")
def test_shards_hold_at_most_what_is_asked(tmp_path):
    values = {f"t{i}": numbers((i + 1, 8), np.float32, i) for i in range(6)}
    write_folder(tmp_path, [out(*item) for item in values.items()], max_shard_bytes=200)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in values.values())
    files = sorted(set(index["weight_map"].values()))
    assert files == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    assert len(files) == 4
    for file in files:
        held = load_file(tmp_path / file)
        assert {n for n, f in index["weight_map"].items() if f == file} == held.keys()
        assert sum(v.nbytes for v in held.values()) <= 200
    reader = Reader(tmp_path)
    for name, value in values.items():
        same(reader.read(name), value)


def test_cut_short_anywhere(tmp_path):
    save_file(TENSORS, tmp_path / SINGLE)
    whole = (tmp_path / SINGLE).read_bytes()
    for size in range(0, len(whole), 7):
        (tmp_path / SINGLE).write_bytes(whole[:size])
        with pytest.raises(WeightsError, match=r"model\.safetensors: is damaged or cut short"):
            Reader(tmp_path)


def header_file(path, header, size=0):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"a": 3},
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}},
        {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 8]}},
        {
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 8]},
        },
    ],
)
def test_senseless_headers(tmp_path, header):
    header_file(tmp_path / SINGLE, header, 8)
    with pytest.raises(WeightsError, match="header is not that of a safetensors file"):
        Reader(tmp_path)


@pytest.mark.catches("safetensors-cut-short")
def test_longer_than_its_header_promises(tmp_path):
    save_file(TENSORS, tmp_path / SINGLE)
    with (tmp_path / SINGLE).open("ab") as file:
        file.write(b"more")
    with pytest.raises(WeightsError, match=r"it has \d+ bytes where its header promises \d+"):
        Reader(tmp_path)


def test_folder_without_weights(tmp_path):
    with pytest.raises(WeightsError, match="holds neither model.safetensors nor"):
        Reader(tmp_path)


def test_missing_shard(tmp_path):
    values = {f"t{i}": numbers((4, 8), np.float32, i) for i in range(3)}
    write_folder(tmp_path, [out(*item) for item in values.items()], max_shard_bytes=200)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        WeightsError, match="model-00002-of-00003.safetensors: is missing, but model"
    ):
        Reader(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}'])
def test_senseless_index(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(WeightsError, match=r"index\.json: (is no index|cannot be read)"):
        Reader(tmp_path)
