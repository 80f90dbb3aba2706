"""More by leave: what changes values is searched where it is allowed, and told."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import colossax
from colossax.aot import parse_target
from colossax.cli import main
from colossax.config import Plan
from colossax.errors import InputError, PlanError
from colossax.planner.searching import Subject, asked_of, plan_run, planned
from colossax.recipes import recipe

NODE = parse_target("h100:1x8")
PINS = ("fsdp=8",)


def wide():
    """A run whose plan sums gradients in float32, though it multiplies in bfloat16."""
    config = recipe("llama_tiny")
    precision = dataclasses.replace(config.plan.precision, compute="bfloat16", reduction="float32")
    return config.replace(plan=config.plan.replace(precision=precision))


def found(config, *allow, **given):
    asked = asked_of(PINS, [], allow)
    subject = Subject.of(config)
    return plan_run(subject, config.plan, NODE, asked=asked, verify=False, top=8, **given)


@pytest.mark.catches("what-is-allowed-is-not-searched")
def test_what_is_allowed_is_searched_beside_the_plan_s_own():
    config = wide()
    own = found(config).plans
    answer = found(config, "reduction=bfloat16")
    first = answer.plans[0]
    assert first.by_leave == ("--plan.precision.reduction bfloat16",)
    assert first.plan.precision.reduction == "bfloat16"
    assert first.seconds.total < own[0].seconds.total
    without = [one for one in answer.plans if not one.by_leave]
    assert [one.plan for one in without] == [one.plan for one in own][: len(without)]
    assert without[0].plan.precision.reduction == "float32"
    assert "% slower" in without[0].why_not_first
    assert first.why_not_first == ""
    assert Plan.from_json(json.dumps(first.to_json()["plan"])) == first.plan
    assert all(not one.by_leave for one in own)


@pytest.mark.catches("moments-that-are-allowed-weigh-as-before")
def test_moments_that_are_allowed_need_less():
    config = recipe("llama_tiny")
    answer = found(config, "state=mixed,state=bfloat16")
    sizes = {
        one.by_leave: one.candidate.predicted.bytes.states
        for one in answer.plans
        if one.candidate.words == "zero3"
    }
    states = sizes[()]
    assert sizes[("--optimizer.state bfloat16",)] == pytest.approx(states * 8 / 12, rel=0.01)
    assert sizes[("--optimizer.state mixed",)] == pytest.approx(states * 10 / 12, rel=0.01)
    # What alone does not fit may do so by leave.
    least = 1.03 * answer.plans[0].total_bytes / 1e9
    tight = found(config, "state=bfloat16", device_gb=least)
    assert tight.plans[0].by_leave


def test_what_is_so_anyway_takes_no_leave():
    config = wide()
    precision = dataclasses.replace(config.plan.precision, reduction="bfloat16")
    config = config.replace(plan=config.plan.replace(precision=precision))
    answer = found(config, "reduction=bfloat16")
    assert all(not one.by_leave for one in answer.plans)
    assert answer.scored == found(config).scored


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("state", "--allow: found 'state'; write it NAME=VALUE, as state=bfloat16"),
        ("stat=bfloat16", "'stat' is nothing that can be allowed; did you mean 'state'"),
        ("state=float64", "--allow state: found 'float64'.*; give mixed or bfloat16 or 8bit"),
        ("reduction=8bit", "--allow reduction: found '8bit'; give bfloat16"),
    ],
)
def test_what_cannot_be_allowed_is_refused(text, said):
    with pytest.raises(InputError, match=said):
        asked_of([], [], [text])


def test_a_state_that_the_optimizer_has_not_is_refused():
    config = recipe("llama_tiny")
    config = config.replace(optimizer=dataclasses.replace(config.optimizer, name="lion"))
    with pytest.raises(InputError, match="state"):
        found(config, "state=mixed")


def test_where_nothing_fits_it_is_refused_as_without(monkeypatch):
    monkeypatch.setattr(planned, "smallest_target", lambda *_, **__: None)
    with pytest.raises(PlanError, match="plan: nothing that is searched fits"):
        found(recipe("llama_tiny"), "state=bfloat16", device_gb=0.0001)


class Table(nnx.Module):
    def __init__(self, rngs):
        self.words = nnx.Embed(64, 16, rngs=rngs)

    def __call__(self, words):
        return self.words(words)


def loss(model, batch):
    each = jnp.square(model(batch["words"]))
    return {"size": (jnp.sum(each), jnp.float32(each.size), 1.0)}, {}


def test_an_optimizer_of_one_s_own_keeps_its_state():
    given = {"words": jax.ShapeDtypeStruct((8, 4), jnp.int32)}
    with pytest.raises(InputError, match="this task has one of its own making; make that with"):
        colossax.plan(
            Table, loss, optax.adam(1e-3), given, NODE, allow=["state=bfloat16"], verify=False
        )
    with pytest.raises(InputError, match="plan: allow is the text 'state=bfloat16'; give several"):
        colossax.plan(Table, loss, optax.adam(1e-3), given, NODE, allow="state=bfloat16")


@pytest.mark.catches("leave-is-not-told")
def test_the_command_says_what_it_takes(capsys, tmp_path):
    path = tmp_path / "plan.json"
    words = ["plan", "llama_tiny", "--target", "h100:1x8", "--no-compile", "--pin", "fsdp=8"]
    words += ["--allow", "state=bfloat16", "--out", str(path)]
    assert main(words) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith("; by leave: --optimizer.state bfloat16")
    assert said[-1] == f"written to {path}; train with --plan {path} --optimizer.state bfloat16"
    assert main(words[:-2]) == 0
    assert "--plan plan.json --optimizer.state bfloat16 there" in capsys.readouterr().out
