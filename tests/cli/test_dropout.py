"""Dropout from the command line: trained, resumed on another mesh, evaluated and told of."""

import json

import jax
import pytest

from colossax.cli import main
from tests.launching import metrics, write_text

SMALL = (
    "llama_tiny --model.layers=2 --model.embed=32 --model.mlp=48 --model.heads=4"
    " --model.kv_heads=2 --model.vocab=300 --data.tokenizer_vocab=300 --data.seq_len=32"
    " --data.global_batch=8 --data.validation_batches=1 --sample.prompt= --trackers=json --json"
    " --optimizer.schedule_steps=4"
).split()
DROPPING = "--model.dropout.residual=0.2", "--model.dropout.attention=0.3"
ANY = "--plan.mesh=fsdp=2,ring=2,tensor=2", "--devices=8"
OTHER = "--plan.mesh=data=2", "--plan.remat=full", "--devices=2"


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    assert len(jax.devices()) == 8
    folder = tmp_path_factory.mktemp("dropout")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLOSSAX_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        write_text(folder / "text")
        yield folder


def trained(out, *words):
    assert main(["train", *SMALL, "--data=text", f"--out={out}", *words]) == 0


@pytest.fixture(scope="module")
def whole(folder):
    """Four steps on one mesh; and two, then two on another."""
    trained("whole", *DROPPING, "--steps=4", *ANY)
    trained("run", *DROPPING, "--steps=2", *OTHER)
    assert main(["train", "--out=run", "--resume", "--steps=4", *ANY]) == 0
    return folder


def losses(run):
    """Of each step, and of what is held out at last."""
    rows = metrics(run)
    return [loss for _, loss, _ in rows if loss is not None] + [rows[-1][2]]


@pytest.mark.slow
def test_a_resumed_run_drops_what_the_whole_one_did(whole):
    assert losses(whole / "run") == pytest.approx(losses(whole / "whole"), rel=2e-5)
    said = json.loads((whole / "run" / "run.json").read_text())
    assert said["config"]["model"]["dropout"]["residual"] == 0.2


@pytest.mark.slow
def test_another_share_is_another_run(whole, capsys):
    words = "--out=run", "--resume", "--steps=5", "--model.dropout.residual=0.1"
    assert main(["train", *words, *OTHER]) == 2
    told = capsys.readouterr().err
    assert "model.dropout" in told and told.count("\n") <= 2


@pytest.mark.slow
def test_it_generates_without_and_a_plain_run_may_start_from_it(whole, capsys):
    words = "--prompt=abc", "--max-tokens=8", "--temperature=0", "--json", "--devices=1"
    found = []
    for _ in range(2):
        capsys.readouterr()
        assert main(["generate", "whole", *words]) == 0
        found.append(json.loads(capsys.readouterr().out)["tokens"])
    assert found[0] == found[1]
    none = "--model.dropout.residual=0", "--model.dropout.attention=0"
    trained("plain", "--init=whole", *none, "--steps=1", *OTHER)
    said = json.loads((whole / "plain" / "run.json").read_text())
    assert "dropout" not in said["config"]["model"]


def test_what_is_no_share_is_refused(folder, capsys):
    assert main(["train", *SMALL, "--data=text", "--model.dropout.residual=1"]) == 2
    assert "model.dropout.residual: found 1.0; give 0 or more, below 1" in capsys.readouterr().err
    assert main(["train", *SMALL, "--data=text", "--model.dropout=0.1"]) == 2
    assert "--model.dropout.FIELD" in capsys.readouterr().err
