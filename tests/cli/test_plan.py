"""`colossax plan`, and plans from files."""

import json

import pytest

from colossax.cli import main
from colossax.cli.options.arguments import Parser, split_overrides
from colossax.cli.train import add_arguments, configure
from colossax.config import Plan, Segment
from colossax.recipes import recipe


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A plan in a file, and what was said."""
    folder = tmp_path_factory.mktemp("plan")
    return folder / "plan.json", folder / "plan.png"


def asked(planned, *words):
    out, plot = map(str, planned)
    given = ["plan", "llama_tiny", "--target", "h100:1x8", "--no-compile", "--out", out]
    return main([*given, "--plot", plot, *words])


def test_a_plan_is_told_written_and_drawn(planned, capsys):
    assert asked(planned, "--json") == 0
    said = capsys.readouterr()
    facts = json.loads(said.out.splitlines()[-1])
    assert facts["target"] == "h100:1x8"
    plans = facts["plans"]
    assert len(plans) == 3
    seconds = [one["seconds"] for one in plans]
    assert seconds == sorted(seconds)
    assert plans[0]["why_not_first"] == ""
    for one in plans[1:]:
        assert "% slower" in one["why_not_first"]
    for one in plans:
        assert one["fits"]
        assert not one["verified"]
        assert one["device_bytes"]["total"] > 0
        plan = Plan.from_json(json.dumps(one["plan"]))
        assert Plan.from_json(one["plan"]) == plan
        assert plan.mesh_sizes(8)
    out, plot = planned
    assert Plan.from_json(out.read_text("utf-8")) == Plan.from_json(plans[0]["plan"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "plans on 8 x" in said.err


@pytest.mark.catches("settings-that-do-not-hold-are-not-told")
def test_a_mesh_that_does_not_hold_is_told(planned, capsys):
    assert asked(planned, "--plan.mesh", "fsdp=8", "--pin", "data=8") == 0
    said = capsys.readouterr()
    assert "--plan.mesh: is what is searched, and does not hold; --pin says what" in said.err
    assert said.out.startswith("llama_tiny on h100:1x8: data over 8")


@pytest.mark.catches("files-are-refused-at-the-end")
@pytest.mark.parametrize("verb", ["plan", "plan --serve", "inspect"])
def test_files_that_cannot_be_written_are_refused_at_once(verb, tmp_path, monkeypatch, capsys):
    """Before anything is read or compiled, which takes minutes."""
    for room in ("cli.plan", "cli.inspect", "aot"):
        monkeypatch.setattr(f"colossax.{room}.parse_target", None)
    asks = f"{verb} llama_tiny --target h100:1x8".split()
    option = "--hlo" if verb == "inspect" else "--out"
    for path, said in (
        (tmp_path, f"{option} {tmp_path}: is a folder; name a file in it"),
        (tmp_path / "no" / "x", f"x: there is no folder {tmp_path / 'no'}; make it first"),
    ):
        assert main([*asks, option, str(path)]) == 2
        assert said in capsys.readouterr().err.splitlines()[-1]


def test_people_read_the_best_in_words(planned, capsys):
    assert asked(planned, "--pin", "tensor=2", "--forbid", "ring", "--forbid", "ulysses") == 0
    said = capsys.readouterr().out
    assert "llama_tiny on h100:1x8: " in said.splitlines()[0]
    assert "tensor over 2" in said.splitlines()[0]
    assert "of each device at a time" in said.splitlines()[0]
    assert "by formula, not compiled" in said
    assert f"written to {planned[0]}; train with --plan {planned[0]}" in said


@pytest.mark.catches("disk-gb-is-lost")
def test_a_file_is_asked_for_beside_host_memory(planned, capsys):
    assert asked(planned, "--disk-gb", "5") == 2
    said = capsys.readouterr().err
    assert "--disk-gb: found 5 without --host-gb" in said
    assert "give --host-gb too" in said
    assert "Traceback" not in said


@pytest.mark.catches("values-lose-to-the-file")
def test_a_run_takes_the_plan_of_a_file_and_values_over_it(tmp_path):
    path = tmp_path / "mine.json"
    plan = recipe("llama_tiny").plan.replace(mesh={"data": 2, "fsdp": 4}, segments=(Segment(),))
    path.write_text(plan.to_json(), "utf-8")
    words = ["llama_tiny", "--plan.remat", "full", "--plan", str(path), "--steps", "2"]
    parser = Parser(prog="colossax train", description="")
    add_arguments(parser, "train")
    plain, overrides = split_overrides(words)
    config = configure(parser.parse(plain), overrides)
    assert config.plan == plan.replace(segments=(Segment(remat="full"),))
    assert config.data == recipe("llama_tiny").data


@pytest.mark.parametrize("text", ["{", "[]", '{"mesh": 3}', '{"mash": {"fsdp": 8}}'])
def test_a_file_that_holds_no_plan_is_refused(tmp_path, capsys, text):
    path = tmp_path / "not.json"
    path.write_text(text, "utf-8")
    assert main(["inspect", "llama_tiny", "--target", "h100:1x8", "--plan", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "plan" in said
