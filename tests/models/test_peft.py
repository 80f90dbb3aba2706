"""Folders that peft wrote (tests/golden/adapters.py), read, written again and merged."""

import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from colossax.errors import CheckpointError, CheckpointWarning, InputError, WeightsError
from colossax.inference.loading import open_checkpoint
from colossax.models.adapters.peft import export_peft, import_peft
from colossax.models.hf import copy_checkpoint, export_checkpoint, import_checkpoint
from colossax.sharding import use
from tests.checkpoint.support import as_version_1
from tests.models.exact import ExactLlama

GOLDEN = Path(__file__).parent.parent / "golden"
BASES = {"lora": "llama", "rslora": "gptj", "dora": "llama_head_dim"}
EPS = 2.0**-24
"""Half the distance of two numbers of float32 from 1 on: what rounding one result changes."""
FARTHER = 2.0
"""Times as far from float64 our logits may be as those of peft; 0.62 to 1.14 were measured."""


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


@pytest.mark.catches("imported-scale")
@pytest.mark.parametrize("case", ["lora", "dora"])
def test_logits_are_those_of_peft_beside_the_base_and_merged(imported, tmp_path, case):
    theirs = load_file(GOLDEN / "adapters" / case / "expected.safetensors")["logits"]
    ids = load_file(GOLDEN / BASES[case] / "expected.safetensors")["input_ids"]
    exact = ExactLlama(GOLDEN / BASES[case], GOLDEN / "adapters" / case).logits(ids)
    far = np.abs(theirs - exact).max()
    assert 0 < far < 1e-5
    adapter = imported(case)
    copy_checkpoint(adapter, tmp_path / "merged")
    for checkpoint in (adapter, tmp_path / "merged"):
        assert np.abs(logits(checkpoint, case) - exact).max() <= FARTHER * far, checkpoint.name


@pytest.mark.catches("merged-scale")
@pytest.mark.parametrize("case", ["lora", "dora"])
def test_a_merged_matrix_is_rounded_and_no_more(imported, tmp_path, case):
    """In float32 each product, sum and root is within EPS of what it would be, by share.

    `W + s A B` is a sum of r products, times s, which is rounded too, and one sum more: each of the
    r has at most `(r + 3) EPS` of its size. DoRA multiplies by one length over another, roots of
    sums of n squares: `n EPS` each and a few more.
    """
    copy_checkpoint(imported(case), tmp_path / "merged")
    export_checkpoint(tmp_path / "merged", tmp_path / "hf")
    exact = ExactLlama(GOLDEN / BASES[case], GOLDEN / "adapters" / case)
    adapted = 0
    for name, found in load_file(tmp_path / "hf" / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if f"{module}.lora_A.weight" not in exact.pairs:
            np.testing.assert_array_equal(found, exact.base[name].astype(np.float32))
            continue
        adapted += 1
        a, b = (np.abs(exact.pairs[f"{module}.lora_{which}.weight"]) for which in "AB")
        wanted, rank = exact.matrix(module), len(a)
        bound = EPS * (np.abs(exact.base[name]) + (rank + 3) * exact.scale * b @ a)
        if case == "dora":
            whole = np.linalg.norm(exact.added(module), axis=1, keepdims=True)
            wide = np.linalg.norm(wanted, axis=1, keepdims=True) / whole
            # The length is off as its column is, and by the roundings of its own sum.
            off = np.linalg.norm(bound, axis=1, keepdims=True) / whole
            bound = bound * wide + np.abs(wanted) * (off + (2 * a.shape[1] + 8) * EPS)
        assert (np.abs(found - wanted) <= bound).all(), name
    assert adapted == len(exact.pairs) // (3 if case == "dora" else 2)


@pytest.mark.catches("exported-scale-of-rank")
@pytest.mark.parametrize("case", BASES)
def test_what_is_read_is_written_again(imported, tmp_path, case):
    export_peft(imported(case), tmp_path / "again")
    first, again = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (GOLDEN / "adapters" / case, tmp_path / "again")
    )
    assert first.keys() == again.keys()
    settings, theirs = (
        json.loads((folder / "adapter_config.json").read_text())
        for folder in (tmp_path / "again", GOLDEN / "adapters" / case)
    )
    for name in ("r", "lora_alpha", "use_rslora", "use_dora", "peft_type"):
        assert settings[name] == theirs[name], name
    assert settings["target_modules"] == sorted(theirs["target_modules"])
    for name, value in first.items():
        np.testing.assert_allclose(again[name], value, rtol=1e-6, atol=1e-6)


@pytest.mark.catches("dropout-of-peft-left-out")
@pytest.mark.parametrize("case", ["lora", "dora"])
def test_dropout_is_read_and_written_where_an_adapter_has_it(tmp_path, case):
    folder = tmp_path / "peft"
    shutil.copytree(GOLDEN / "adapters" / case, folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "lora_dropout": 0.05}))
    import_checkpoint(GOLDEN / BASES[case], tmp_path / "base")
    import_peft(folder, tmp_path / "adapter", tmp_path / "base")
    export_peft(tmp_path / "adapter", tmp_path / "again")
    settings = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert settings["lora_dropout"] == (0.05 if case == "lora" else 0.0)


@pytest.mark.catches("another-base-taken")
def test_another_base_is_refused(imported, tmp_path):
    adapter = imported("lora")
    shutil.rmtree(tmp_path / "base")
    import_checkpoint(GOLDEN / "llama3", tmp_path / "base")
    with pytest.raises(CheckpointError, match="is an adapter of another base than"):
        open_checkpoint(adapter)
    with pytest.raises(WeightsError, match="give the base that the adapter was trained beside"):
        import_peft(GOLDEN / "adapters" / "rslora", tmp_path / "other", tmp_path / "base")


@pytest.mark.slow
@pytest.mark.catches("unknown-settings-of-peft")
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"bias": "all"}, "bias = 'all' is not supported; only 'none' is"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern = {'q_proj': 2} is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' is not supported"),
        ({"use_new_thing": True}, "use_new_thing = True is a setting that is not known here"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3', and LORA alone is read"),
        ({"r": 0}, "r is 0; copy the file again"),
    ],
)
def test_settings_that_are_not_ours_are_refused(tmp_path, setting, message):
    folder = tmp_path / "peft"
    shutil.copytree(GOLDEN / "adapters" / "lora", folder)
    file = folder / "adapter_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, **setting}))
    with pytest.raises(InputError, match=re.escape(message)):
        import_peft(folder, tmp_path / "out", tmp_path / "base")
    assert not (tmp_path / "out").exists()


@pytest.mark.catches("base-without-seals")
def test_a_base_that_nothing_tells_from_others_is_refused(tmp_path):
    """Of a version that had no checksums of what belongs in a step."""
    import_checkpoint(GOLDEN / "llama", tmp_path / "base")
    as_version_1(tmp_path / "base", 0)
    folders = GOLDEN / "adapters" / "lora", tmp_path / "out"
    refused = pytest.raises(CheckpointError, match="has no checksums of what belongs in it.*write")
    with refused, pytest.warns(CheckpointWarning, match="version 1"):
        import_peft(*folders, tmp_path / "base")
    copy_checkpoint(tmp_path / "base", tmp_path / "anew")
    import_peft(*folders, tmp_path / "anew")


@pytest.mark.catches("moved-base-lost")
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
