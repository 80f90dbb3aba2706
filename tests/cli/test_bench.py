"""`colossax bench` on a CPU."""

import json

import pytest

from colossax.cli import main


def test_kernels_are_measured_and_written(tmp_path, capsys):
    path = tmp_path / "kernels.json"
    words = ["bench", "kernels", "--only", "8 x 64, 2 of 64, causal", "--out", str(path)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "limits of this run: matmul" in printed
    found = json.loads(path.read_text())
    assert [row["kernel"] for row in found["rows"]] == ["attention forward", "attention backward"]
    assert all(row["right"] and row["us"] > 0 for row in found["rows"])
    for row in found["rows"]:
        assert f"{row['us']:.4g}" in printed


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["kernels", "--only", "no such"], "--only 'no such': no case of that name"),
        (["kernels", "--out", "/nowhere/x.json"], "there is no folder /nowhere"),
        (["kernels", "--plan.mesh", "fsdp=2"], "has no recipe and no plan"),
        (["engines"], "invalid choice: 'engines'"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(words, sentence, capsys):
    assert main(["bench", *words]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
