"""Weights of four bits: numbers as a loop reads them, and models that are stored so."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from colossax.errors import WeightsError
from colossax.models.hf import import_checkpoint
from colossax.models.hf_folder import open_folder, read_params
from colossax.models.mxfp4 import unpack

GOLDEN = Path(__file__).parent.parent / "golden" / "gpt_oss"
EXPERTS = ("gate_up_proj", "down_proj")


def number(bits):
    """A number of four bits, from its sign, its exponent and its mantissa."""
    sign, exponent, mantissa = bits >> 3, (bits >> 1) & 3, bits & 1
    size = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return -size if sign else size


def read_by_loop(blocks, scales):
    """Numbers `[..., groups * 32]`, one after another."""
    found = np.zeros((*scales.shape[:-1], scales.shape[-1] * 32))
    for at in np.ndindex(blocks.shape):
        *lead, group, byte = at
        scale = 2.0 ** (int(scales[(*lead, group)]) - 127)
        place = 32 * group + 2 * byte
        found[(*lead, place)] = number(int(blocks[at]) & 15) * scale
        found[(*lead, place + 1)] = number(int(blocks[at]) >> 4) * scale
    return found


def drawn(experts, writes, reads, seed=0):
    """Bytes and scales of matrices of so many experts."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (experts, writes, reads // 32, 16), dtype=np.uint8)
    return blocks, rng.integers(120, 127, (experts, writes, reads // 32), dtype=np.uint8)


@pytest.mark.catches("mxfp4-halves-swapped")
def test_numbers_are_those_of_a_loop():
    blocks, scales = drawn(2, 3, 64)
    blocks[0, 0, 0] = np.arange(16) * 17  # every number there is
    found = unpack(blocks, scales)
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found.astype(np.float64), read_by_loop(blocks, scales))


def test_the_last_scale_is_no_number():
    blocks, scales = drawn(1, 1, 32)
    scales[:] = 255
    assert np.isnan(unpack(blocks, scales).astype(np.float32)).all()


def packed_folder(folder, change=lambda tensors: None):
    """The golden model, its experts stored as MXFP4; returns what they are as plain tensors."""
    shutil.copytree(GOLDEN, folder)
    tensors, plain = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(EXPERTS)]:
        experts, reads, writes = tensors.pop(name).shape
        blocks, scales = drawn(experts, writes, reads, seed=len(plain))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = np.swapaxes(unpack(blocks, scales), 1, 2)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(settings))
    return plain


def test_a_packed_model_is_that_of_its_numbers(tmp_path):
    plain = packed_folder(tmp_path / "packed")
    shutil.copytree(GOLDEN, tmp_path / "plain")
    file = tmp_path / "plain" / "model.safetensors"
    wide = {name: np.ascontiguousarray(value) for name, value in plain.items()}
    save_file({**load_file(file), **wide}, file)
    (_, found), (_, wanted) = (read_params(tmp_path / name) for name in ("packed", "plain"))
    of_experts = found["layers"]["segments"][0]["full"]["mlp"]
    for name in ("gate", "up", "down"):
        assert of_experts[name].dtype == ml_dtypes.bfloat16
        like = wanted["layers"]["segments"][0]["full"]["mlp"][name]
        np.testing.assert_array_equal(of_experts[name], like)
    import_checkpoint(tmp_path / "packed", tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors, name: tensors.update({f"{name}_scales": np.ones((4, 2), np.uint8)}),
            r"down_proj_scales: is U8\[4, 2\] where config.json gives U8\[4, 32, 1\]",
        ),
        (lambda tensors, name: tensors.pop(f"{name}_scales"), "lacks .*down_proj and has besides"),
    ],
)
def test_packed_tensors_that_do_not_fit_are_refused(tmp_path, change, message):
    name = "model.layers.0.mlp.experts.down_proj"
    packed_folder(tmp_path / "packed", lambda tensors: change(tensors, name))
    with pytest.raises(WeightsError, match=message):
        open_folder(tmp_path / "packed")


@pytest.mark.parametrize("case", ["olmoe", "gpt_oss", "llama4_text"])
def test_a_router_of_other_experts_is_refused(tmp_path, case):
    shutil.copytree(GOLDEN.parent / case, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    name = next(n for n in tensors if n.endswith(("router.weight", "mlp.gate.weight")))
    tensors[name] = np.concatenate([tensors[name], tensors[name][:1]])
    save_file(tensors, file)
    with pytest.raises(WeightsError, match=f"{name}: has shape .* where config.json gives"):
        open_folder(tmp_path / "model")
