"""Overrides: every kind of value, every kind of mistake."""

import dataclasses
import re

import pytest

from colossax.cli.options.arguments import Parser, split_overrides
from colossax.cli.options.overrides import apply_overrides, override_names
from colossax.config import HOST_KINDS, PRESETS, OffloadConfig, Plan, preset
from colossax.errors import InputError, PlanError
from colossax.recipes import RECIPES, recipe


@pytest.fixture(scope="module")
def tiny():
    return recipe("llama_tiny")


@pytest.mark.parametrize(
    "name, text, read, value",
    [
        ("plan.mesh", "fsdp=4,tensor=2", lambda c: dict(c.plan.mesh), {"fsdp": 4, "tensor": 2}),
        ("plan.mesh", "data=-1", lambda c: dict(c.plan.mesh), {"data": -1}),
        ("plan.batch.accumulation", "4", lambda c: c.plan.batch.accumulation, 4),
        ("plan.loss.vocab_chunks", "8", lambda c: c.plan.loss.vocab_chunks, 8),
        ("plan.loss.vocab-chunks", "8", lambda c: c.plan.loss.vocab_chunks, 8),
        ("plan.remat", "full", lambda c: [s.remat for s in c.plan.segments], ["full"]),
        ("plan.segments.0.remat", "dots", lambda c: [s.remat for s in c.plan.segments], ["dots"]),
        ("plan.precision.compute", "bfloat16", lambda c: c.plan.precision.compute, "bfloat16"),
        ("plan.rules.params.embed", "none", lambda c: c.plan.rules.params["embed"], ((),)),
        (
            "plan.rules.params.embed",
            "data+fsdp,fsdp",
            lambda c: c.plan.rules.params["embed"],
            (("data", "fsdp"), ("fsdp",)),
        ),
        (
            "plan.compiler_options",
            "xla_a=true,xla_b=3",
            lambda c: dict(c.plan.compiler_options),
            {"xla_a": True, "xla_b": 3},
        ),
        ("plan.offload", "auto", lambda c: c.plan.offload.auto, True),
        (
            "plan.offload",
            "parameters=1,activations=0.5",
            lambda c: [getattr(c.plan.offload, kind) for kind in HOST_KINDS],
            [1.0, 0.0, 0.5],
        ),
        ("plan.offload.clipping", "two_pass", lambda c: c.plan.offload.clipping, "two_pass"),
        ("plan.segments.0.offload", "input", lambda c: c.plan.segments[0].offload, "input"),
        ("optimizer.peak_lr", "1e-2", lambda c: c.optimizer.peak_lr, 0.01),
        ("optimizer.schedule_steps", "none", lambda c: c.optimizer.schedule_steps, None),
        ("optimizer.schedule", "one_cycle", lambda c: c.optimizer.schedule, "one_cycle"),
        ("model.layers", "2", lambda c: c.model.layers, 2),
        ("data.skip_undecodable", "true", lambda c: c.data.skip_undecodable, True),
        ("data.path", "here.txt", lambda c: c.data.path, "here.txt"),
        ("clip_norm", "none", lambda c: c.clip_norm, None),
        ("plan.offload.cpu_update", "auto", lambda c: c.plan.offload.cpu_update, "auto"),
        ("plan.offload.cpu_update", "0.5", lambda c: c.plan.offload.cpu_update, 0.5),
        ("plan.offload.cpu_update", "1", lambda c: c.plan.offload.cpu_update, 1.0),
    ],
)
def test_a_value_is_read_by_its_type(tiny, name, text, read, value):
    assert read(apply_overrides(tiny, [(name, text)])) == value


@pytest.mark.parametrize(("text", "share"), [("auto", "auto"), ("0.5", 0.5), ("1", 1.0)])
def test_the_share_of_the_tokens_is_a_number_or_auto(tiny, text, share):
    settings = {"remat": "full", "offload": "mlp+input", "mlp_share": text}
    overrides = [(f"plan.segments.0.{name}", value) for name, value in settings.items()]
    assert apply_overrides(tiny, overrides).plan.segments[0].mlp_share == share


def test_segments_can_be_added(tiny):
    overrides = [("plan.segments.0.count", "3"), ("plan.segments.1.count", "1")]
    changed = apply_overrides(tiny, [*overrides, ("plan.segments.1.remat", "full")])
    assert [(s.count, s.remat) for s in changed.plan.segments] == [(3, "none"), (1, "full")]


def test_only_the_result_has_to_be_valid(tiny):
    """Neither of these can be made alone, in whatever order."""
    changed = apply_overrides(
        tiny, [("model.embed", "96"), ("model.heads", "6"), ("model.kv_heads", "3")]
    )
    assert (changed.model.heads, changed.model.kv_heads) == (6, 3)
    with pytest.raises(InputError, match="6 heads cannot share 4 kv heads"):
        apply_overrides(tiny, [("model.embed", "96"), ("model.heads", "6")])


