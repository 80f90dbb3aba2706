"""The driver of the fuzz lane goes on where it was, also after a case that ended the process."""

import argparse
import json

import pytest


@pytest.fixture
def fuzz(script):
    return script("fuzz")


@pytest.fixture
def asked(tmp_path):
    return argparse.Namespace(seed=3, json=tmp_path / "fuzz.json")


def test_counts_and_findings_add_up_over_calls(fuzz, asked):
    known = fuzz._known(asked)
    assert (known["next"], known["counts"]) == (0, {})
    fuzz._count(known, "import", "refused")
    known["next"] = 1
    fuzz._write(asked, known)
    again = fuzz._known(asked)
    fuzz._count(again, "import", "refused")
    assert (again["next"], again["counts"]) == (1, {"import": {"refused": 2}})
    asked.seed = 4
    with pytest.raises(SystemExit, match="is of seed 3"):
        fuzz._known(asked)


def test_a_case_that_ended_the_process_is_a_finding(fuzz, asked):
    fuzz._write(asked, {**fuzz._known(asked), "next": 7})
    with fuzz._marked(asked, 7):
        left = asked.json.with_suffix(".now").read_text()
    assert json.loads(left) == 7 and not asked.json.with_suffix(".now").exists()
    asked.json.with_suffix(".now").write_text(left)
    known = fuzz._known(asked)
    assert (known["next"], known["counts"]) == (8, {"the process ended": {"wrong": 1}})
    assert known["findings"] == [{"seed": 3, "case": 7, "why": "the process ended"}]
