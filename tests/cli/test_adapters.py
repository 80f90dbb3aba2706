"""Adapters from the command line: trained beside a base, resumed, written out, merged."""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from colossax.checkpoint import find_checkpoint
from colossax.cli import main
from colossax.models.parameters import params_of_checkpoint
from tests.launching import metrics, write_text

BASE = (
    "llama_tiny --model.layers=2 --model.embed=32 --model.mlp=48 --model.heads=4"
    " --model.kv_heads=2 --model.vocab=300 --data.tokenizer_vocab=300 --data.seq_len=32"
    " --data.global_batch=8 --data.validation_batches=1 --sample.prompt= --trackers=json --json"
).split()
BESIDE = ["--adapter.rank=2", "--adapter.targets=attn/*,mlp/down", "--optimizer.peak_lr=0.02"]
BESIDE.append("--optimizer.ema=0.6")
ANY = "--plan.mesh=fsdp=2,tensor=4", "--devices=8"
OTHER = "--plan.mesh=data=4", "--devices=4"


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """A base of one step, and an adapter of four: on one mesh, and on two after another."""
    assert len(jax.devices()) == 8
    folder = tmp_path_factory.mktemp("adapters")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLOSSAX_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        text = f"--data={write_text(folder / 'text')}"
        trained("base", text, "--steps=1", *ANY)
        beside = text, "--init=base", *BESIDE, "--optimizer.schedule_steps=4"
        trained("whole", *beside, "--steps=4", *ANY)
        trained("run", *beside, "--steps=2", *OTHER)
        (folder / "base").rename(folder / "moved")
        yield folder


def trained(out, *words, code=0):
    assert main(["train", *BASE, f"--out={out}", *words]) == code


def losses(run):
    return [(loss or 0, held_out or 0) for _, loss, held_out in metrics(run)]


def tensors(folder):
    return load_file(folder / "model.safetensors")


def records(run):
    return {name for name in find_checkpoint(run).records() if name.startswith("model/")}


def said(capsys, *words, code=0):
    capsys.readouterr()
    assert main(list(words)) == code
    out, err = capsys.readouterr()
    return err if code else out


@pytest.fixture(scope="module")
def codes(folder):
    """Of the rest of the run, its base elsewhere: without a word of that, and with one."""
    words = "train", "--out=run", "--resume", "--steps=4", *ANY
    return main(list(words)), main([*words, "--base=moved"])


@pytest.fixture(scope="module")
def resumed(folder, codes):
    return folder / "run"


@pytest.mark.slow
@pytest.mark.catches("moved-base-of-a-run")
def test_a_resumed_adapter_goes_on_as_if_nothing_had_happened(folder, codes, resumed):
    assert codes == (2, 0)
    whole, parts = losses(folder / "whole"), losses(resumed)
    np.testing.assert_allclose([one for one in parts if one[0]], [x for x in whole if x[0]], 2e-5)
    assert parts[-1] == pytest.approx(whole[-1], rel=2e-5)
    assert whole[-1][1] < losses(folder / "moved")[-1][1]


@pytest.mark.slow
def test_checkpoints_hold_the_adapter_alone(folder, resumed):
    of_base = {name for name in records("moved") if "/params/" in name}
    held = records(resumed)
    assert not of_base & held
    pair = {f"model/params/layers/attn/q/w/{one}" for one in ("down", "up")}
    assert pair <= held
    ends = {name.rpartition("/")[2] for name in held if "/params/" in name or "/mu/" in name}
    assert ends == {"down", "up"}


@pytest.mark.slow
def test_it_is_exported_as_peft_and_read_again(folder, resumed, capsys):
    said(capsys, "export", "run", "peft", "--base=moved")
    settings = json.loads((folder / "peft" / "adapter_config.json").read_text())
    assert (settings["r"], settings["target_modules"]) == (
        2,
        ["down_proj", "k_proj", "o_proj", "q_proj", "v_proj"],
    )
    assert not (folder / "peft" / "model.safetensors").exists()
    said(capsys, "import", "peft", "again", "--base=moved")
    said(capsys, "export", "again", "there", "--merge")
    said(capsys, "export", "run", "merged", "--merge", "--base=moved")
    for name, wanted in tensors(folder / "merged").items():
        np.testing.assert_array_equal(tensors(folder / "there")[name], wanted)