@pytest.mark.catches("override-twice")
@pytest.mark.parametrize(
    "name, text, message",
    [
        ("plan.mash", "fsdp=2", "unknown override --plan.mash; did you mean '--plan.mesh'?"),
        ("plam.mesh", "fsdp=2", "unknown override --plam.mesh; did you mean '--plan'?"),
        ("optimizer.peek_lr", "1", "did you mean '--optimizer.peak_lr'?"),
        ("model.layer", "1", "did you mean '--model.layers'?"),
        ("steps.many", "1", "unknown override --steps.many; 'steps' has no fields of its own"),
        ("plan.batch", "4", "--plan.batch: has fields of its own; set one of them"),
        ("plan.preset", "zero4", "no preset is called 'zero4'; did you mean 'zero3'?"),
        ("plan.mesh", "fspd=4", "plan.mesh: no axis is called 'fspd'; did you mean 'fsdp'?"),
        ("plan.mesh", "fsdp", "--plan.mesh: found 'fsdp'; write it as name=value,name=value"),
        ("plan.mesh", "fsdp=x", "--plan.mesh fsdp: expected int, found 'x'; give a number"),
        ("plan.mesh", "fsdp=2,fsdp=4", "'fsdp' is given twice"),
        ("plan.segments.2.remat", "full", "items are numbered 0 to 1"),
        ("plan.remat", "ful", "unknown policy 'ful'; did you mean 'full'?"),
        ("plan.rules.param.embed", "fsdp", "did you mean 'params'?"),
        ("plan.rules.params", "fsdp", "name a dim too, as in --plan.rules.params.embed fsdp"),
        ("plan.batch.accumulation", "0", "batch.accumulation: found 0"),
        ("model.layers", "two", "--model.layers: expected int, found 'two'; give a number"),
        ("data.skip_undecodable", "maybe", "expected true or false, found 'maybe'"),
        ("data.seq_len", "9999", "data.seq_len: 9999 is above the model's 256"),
        ("model.rope_scaling", "8", "--model.rope_scaling: has fields of its own"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(tiny, name, text, message):
    with pytest.raises(InputError, match=re.escape(message)):
        apply_overrides(tiny, [(name, text)])


@pytest.mark.catches("preset-drops-precision")
@pytest.mark.parametrize("name", [*PRESETS, "zero3+megatron_sp"])
def test_a_preset_applies_first_and_keeps_what_it_does_not_decide(name):
    big = recipe("llama3_8b")
    changed = apply_overrides(big, [("plan.mesh", "fsdp=2,tensor=4"), ("plan.preset", name)]).plan
    expected = preset(name, mesh={"fsdp": 2, "tensor": 4})
    assert (changed.mesh, changed.rules) == (expected.mesh, expected.rules)
    assert (changed.precision, changed.segments) == (big.plan.precision, big.plan.segments)


@pytest.mark.catches("false-is-true")
@pytest.mark.parametrize("name", RECIPES)
def test_every_listed_name_can_be_set_to_the_value_it_has(name):
    config = recipe(name)
    for key, value in override_names(config):
        if isinstance(value, str | int | float) or value is None:
            text = str(value).lower() if value is None or isinstance(value, bool) else str(value)
            assert apply_overrides(config, [(key, text)]) == config, key


def test_overrides_are_told_from_options():
    words = ["--plan.mesh", "fsdp=4", "llama_tiny", "--steps", "3", "--plan.remat=full"]
    plain, overrides = split_overrides(words)
    assert plain == ["llama_tiny", "--steps", "3"]
    assert overrides == [("plan.mesh", "fsdp=4"), ("plan.remat", "full")]
    with pytest.raises(InputError, match="--plan.mesh: needs a value"):
        split_overrides(["--plan.mesh", "--steps"])


def test_a_misspelt_option_is_named():
    parser = Parser(prog="colossax train", description="")
    parser.add_argument("--steps", type=int)
    with pytest.raises(InputError, match="unknown option --stepz; did you mean '--steps'?"):
        parser.parse(["--stepz", "3"])
    with pytest.raises(InputError, match="argument --steps: invalid int value: 'x'; see colossax"):
        parser.parse(["--steps", "x"])


@pytest.mark.catches("overrides-one-by-one")
@pytest.mark.parametrize("turned", [False, True])
def test_settings_beside_a_text_are_judged_with_it(turned):
    """Neither goes with the plan as it was."""
    config = recipe("llama_tiny")
    config = config.replace(plan=Plan(offload=OffloadConfig(fused=True, clipping="two_pass")))
    pair = [
        ("plan.offload", "parameters=1,optimizer=1,disk=1"),
        ("plan.offload.clipping", "stack"),
    ]
    found = apply_overrides(config, pair[::-1] if turned else pair).plan.offload
    assert (found.disk, found.clipping) == (1.0, "stack")
    with pytest.raises(PlanError, match="'auto' finds the shares, and some are given"):
        apply_overrides(config, [("plan.offload", "auto"), ("plan.offload.parameters", "1")])


@pytest.mark.catches("init-judged-with-the-recipe")
@pytest.mark.parametrize("turned", [False, True])
def test_a_checkpoint_is_judged_with_what_is_said_beside_it(monkeypatch, tiny, turned):
    """Its model reads less than the recipe's rows have."""
    short = dataclasses.replace(tiny.model, max_seq=tiny.data.seq_len // 2)
    monkeypatch.setattr("colossax.tasks.initial_model", lambda path: short)
    monkeypatch.setattr("colossax.tasks.initial_adapter", lambda path: None)
    pair = [("init", "there"), ("data.seq_len", "32"), ("model.rope_theta", "500")]
    found = apply_overrides(tiny, pair[::-1] if turned else pair)
    assert (found.init, found.data.seq_len) == ("there", 32)
    assert found.model == dataclasses.replace(short, rope_theta=500.0)
    with pytest.raises(InputError, match="data.seq_len: 96 is above the model's 48; shorten"):
        apply_overrides(tiny, [("init", "there")])
