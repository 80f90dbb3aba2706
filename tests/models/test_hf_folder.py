"""Folders read whole, and what is refused of them."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from colossax.errors import InputError, WeightsError
from colossax.models import conversion
from colossax.models.hf_folder import open_folder, read_params

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.fixture
def folder(tmp_path):
    """Copies a golden case, its tensors passed through `edit`."""

    def make(case, edit=lambda tensors: tensors, **settings):
        target = tmp_path / case
        shutil.copytree(GOLDEN / case, target)
        (target / "expected.safetensors").unlink()
        if (target / "model.safetensors").exists():
            tensors = load_file(target / "model.safetensors")
            save_file(edit(dict(tensors)), target / "model.safetensors")
        if settings:
            file = target / "config.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
        return target

    return make


def without(*names):
    return lambda tensors: {name: value for name, value in tensors.items() if name not in names}


def leaves(tree, path=()):
    if not isinstance(tree, dict):
        return {path: tree}
    return {k: v for name, branch in tree.items() for k, v in leaves(branch, (*path, name)).items()}


def assert_same_params(found, wanted):
    found, wanted = leaves(found), leaves(wanted)
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        assert found[path].dtype == value.dtype, path
        np.testing.assert_array_equal(found[path], value, err_msg=str(path))


@pytest.mark.catches("rows-of-a-tensor")
def test_blocks_do_not_show(monkeypatch):
    _, whole = read_params(GOLDEN / "bloom")
    monkeypatch.setattr(conversion, "BLOCK_BYTES", 700)
    assert_same_params(read_params(GOLDEN / "bloom")[1], whole)


@pytest.mark.catches("gpt2-transposed")
@pytest.mark.parametrize(("case", "prefix"), [("gpt2", "transformer."), ("opt", "model.")])
def test_names_without_prefix(folder, case, prefix):
    bare = folder(case, lambda tensors: {k.removeprefix(prefix): v for k, v in tensors.items()})
    assert_same_params(read_params(bare)[1], read_params(GOLDEN / case)[1])


def test_tensors_that_hold_no_parameters(folder):
    def add(tensors):
        tensors["transformer.h.0.attn.bias"] = np.ones((1, 1, 64, 64), np.float32)
        return tensors

    assert_same_params(read_params(folder("gpt2", add))[1], read_params(GOLDEN / "gpt2")[1])


def test_tied_head_stored_too(folder):
    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        return tensors

    assert_same_params(read_params(folder("qwen3", add))[1], read_params(GOLDEN / "qwen3")[1])


@pytest.mark.parametrize("case", ["gpt2", "opt", "bloom", "llama3"])
def test_head_of_its_own(folder, case):
    def add(tensors):
        table = next(v for k, v in tensors.items() if k.split(".")[-2] in EMBEDDINGS)
        tensors["lm_head.weight"] = table[::-1].copy()
        return tensors

    _, params = read_params(folder(case, add, tie_word_embeddings=False))
    np.testing.assert_array_equal(params["head"]["w"], params["embed"]["table"][::-1].T)


EMBEDDINGS = ("wte", "embed_tokens", "word_embeddings")


def test_types_are_kept_and_the_wider_wins(folder):
    def narrow(tensors):
        return {
            name: value if "layers.1" in name else value.astype(ml_dtypes.bfloat16)
            for name, value in tensors.items()
        }

    _, params = read_params(folder("llama", narrow))
    _, whole = read_params(GOLDEN / "llama")
    assert params["norm"]["scale"].dtype == ml_dtypes.bfloat16
    stacked = params["layers"]["segments"][0]["attn"]["q"]["w"]
    wanted = whole["layers"]["segments"][0]["attn"]["q"]["w"]
    assert stacked.dtype == np.float32
    np.testing.assert_array_equal(stacked[1], wanted[1])
    np.testing.assert_array_equal(stacked[0], wanted[0].astype(ml_dtypes.bfloat16))


def test_missing_and_extra_tensors_are_named(folder):
    missing = "model.layers.1.mlp.up_proj.weight"

    def edit(tensors):
        return {**without(missing)(tensors), "model.layers.2.mlp.up_proj.weight": tensors[missing]}

    message = rf"llama with this config.json lacks {missing} and has besides model\.layers\.2\.mlp"
    with pytest.raises(WeightsError, match=message):
        open_folder(folder("llama", edit))


def test_layers_that_predict_further_tokens_are_left_out(folder):
    """The published DeepSeek-V3 has one behind its 61 layers; `transformers` ignores it too."""
    norm = "model.layers.1.input_layernorm.weight"

    def edit(tensors):
        return {**tensors, norm.replace("1", "61"): tensors[norm]}

    assert_same_params(
        read_params(folder("deepseek_v3", edit))[1], read_params(GOLDEN / "deepseek_v3")[1]
    )
    with pytest.raises(WeightsError, match=r"has besides model\.layers\.61\.input_layernorm"):
        open_folder(folder("deepseek_v2", edit))


def test_many_missing_tensors_are_counted(folder):
    with pytest.raises(WeightsError, match=r"lacks model\.layers\.2\.\S+, .* and 4 more; correct"):
        open_folder(folder("llama", num_hidden_layers=3))


EXPERTS = {
    "mixtral": "num_local_experts",
    "qwen2_moe": "num_experts",
    "qwen3_moe": "num_local_experts",
    "olmoe": "num_experts",
    "deepseek_v2": "n_routed_experts",
    "deepseek_v3": "n_routed_experts",
}


@pytest.mark.catches("experts-from-sizes")
@pytest.mark.parametrize("case", EXPERTS)
def test_more_experts_than_tensors_are_refused_before_they_are_listed(case, folder, monkeypatch):
    monkeypatch.delattr(conversion.Conversion, "tensors")
    message = "gives 100000 experts of a layer, [0-9]+ of all, and the weights are [0-9]+ tensors;"
    with pytest.raises(WeightsError, match=message):
        open_folder(folder(case, **{EXPERTS[case]: 100_000}))


@pytest.mark.catches("tensors-extra")
def test_biases_nobody_asked_for(folder):
    with pytest.raises(WeightsError, match=r"has besides model\.layers\.0\.mlp\.down_proj\.bias"):
        open_folder(folder("llama_head_dim", mlp_bias=False))


def test_wrong_shape(folder):
    name = "model.layers.0.self_attn.k_proj.weight"
    message = rf"{name}: has shape \[16, 32\] where config.json gives \[32, 32\]"
    with pytest.raises(WeightsError, match=message):
        open_folder(folder("llama", num_key_value_heads=4))


def test_transposed(folder):
    name = "transformer.h.0.mlp.c_fc.weight"

    def edit(tensors):
        return {**tensors, name: tensors[name].T.copy()}

    with pytest.raises(WeightsError, match=rf"{name}: has shape \[128, 32\] where .* \[32, 128\]"):
        open_folder(folder("gpt2", edit))


def test_type_not_supported(folder):
    def edit(tensors):
        return {**tensors, "model.norm.weight": tensors["model.norm.weight"].astype(np.int8)}

    with pytest.raises(WeightsError, match=r"model\.norm\.weight: is stored as I8, which is not"):
        open_folder(folder("llama", edit))


@pytest.mark.catches("tied-head-differs")
def test_tied_head_that_differs(folder):
    def edit(tensors):
        return {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] * 2}

    with pytest.raises(WeightsError, match=r"lm_head\.weight: differs from model\.embed_tokens"):
        open_folder(folder("qwen3", edit))


def test_cut_short(folder):
    target = folder("llama")
    file = target / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WeightsError, match=r"model\.safetensors: is damaged or cut short"):
        open_folder(target)


def test_missing_shard(folder):
    target = folder("qwen2")
    (target / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(WeightsError, match="model-00002-of-00003.safetensors: is missing"):
        open_folder(target)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "config.json: is missing; name a folder"),
        ("{", r"config.json: cannot be read \(it is no JSON"),
        ("[]", r"config.json: cannot be read \(it is a list, not an object\)"),
        ("{}", "model_type None is not among the families here; known: llama"),
    ],
)
def test_unreadable_config(folder, text, message):
    target = folder("llama")
    (target / "config.json").unlink()
    if text is not None:
        (target / "config.json").write_text(text)
    with pytest.raises(InputError, match=message):
        open_folder(target)
