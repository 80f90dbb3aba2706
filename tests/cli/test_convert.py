"""`colossax import` and `export`: there and back, and what they refuse."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from colossax.checkpoint import RecordReader
from colossax.cli import main
from colossax.config import Plan, preset

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "llama"


def test_there_and_back_gives_the_same_tensors(tmp_path, capsys):
    checkpoint, folder = tmp_path / "checkpoint", tmp_path / "hf"
    assert main(["import", str(GOLDEN), str(checkpoint)]) == 0
    assert main(["export", str(checkpoint), str(folder), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"exported": str(checkpoint), "folder": str(folder), "step": 0}
    assert "imported" in err
    want, got = (load_file(f / "model.safetensors") for f in (GOLDEN, folder))
    assert want.keys() == got.keys()
    for name, tensor in want.items():
        assert (tensor == got[name]).all(), name


def test_a_plan_travels_with_the_checkpoint(tmp_path):
    options = ["--plan.preset", "zero3+megatron", "--plan.mesh", "fsdp=4,tensor=2"]
    assert main(["import", str(GOLDEN), str(tmp_path / "out"), *options]) == 0
    wanted = preset("zero3+megatron", mesh={"fsdp": 4, "tensor": 2})
    stored = RecordReader(tmp_path / "out").documents()["plan"]
    assert Plan.from_json(json.dumps(stored)) == wanted


def without_a_tensor(folder):
    (folder / "model.safetensors").unlink()


@pytest.mark.catches("shards-of-a-checkpoint")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["import", "nowhere", "out"], "nowhere"),
        (["export", "nowhere", "out"], "checkpoint directory 'nowhere' does not exist"),
        (["export", "nowhere", "out", "--plan.mesh", "fsdp=2"], "an export has no plan"),
        (
            ["export", "nowhere", "out", "--as-checkpoint", "--max-shard-gb", "5"],
            "--max-shard-gb: a checkpoint has no such files; leave the option out",
        ),
        (["import", "nowhere"], "OUT"),
        (["import", "nowhere", "out", "--plan.mehs", "fsdp=2"], "did you mean"),
        (["imprt", "a", "b"], "did you mean 'import'"),
    ],
)
def test_refusals_are_one_sentence_and_exit_2(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("colossax: ")
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_missing_leave_nothing_behind(tmp_path, capsys):
    folder = tmp_path / "hf"
    shutil.copytree(GOLDEN, folder)
    without_a_tensor(folder)
    assert main(["import", str(folder), str(tmp_path / "out")]) == 2
    assert "safetensors" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
