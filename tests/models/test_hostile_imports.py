"""Folders that somebody else wrote, badly or on purpose: one sentence each, and nothing written."""

import json
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from colossax.models.safetensors import INDEX, SINGLE
from tests.cli.test_own_recipes import colossax

GOLDEN = Path(__file__).parent.parent / "golden"
DEEP = "[" * 200_000 + "]" * 200_000


@pytest.fixture
def folder(tmp_path):
    """A small Llama as Hugging Face has it."""
    target = tmp_path / "hf"
    shutil.copytree(GOLDEN / "llama", target)
    (target / "expected.safetensors").unlink()
    return target


def refused(folder, out=None):
    """What `colossax import` says; it ends with 2, after one line and with nothing written."""
    out = folder.parent / "out" if out is None else out
    code, told, said = colossax("import", str(folder), str(out))
    assert (code, told, said.count("\n")) == (2, "", 1), (code, told, said[-2000:])
    assert said.startswith("colossax: ") and len(said) < 1000
    assert not out.exists()
    return said


def with_settings(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def with_header(folder, edit):
    """The weights with another header, `edit`ed; its length as it is."""
    file = folder / SINGLE
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = edit(json.loads(content[8 : 8 + length]))
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


SETTINGS = {
    "a list for a type": ({"model_type": ["llama"]}, r"model_type ['\[]"),
    "a type of 5,000 letters": ({"model_type": "x" * 5000}, "is not among the families"),
    "layers": ({"num_hidden_layers": 10**9}, "'num_hidden_layers': found 1000000000"),
    "more layers than tensors": ({"num_hidden_layers": 9000}, "9000 layers, and the weights are"),
    "eps nan": ({"rms_norm_eps": float("nan")}, "'rms_norm_eps': found nan"),
    "eps negative": ({"rms_norm_eps": -1e-5}, "'rms_norm_eps': found -1e-05; give 0 or more"),
    "theta": ({"rope_parameters": {"rope_theta": 0}}, "'rope_theta': found 0.0"),
    "no positions": ({"max_position_embeddings": 0}, "'max_position_embeddings': found 0"),
    "eos beyond": ({"eos_token_id": 10**6}, "eos: found 1000000, which is none of"),
    "eos a list of text": ({"eos_token_id": ["a"]}, "'eos_token_id' is 'a'; it must be int"),
    "yarn beside default": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "rope_parameters name the scaling 'default' and rope_scaling 'yarn'",
    ),
    "a text for rope": ({"rope_parameters": "default"}, "'rope_parameters' is 'default'"),
    "a list for a kind of rope": (
        {"rope_parameters": {"rope_type": ["x"]}},
        r"rope scaling '\['x'\]' is not supported",
    ),
    "a number for rope": ({"rope_parameters": None, "rope_scaling": 3}, "'rope_scaling' is 3"),
    "heads null": ({"num_attention_heads": None}, "'num_attention_heads' is None"),
    "heads 0": ({"num_attention_heads": 0, "num_key_value_heads": 0}, "heads': found 0"),
}


@pytest.mark.catches("layers-from-sizes")
@pytest.mark.catches("rope-disagrees")
@pytest.mark.parametrize("case", SETTINGS)
def test_settings(folder, case):
    changes, said = SETTINGS[case]
    with_settings(folder, **changes)
    import re

    assert re.search(said, refused(folder))


TEXTS = {
    "nested 200,000 deep": f'{{"model_type": {DEEP}}}',
    "10,000 digits": f'{{"model_type": "llama", "vocab_size": {"9" * 10_000}}}',
    "not UTF-8": b'{"model_type": "\xff"}',
    "a list": "[]",
}


@pytest.mark.parametrize("file", ["config.json", INDEX, "tokenizer.json"])
@pytest.mark.parametrize("case", TEXTS)
def test_documents(folder, case, file):
    if file == INDEX:
        (folder / SINGLE).unlink()
    text = TEXTS[case]
    (folder / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert file in refused(folder)


@pytest.mark.catches("import-not-finite")
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite(folder, value):
    tensors = load_file(folder / SINGLE)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][-1, -1] = value
    save_file(tensors, folder / SINGLE)
    assert f"{name}: 1 of {tensors[name].size} numbers" in refused(folder)


@pytest.mark.catches("index-outside")
@pytest.mark.parametrize("name", ["../outside.safetensors", "/outside.safetensors", "..", "", "."])
def test_an_index_that_leads_outside(folder, name):
    (folder / SINGLE).rename(folder.parent / "outside.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    assert f"names '{name}', which is no file of its own folder" in refused(folder)


@pytest.mark.parametrize("names", [{"a": 3}, {"a": None}, {"a": ["b"]}, ["a"], {"a": 1, "b": "c"}])
def test_an_index_of_no_names(folder, names):
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    assert "is no index of weights" in refused(folder)


def each(change):
    return lambda header: {
        name: entry if name == "__metadata__" else {**entry, **change(entry)}
        for name, entry in header.items()
    }


HEADERS = {
    "offsets of floats": each(lambda e: {"data_offsets": [float(x) for x in e["data_offsets"]]}),
    "shapes of floats": each(lambda e: {"shape": [float(x) for x in e["shape"]]}),
    "negative shapes": each(lambda e: {"shape": [-x for x in e["shape"]]}),
    "a list for a type": each(lambda e: {"dtype": [e["dtype"]]}),
    "offsets of text": each(lambda e: {"data_offsets": "ab"}),
    "entries that are lists": lambda header: dict.fromkeys(header, []),
    "nested 200,000 deep": lambda header: DEEP,
    "10,000 digits": lambda header: f'{{"a": {"9" * 10_000}}}',
}


@pytest.mark.catches("header-floats")
@pytest.mark.parametrize("case", HEADERS)
def test_headers(folder, case):
    with_header(folder, HEADERS[case])
    assert "is damaged" in refused(folder)


TOKENIZERS = {
    "a token that is a number": {"added_tokens": [{"id": 0, "content": 5}]},
    "a token that is a list": {"added_tokens": [{"id": 0, "content": ["a"]}]},
    "tokens that are none": {"added_tokens": [3]},
    "no list of tokens": {"added_tokens": {"a": 3}},
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_tokenizers(folder, case):
    with_settings(folder, eos_token_id=0)
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZERS[case]))
    assert "tokenizer" in refused(folder)


def test_names_that_are_not_utf_8(folder):
    """They are names like any other, and are told with their bytes."""
    strange = folder.parent / os.fsdecode(b"hf-\xff")
    folder.rename(strange)
    (strange / "config.json").unlink()
    assert "hf-" in refused(strange)


def test_names_that_are_too_long(folder):
    long = "x" * 5000
    assert "too long" in refused(Path(long), out=folder.parent / "out")
    code, _, said = colossax("import", str(folder), str(folder.parent / long))
    assert (code, said.count("\n"), len(said) < 1000) == (2, 1, True)
    assert "too long" in said
