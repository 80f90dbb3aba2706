"""Folders that peft wrote (tests/golden/adapters.py), read, written again and merged."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from colossax.errors import CheckpointError, InputError, WeightsError
from colossax.inference.loading import open_checkpoint
from colossax.models.adapters.peft import export_peft, import_peft
from colossax.models.hf import copy_checkpoint, import_checkpoint
from colossax.sharding import use

GOLDEN = Path(__file__).parent.parent / "golden"
BASES = {"lora": "llama", "rslora": "gptj", "dora": "llama_head_dim"}
TOLERANCE = 1e-5
# A merged matrix is rounded once more: two right answers in float32 are each as far from float64 as
# golden cases may be (MAX_ROUNDING of tests/golden/regenerate.py, 7e-6).
MERGED = 2 * 7e-6


def logits(checkpoint, case):
    loaded = open_checkpoint(checkpoint).load(devices=jax.devices()[:1])
    ids = load_file(GOLDEN / BASES[case] / "expected.safetensors")["input_ids"]
    with use(loaded.bound):
        model = loaded.spec.merge(loaded.params)
        y = model.hidden(jnp.asarray(ids, jnp.int32))[0] @ model.head_weight()
        bias = getattr(model, "readout", {}).get("bias")
    return np.asarray(y if bias is None else y + bias)


@pytest.fixture
def imported(tmp_path):
    def of(case):
        import_checkpoint(GOLDEN / BASES[case], tmp_path / "base")
        import_peft(GOLDEN / "adapters" / case, tmp_path / "adapter", tmp_path / "base")
        return tmp_path / "adapter"

    return of


@pytest.mark.parametrize("case", ["lora", "dora"])
def test_logits_are_those_of_peft_beside_the_base_and_merged(imported, tmp_path, case):
    wanted = load_file(GOLDEN / "adapters" / case / "expected.safetensors")["logits"]
    adapter = imported(case)
    np.testing.assert_allclose(logits(adapter, case), wanted, rtol=0, atol=TOLERANCE)
    copy_checkpoint(adapter, tmp_path / "merged")
    np.testing.assert_allclose(logits(tmp_path / "merged", case), wanted, rtol=0, atol=MERGED)


@pytest.mark.parametrize("case", BASES)
def test_what_is_read_is_written_again(imported, tmp_path, case):
    export_peft(imported(case), tmp_path / "again")
    first, again = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (GOLDEN / "adapters" / case, tmp_path / "again")
    )
    assert first.keys() == again.keys()
    for name, value in first.items():
        np.testing.assert_allclose(again[name], value, rtol=1e-6, atol=1e-6)


def test_another_base_is_refused(imported, tmp_path):
    adapter = imported("lora")
    shutil.rmtree(tmp_path / "base")
    import_checkpoint(GOLDEN / "llama3", tmp_path / "base")
    with pytest.raises(CheckpointError, match="is an adapter of another base than"):
        open_checkpoint(adapter)
    with pytest.raises(WeightsError, match="give the base that the adapter was trained beside"):
        import_peft(GOLDEN / "adapters" / "rslora", tmp_path / "other", tmp_path / "base")


def test_settings_that_are_not_ours_are_refused(tmp_path):
    folder = tmp_path / "peft"
    shutil.copytree(GOLDEN / "adapters" / "lora", folder)
    import_checkpoint(GOLDEN / "llama", tmp_path / "base")
    file = folder / "adapter_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "bias": "all"}))
    with pytest.raises(InputError, match="bias = 'all' is not supported; only 'none' is"):
        import_peft(folder, tmp_path / "out", tmp_path / "base")


def test_a_base_is_found_where_both_moved_or_where_it_is_said_to_be(tmp_path):
    old, new, apart = (tmp_path / name for name in ("old", "new", "apart"))
    import_checkpoint(GOLDEN / "llama", old / "base")
    import_peft(GOLDEN / "adapters" / "lora", old / "adapter", old / "base")
    old.rename(new)
    found, _ = open_checkpoint(new / "adapter").base
    assert found.directory == new / "base"
    (new / "base").rename(apart)
    with pytest.raises(CheckpointError, match="name the place of its base with --base"):
        open_checkpoint(new / "adapter")
    found, _ = open_checkpoint(new / "adapter", base=apart).base
    assert found.directory == apart
