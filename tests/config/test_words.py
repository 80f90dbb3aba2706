"""Suggestions in refusals: by letters, and by what other libraries call a thing."""

import pytest

from colossax.cli.options.arguments import Parser
from colossax.cli.options.overrides import apply_overrides
from colossax.cli.train import add_arguments
from colossax.config import MESH_AXES, PRESETS, nearest
from colossax.config.words import ELSEWHERE
from colossax.errors import InputError
from colossax.recipes import DEFAULT_RECIPE, recipe

AXES = {"dp": "data", "tp": "tensor", "pp": "stage", "cp": "ring", "ep": "expert", "sp": "tensor"}
BY_PRESET = {"fsdp": "zero3", "dp": "ddp", "tp": "megatron", "sp": "megatron_sp", "cp": "ring"}
OPTIONS = {
    "--lr": "--optimizer.peak_lr",
    "--learning-rate": "--optimizer.peak_lr",
    "--batch_size": "--data.global_batch",
    "--max-grad-norm": "--clip-norm",
    "--epochs": "--steps",
    "--mesh": "--plan.mesh",
    "--stesp": "--steps",
    "--plan.mseh": "--plan.mesh",
}
OVERRIDES = {
    "optimizer.lr": "--optimizer.peak_lr",
    "data.batch_size": "--data.global_batch",
    "plan.batch.grad_accum": "--plan.batch.accumulation",
    "optimizer.waght_decay": "--optimizer.weight_decay",
}


@pytest.fixture(scope="module")
def parser():
    made = Parser(prog="colossax train", description="")
    add_arguments(made, "train")
    return made


@pytest.mark.catches("words-of-others")
@pytest.mark.parametrize("choices, asked", [(MESH_AXES, AXES), (PRESETS, BY_PRESET)])
def test_axes_and_presets_go_by_their_other_names(choices, asked):
    found = {word: nearest(word, choices) for word in asked}
    assert found == {word: f"; did you mean '{name}'?" for word, name in asked.items()}


@pytest.mark.catches("suggested-options-cut")
@pytest.mark.parametrize("option, meant", OPTIONS.items())
def test_options_go_by_their_other_names(parser, option, meant):
    with pytest.raises(InputError, match=f"unknown option {option}; did you mean '{meant}'"):
        parser.parse([option, "1"])


@pytest.mark.parametrize("name, meant", OVERRIDES.items())
def test_overrides_go_by_their_other_names(name, meant):
    with pytest.raises(InputError, match=f"unknown override --{name}; did you mean '{meant}'"):
        apply_overrides(recipe(DEFAULT_RECIPE), [(name, "1")])


def test_what_no_name_is_like_gets_the_list():
    assert nearest("tp", ["x", "w"]) == "; known: w, x"


def test_every_name_that_others_words_lead_to_is_there(parser):
    dotted = parser.format_help()
    fields = {"ddp", "zero2", "zero3", "megatron", "megatron_sp", "usp", *MESH_AXES, "segments"}
    for word, names in ELSEWHERE.items():
        assert any(name in fields or f"--{name}" in dotted for name in names), word
