"""`colossax plan --serve`, and `--plan` of `generate` and `serve`."""

import argparse
import functools
import json
import types

import jax
import pytest

from colossax.aot import parse_target
from colossax.cli import main
from colossax.cli.serving.plans import plan_asked
from colossax.config import Plan
from colossax.errors import InputError
from colossax.models import LlamaConfig, maker
from colossax.planner import auto
from colossax.planner.serving import plan_serving
from tests.cli.test_draft import BASE
from tests.launching import write_text

ASKED = ["plan", "llama_tiny", "--serve", "--target", "h100:1x8", "--no-compile"]


@pytest.mark.catches("a-serving-plan-has-no-seats")
def test_a_serving_plan_is_told_and_written(tmp_path, capsys):
    out = tmp_path / "plan.json"
    words = ["--seats", "16", "--context", "64", "--top", "2", "--out", str(out)]
    assert main([*ASKED, *words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["target"] == "h100:1x8"
    assert len(facts["plans"]) == 2
    rates = [one["tokens_per_second"] for one in facts["plans"]]
    assert rates == sorted(rates, reverse=True)
    for one in facts["plans"]:
        plan = Plan.from_json(one["plan"])
        replicas = plan.mesh.get("data", 1)
        assert one["seats"] == 16 == replicas * one["seats_of_each"]
        assert one["tokens_per_second"] == pytest.approx(16 / one["latency_s"])
        assert one["serve"] == ["--seats", str(16 // replicas), "--slots", "64"]
        assert one["fits"] and not one["verified"]
        assert one["device_bytes"]["total"] == pytest.approx(sum(one["predicted_bytes"].values()))
    assert Plan.from_json(out.read_text("utf-8")) == Plan.from_json(facts["plans"][0]["plan"])
    assert main([*ASKED, *words]) == 0
    said = capsys.readouterr().out
    assert "llama_tiny on h100:1x8: " in said
    assert "16 requests at once" in said and "of up to 64 tokens" in said
    assert f"serve with --plan {out} --seats {facts['plans'][0]['seats_of_each']}" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plot", "x.png"], "--plot: is of plans for training; leave it out beside --serve"),
        (["--host-gb", "9"], "--host-gb: is of plans for training"),
        (["--disk-gb", "9"], "--disk-gb: is of plans for training"),
        (["--rates", "x.json"], "--rates: is of plans for training"),
        (["--allow", "state=bfloat16"], "--allow: is of plans for training"),
        (["--weights", "kept"], "--weights kept: are those of a folder that was imported"),
        (["--weights", "int9"], "weights: found 'int9'; give own, int8"),
        (["--cache", "int9"], "--cache: found 'int9'; give own, int8 or fp8"),
        (["--context", "100000"], "--context: found 100000, and the model's longest sequence is"),
        (["--adapter.rank", "4"], "a task, an adapter or a drafter, and a whole model"),
        (["--plan.offload", "parameters=1"], "host memory is not searched for serving yet"),
        (
            ["--out", "/nowhere/plan.json"],
            "/nowhere/plan.json: there is no folder /nowhere; make it first",
        ),
    ],
)
def test_what_no_server_has_is_refused(words, said, capsys):
    assert main([*ASKED, *words]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert said in last


def test_options_of_serving_are_refused_beside_training(capsys):
    assert main(["plan", "llama_tiny", "--target", "h100:1x8", "--seats", "4"]) == 2
    assert "--seats: is of plans for serving; add --serve" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.catches("a-mesh-by-hand-is-not-served")
def test_what_is_found_generates_the_same_tokens(tmp_path, monkeypatch, capsys):
    """By a plan in a file, and by one that is found for GPUs that are only said to be there."""
    assert len(jax.devices()) == 8  # before --devices asks for fewer
    monkeypatch.setenv("COLOSSAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    text = f"--data={write_text(tmp_path / 'text')}"
    assert main(["train", *BASE, text, "--model.init_std=0.4", "--out=mine"]) == 0
    asks = ["generate", "mine", "--prompt=the day that was", "--max-tokens=12", "--json"]

    def said(*words):
        capsys.readouterr()
        assert main([*asks, *words]) == 0
        found = capsys.readouterr()
        return json.loads(found.out)["tokens"], found.err

    alone, _ = said("--plan.mesh", "data=8")
    words = ["plan", "--config", "mine/run.json", *ASKED[2:], "--seats", "1", "--out", "plan.json"]
    assert main([*words, "--pin", "tensor=2", "--plan.precision.compute", "float32"]) == 0
    assert Plan.from_json((tmp_path / "plan.json").read_text("utf-8")).mesh["tensor"] == 2
    assert said("--plan", "plan.json")[0] == alone
    # Without GPUs there is nothing to find.
    assert main([*asks, "--plan", "auto"]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert "--plan auto: there are 8 cpu devices, for which nothing can be compiled ahead" in told
    monkeypatch.setattr(auto, "target_here", lambda _: parse_target("h100:1x8"))
    monkeypatch.setattr(auto, "plan_serving", functools.partial(plan_serving, verify=False))
    tokens, told = said("--plan", "auto")
    assert tokens == alone
    assert "plan auto, h100:1x8: " in told and "1 request at a time" in told
    tokens, told = said("--plan", "auto", "--plan.mesh", "fsdp=4,tensor=2")
    assert tokens == alone
    assert "fsdp over 4, tensor over 2; 1 request at a time" in told
    for more, problem in {
        "--plan.preset=zero3": "--plan auto finds mesh and rules, and --plan.preset gives them",
        "--draft=ngrams": "--plan auto: what --draft needs is not counted yet",
    }.items():
        assert main([*asks, "--plan", "auto", more]) == 2
        assert problem in capsys.readouterr().err


@pytest.fixture
def stored():
    """What is known of a checkpoint."""
    config = LlamaConfig(vocab=64, embed=64, layers=2, heads=8, kv_heads=8, mlp=128, max_seq=256)
    return types.SimpleNamespace(plan=Plan(), make_model=maker(config), embeds=False)


@pytest.mark.catches("a-plan-of-a-file-is-not-read")
def test_a_plan_of_a_file_is_taken_and_values_are_put_over_it(stored, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(Plan(mesh={"tensor": 8}).to_json(), "utf-8")
    given = [("plan.precision.params", "bfloat16")]
    plan = plan_asked(argparse.Namespace(plan=str(path)), given, stored)
    assert plan.mesh == {"tensor": 8}
    assert plan.precision.params == "bfloat16"
    assert plan_asked(argparse.Namespace(plan=None), [], stored) == stored.plan


@pytest.mark.catches("a-servers-seats-are-shared")
def test_seats_are_those_of_each_replica_of_a_server(stored, monkeypatch, capsys):
    """As `--seats` of a server are."""
    monkeypatch.setattr(auto, "target_here", lambda _: parse_target("h100:1x8"))
    monkeypatch.setattr(auto, "plan_serving", functools.partial(plan_serving, verify=False))
    args = argparse.Namespace(plan="auto", devices=None, weights="own")
    plan = plan_asked(args, [], stored, seats=3, of_each=True, context=64)
    assert plan.mesh == {"data": 8}  # a small model is whole on each device
    told = capsys.readouterr().err
    assert "24 requests at once, 3 of each replica, of up to 64 tokens" in told
    stored.embeds = True
    with pytest.raises(InputError, match="the model tells embeddings, for which no plans"):
        plan_asked(args, [], stored)