@pytest.mark.slow
@pytest.mark.catches("averages-of-adapters")
def test_its_averages_are_exported_alone_and_merged(folder, resumed, capsys):
    said(capsys, "export", "run", "averages", "--averaged", "--base=moved")
    pairs = load_file(folder / "averages" / "adapter_model.safetensors")
    state = find_checkpoint("run")
    b = pairs["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"]
    kept = state.read("model/optimizer/average/layers/attn/q/w/up", 1)
    assert np.abs(kept - state.read("model/params/layers/attn/q/w/up", 1)).max() > 1e-4
    np.testing.assert_array_equal(np.sort(b.ravel()), np.sort(kept.ravel()))
    said(capsys, "import", "averages", "of averages", "--base=moved")
    said(capsys, "export", "of averages", "one", "--merge")
    said(capsys, "export", "run", "two", "--merge", "--averaged", "--base=moved")
    for name, wanted in tensors(folder / "one").items():
        np.testing.assert_array_equal(tensors(folder / "two")[name], wanted)


@pytest.mark.slow
def test_merged_it_is_the_base_and_what_it_learned(folder, resumed, capsys):
    said(capsys, "export", "run", "whole model", "--merge", "--as-checkpoint", "--base=moved")
    base, merged = (
        params_of_checkpoint(find_checkpoint(folder / name)) for name in ("moved", "whole model")
    )
    adapted = ("attn/k/w", "attn/o/w", "attn/q/w", "attn/v/w", "mlp/down/w")
    for path, info in base.infos.items():
        layer = None if info.first_layer is None else 1
        moved = np.abs(merged.read(path, layer, None) - base.read(path, layer, None)).max()
        assert (moved > 1e-4) == path.endswith(adapted), path
        assert (moved == 0) != path.endswith(adapted), path


@pytest.mark.slow
def test_it_generates_what_the_merged_model_does(folder, resumed, capsys):
    if not (folder / "one model").exists():
        said(capsys, "export", "run", "one model", "--merge", "--as-checkpoint", "--base=moved")
    words = "--prompt=abc", "--max-tokens=12", "--temperature=0", "--json", "--devices=1"
    beside = said(capsys, "generate", "run", "--base=moved", *words)
    merged = said(capsys, "generate", "one model", *words)
    assert json.loads(beside)["tokens"] == json.loads(merged)["tokens"]


@pytest.mark.slow
@pytest.mark.catches("initial-adapter")
def test_it_goes_on_from_an_adapter_and_only_with_the_same(folder, resumed, capsys):
    text = f"--data={folder / 'text'}"
    trained("further", text, "--init=run", "--base=moved", "--steps=1", *OTHER)
    first = losses(folder / "further")[0]
    assert first[0] != losses(folder / "whole")[0][0]
    further, before = (
        {name for name in records(run) if "/params/" in name} for run in ("further", "run")
    )
    assert further == before
    words = text, "--init=run", "--base=moved", "--adapter.targets=attn/q", "--steps=1"
    err = said(capsys, "train", *BASE, "--out=not", *words, code=2)
    assert "is an adapter with 'model/params/layers/attn/k/w/down', which" in err


@pytest.mark.slow
def test_what_does_not_fit_is_refused_in_one_sentence(folder, resumed, capsys):
    text = f"--data={folder / 'text'}"
    alone = said(capsys, "train", *BASE, text, "--out=not", "--adapter.rank=2", code=2)
    assert "give the checkpoint of a model with --init" in alone
    gone = said(capsys, "generate", "whole", "--prompt=a", code=2)
    assert "name the place of its base with --base" in gone
    none = said(capsys, "export", "moved", "not", "--merge", code=2)
    assert "--merge: moved holds no adapter; leave the option out" in none
    whole = said(capsys, "train", *BASE, text, "--out=not", "--init=moved", "--base=run", code=2)
    assert "is of a whole model and no adapter; leave base out" in whole
    shutil.copytree("moved", "other")
    no_run = said(capsys, "train", "--resume", "--out=other", "--base=moved", code=2)
    assert "--base: the run in other has no adapter; leave the option out" in no_run
    for one in (alone, gone, none, whole, no_run):
        assert one.startswith("colossax: ") and one.count("\n") <= 2
