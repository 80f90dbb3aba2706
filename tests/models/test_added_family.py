"""A family that the library has not: its sizes, its table, and all else follows."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from colossax.config import Count
from colossax.errors import InputError
from colossax.models import FAMILIES, Family, add_family, config_from_json, config_to_json, maker
from colossax.models.conversion import Conversion, link, setting
from colossax.models.hf import export_checkpoint, import_checkpoint
from colossax.models.hf_folder import read_params
from colossax.nn import DecoderConfig, DecoderSizes, RopeConfig, even_head_dim
from tests.models.test_parity import GOLDEN, TOLERANCE, expected, logits

MLP = "blocks.{layer}.mlp"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForestConfig(DecoderSizes):
    """Llama under other names."""

    max_seq: Count = 128
    tied: bool = False

    def decoder(self) -> DecoderConfig:
        """The decoder these sizes describe."""
        return self.described(head_dim=even_head_dim(self.embed, self.heads), rope=RopeConfig())


QKV = [f"layers/attn/{name}/w" for name in "qkv"]
FOREST = Conversion(
    model_type="forest",
    architecture="ForestForCausalLM",
    config=ForestConfig,
    settings=(
        setting("vocab", "tokens"),
        setting("embed", "width"),
        setting("layers", "depth"),
        setting("heads", "heads"),
        setting("kv_heads", "kv_heads"),
        setting("mlp", "hidden"),
        setting("tied", "tied", default=False),
    ),
    links=(
        link("tokens.weight", "vocab embed", "embed/table"),
        link("blocks.{layer}.first.weight", "embed", "layers/attn_norm/scale"),
        link("blocks.{layer}.qkv.weight", "(heads|kv_heads|kv_heads head_dim) embed", *QKV),
        link("blocks.{layer}.out.weight", "embed (heads head_dim)", "layers/attn/o/w"),
        link("blocks.{layer}.second.weight", "embed", "layers/mlp_norm/scale"),
        link(f"{MLP}.gate.weight", "mlp embed", "layers/mlp/gate/w"),
        link(f"{MLP}.up.weight", "mlp embed", "layers/mlp/up/w"),
        link(f"{MLP}.down.weight", "embed mlp", "layers/mlp/down/w"),
        link("last.weight", "embed", "norm/scale"),
        link("lm_head.weight", "vocab embed", "head/w"),
    ),
)


@pytest.fixture
def forest():
    add_family(Family(name="forest", config=ForestConfig, conversion=FOREST))
    yield
    del FAMILIES["forest"]


def folder_of_llama(folder: Path) -> Path:
    """The golden Llama as a folder of the family."""
    shutil.copytree(GOLDEN / "llama", folder)
    theirs = json.loads((folder / "config.json").read_text())
    names = {"tokens": "vocab_size", "width": "hidden_size", "depth": "num_hidden_layers"}
    names |= {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads"}
    sizes = {ours: theirs[name] for ours, name in names.items()}
    settings = {"model_type": "forest", "hidden": theirs["intermediate_size"], **sizes}
    (folder / "config.json").write_text(json.dumps(settings))
    weights = load_file(folder / "model.safetensors")
    for at in range(settings["depth"]):
        old, new = f"model.layers.{at}", f"blocks.{at}"
        qkv = [weights.pop(f"{old}.self_attn.{name}_proj.weight") for name in "qkv"]
        weights[f"{new}.qkv.weight"] = np.concatenate(qkv)
        weights[f"{new}.out.weight"] = weights.pop(f"{old}.self_attn.o_proj.weight")
        weights[f"{new}.first.weight"] = weights.pop(f"{old}.input_layernorm.weight")
        weights[f"{new}.second.weight"] = weights.pop(f"{old}.post_attention_layernorm.weight")
        for name in ("gate", "up", "down"):
            weights[f"{new}.mlp.{name}.weight"] = weights.pop(f"{old}.mlp.{name}_proj.weight")
    weights["tokens.weight"] = weights.pop("model.embed_tokens.weight")
    weights["last.weight"] = weights.pop("model.norm.weight")
    save_file(weights, folder / "model.safetensors")
    return folder


def test_its_files_are_read_and_written(forest, tmp_path):
    source, want = folder_of_llama(tmp_path / "source"), expected("llama")
    config, params = read_params(source)
    assert config_from_json(config_to_json(config)) == config
    found = logits(maker(config), params, want["input_ids"])
    np.testing.assert_allclose(found, want["logits"], rtol=0, atol=TOLERANCE)
    import_checkpoint(source, tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "export")
    mine, theirs = (
        load_file(tmp_path / name / "model.safetensors") for name in ("export", "source")
    )
    assert mine.keys() == theirs.keys()
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.catches("family-twice")
def test_a_name_is_given_once(forest):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Other(ForestConfig):
        """Of the same name."""

    with pytest.raises(InputError, match="add_family: 'forest' has the name or the configuration"):
        add_family(Family(name="forest", config=Other, conversion=FOREST))
    with pytest.raises(InputError, match="'grove' has the name or the configuration of 'forest'"):
        add_family(Family(name="grove", config=ForestConfig))
