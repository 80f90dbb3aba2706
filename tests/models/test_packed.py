"""Folders whose matrices are in codes of GPTQ, AWQ and compressed-tensors, as plain ones read."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from colossax.checkpoint import RecordReader
from colossax.errors import InputError, WeightsError
from colossax.models.hf import import_checkpoint
from colossax.models.hf_folder import open_folder, read_params
from tests.cases import quick_first
from tests.models.packing import awq, compressed, gptq, in_bytes

GOLDEN = Path(__file__).parent.parent / "golden"
MAPS = ("_proj.weight",)


def of_gptq(**said):
    return {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False, **said}


def of_awq(**said):
    base = {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True}
    return {**base, "version": "gemm", **said}


def of_compressed(form="pack-quantized", **said):
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8, **said}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    base = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]}
    return {**base, "config_groups": {"group_0": group}, "quantization_status": "compressed"}


def in_byte(form, kind, strategy="channel"):
    return of_compressed(form, num_bits=8, type=kind, strategy=strategy, group_size=None)


CASES = {
    "gptq": (gptq, {}, of_gptq()),
    "gptq, inputs in another order": (gptq, {"order": True}, of_gptq(desc_act=True)),
    "gptq of the second form": (gptq, {"second": True}, of_gptq(checkpoint_format="gptq_v2")),
    "gptq of eight bits": (gptq, {"bits": 8}, of_gptq(bits=8)),
    "gptq of one group": (gptq, {"group": -1, "indexed": False}, of_gptq(group_size=-1)),
    "awq": (awq, {}, of_awq()),
    "compressed": (compressed, {}, of_compressed()),
    "compressed with zeros": (compressed, {"symmetric": False}, of_compressed(symmetric=False)),
    "compressed, in another order": (compressed, {"order": True}, of_compressed(actorder="group")),
    "compressed of eight bits, by outputs": (
        compressed,
        {"bits": 8, "group": -1},
        of_compressed(num_bits=8, strategy="channel", group_size=None),
    ),
    "int8": (in_bytes, {}, in_byte("int-quantized", "int")),
    "fp8": (in_bytes, {"kind": "fp8"}, in_byte("float-quantized", "float")),
    "fp8 of one scale": (
        in_bytes,
        {"kind": "fp8", "one": True},
        in_byte("float-quantized", "float", "tensor"),
    ),
}
QUICK = ("gptq, inputs in another order", "gptq of the second form", "awq", "fp8")
QUICK += ("compressed with zeros",)


def folders(where, make, how, said, change=lambda tensors: None, case="llama"):
    """A golden model with its maps in codes, and as what these stand for."""
    packed, plain = where / "packed", where / "plain"
    rng = np.random.default_rng(0)
    for folder in (packed, plain):
        shutil.copytree(GOLDEN / case, folder)
    stored = load_file(packed / "model.safetensors")
    floats = dict(stored)
    for name in [name for name in stored if name.endswith(MAPS)]:
        out, inputs = stored.pop(name).shape
        parts, wanted = make(rng, out, inputs, **how)
        stored |= {name.removesuffix("weight") + part: x for part, x in parts.items()}
        floats[name] = wanted
    change(stored)
    save_file(stored, packed / "model.safetensors")
    save_file(floats, plain / "model.safetensors")
    settings = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**settings, "quantization_config": said}))
    return packed, plain


@pytest.mark.slow
@pytest.mark.catches("gptq-zeros-as-they-are")
@pytest.mark.catches("gptq-order-left-out")
@pytest.mark.catches("awq-outputs-in-a-row")
@pytest.mark.catches("compressed-zeros-left-out")
@pytest.mark.parametrize("case", quick_first(CASES, QUICK))
def test_a_model_in_codes_is_that_of_its_numbers(tmp_path, case):
    packed, plain = folders(tmp_path, *CASES[case])
    (config, found), (other, wanted) = read_params(packed), read_params(plain)
    assert config == other
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x.astype(np.float32), y.astype(np.float32))


def test_it_is_imported_as_floats_of_its_scales(tmp_path):
    packed, _ = folders(tmp_path, *CASES["awq"])
    import_checkpoint(packed, tmp_path / "out")
    records = RecordReader(tmp_path / "out", 0).records()
    assert records["model/params/layers/attn/q/w"][1] == np.float16
    assert records["model/params/head/w"][1] == np.float32


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_bias_that_a_model_has_not_must_be_zero(tmp_path, value):
    name = "model.layers.1.self_attn.k_proj.bias"

    def change(tensors):
        tensors[name] = np.full(16, value, np.float16)

    packed, _ = folders(tmp_path, *CASES["gptq"], change)
    if not value:
        assert open_folder(packed).packed
        return
    with pytest.raises(WeightsError, match="k_proj.bias: is not zero, and config.json gives"):
        open_folder(packed)


SETTINGS = [
    (
        of_gptq(bits=3),
        "gptq",
        "bits = 3 is not supported; only 4 or 8 is: give the model in floats",
    ),
    (of_gptq(checkpoint_format="marlin"), "gptq", "checkpoint_format = 'marlin' is not supported"),
    (of_gptq(dynamic={"-:.*down.*": {}}), "gptq", "dynamic = {.*} is not supported"),
    (of_gptq(group_size=None), "gptq", "group_size = None is not supported; it must be a whole"),
    (of_awq(version="gemv"), "awq", "version = 'gemv' is not supported; only 'gemm' or 'GEMM'"),
    (of_awq(zero_point=False), "awq", "zero_point = False is not supported"),
    (
        {"quant_method": "bitsandbytes"},
        "awq",
        "quant_method = 'bitsandbytes' .*only gptq, awq, com",
    ),
    (of_compressed("nvfp4-pack-quantized"), "compressed", "format = 'nvfp4-pack-quantized'"),
    (of_compressed(strategy="block"), "compressed", "strategy = 'block' is not supported"),
    (of_compressed(num_bits=2), "compressed", "num_bits = 2 is not supported; only 4 or 8"),
    (
        {**of_compressed(), "sparsity_config": {"format": "sparse-24-bitmask"}},
        "compressed",
        "sparsity_config = {'format': 'sparse-24-bitmask'} is not supported",
    ),
    ({**of_compressed(), "config_groups": {}}, "compressed", "has 0 kinds of config_groups"),
    ({**of_compressed(), "config_groups": [1]}, "compressed", "has 0 kinds of config_groups"),
    (
        {**of_compressed(), "config_groups": {"a": {"weights": [8]}}},
        "compressed",
        "strategy = None is not supported",
    ),
    (
        {**of_compressed(), "sparsity_config": "dense"},
        "compressed",
        "sparsity_config = 'dense' is not supported",
    ),
    ([], "gptq", r"'quantization_config' is \[\]; it must be dict or null"),
]


@pytest.mark.parametrize(("said", "case", "message"), SETTINGS)
def test_other_ways_to_store_codes_are_refused_by_name(tmp_path, said, case, message):
    shutil.copytree(GOLDEN / "llama", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": said}))
    with pytest.raises(InputError, match=f"config.json: .*{message}"):
        open_folder(tmp_path / "model")


Q = "model.layers.0.self_attn.q_proj."
TENSORS = [
    (
        "gptq",
        lambda t: t.pop(f"{Q}scales"),
        r"q_proj.weight: is stored in codes and has no 'scales'",
    ),
    (
        "gptq",
        lambda t: t.update({f"{Q}scales": np.ones((2, 32), np.float16)}),
        r"q_proj.scales: is F16\[2, 32\] where config.json gives F32\|F16\|BF16\[4, 32\]; correct",
    ),
    (
        "gptq",
        lambda t: t.update({f"{Q}g_idx": np.full(32, 4, np.int32)}),
        "q_proj.g_idx: names groups from 4 to 4, and there are 4; copy",
    ),
    (
        "gptq, inputs in another order",
        lambda t: t.pop(f"{Q}g_idx"),
        r"q_proj.weight: is stored in codes and has no 'g_idx', I32\[32\]; copy",
    ),
    (
        "compressed with zeros",
        lambda t: t.pop(f"{Q}weight_zero_point"),
        r"q_proj.weight: is stored in codes and has no 'weight_zero_point', I32\[4, 4\]; copy",
    ),
    (
        "compressed",
        lambda t: t.update({f"{Q}weight_packed": np.ones((32, 3), np.int32)}),
        r"q_proj.weight_packed: is I32\[32, 3\] where config.json gives I32\[32, 4\]",
    ),
    (
        "fp8",
        lambda t: t.pop(f"{Q}weight_scale"),
        "q_proj.weight: is stored as F8_E4M3, which is not",
    ),
]


@pytest.mark.catches("groups-that-are-not-there")
@pytest.mark.catches("gptq-order-not-asked-for")
@pytest.mark.catches("compressed-zeros-not-asked-for")
@pytest.mark.parametrize(("case", "change", "message"), TENSORS)
def test_parts_that_do_not_fit_are_refused(tmp_path, case, change, message):
    packed, _ = folders(tmp_path, *CASES[case], change)
    with pytest.raises(WeightsError, match=message):
        read_params(packed)


@pytest.mark.catches("zeros-out-of-bounds")
@pytest.mark.parametrize("zero", [-9, -8, 7, 8])
def test_a_zero_that_is_no_code_is_refused(tmp_path, zero):
    """Of a matrix with one scale, whose zero has a byte of its own."""

    def change(tensors):
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            tensors[name] = tensors[name][:1, 0]
            tensors[name.replace("scale", "zero_point")] = np.full(1, zero, np.int8)

    said = of_compressed(strategy="tensor", symmetric=False, group_size=None)
    packed, _ = folders(tmp_path, compressed, {}, said, change)
    if zero in (-8, 7):
        assert read_params(packed)
        return
    with pytest.raises(WeightsError, match=f"zero_point: has numbers from {zero} to {zero}, more"):
        read_params(packed)


def test_groups_that_do_not_divide_inputs_are_refused(tmp_path):
    packed, _ = folders(tmp_path, gptq, {}, of_gptq(group_size=7))
    with pytest.raises(WeightsError, match="groups of 7 do not divide its 32; correct config.json"):
        open_folder(packed)


def test_a_family_that_stores_inputs_first_is_refused(tmp_path):
    shutil.copytree(GOLDEN / "gpt2", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    name = next(n for n in tensors if n.endswith("mlp.c_fc.weight"))
    inputs, out = tensors.pop(name).shape
    parts, _ = gptq(np.random.default_rng(0), out, inputs)
    stem = name.removesuffix("weight")
    save_file({**tensors, **{stem + part: x for part, x in parts.items()}}, file)
    settings = tmp_path / "model" / "config.json"
    said = {**json.loads(settings.read_text()), "quantization_config": of_gptq()}
    settings.write_text(json.dumps(said))
    with pytest.raises(WeightsError, match="c_fc.weight: is stored in codes, and this family has"):
        open_folder(tmp_path / "model")
