"""Recipes: sizes as published, and names that help."""

import jax
import pytest

from colossax.errors import InputError
from colossax.models import maker
from colossax.nn import describe
from colossax.recipes import DEFAULT_RECIPE, RECIPES, recipe
from colossax.sharding import use, validate
from colossax.tasks.optimizer import make_schedule

PUBLISHED = {
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "gpt2_124m": 124_439_808,
    "qwen3_0p6b": 596_049_920,
    "mistral_7b": 7_241_732_096,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_30b_a3b": 30_532_122_624,
}
"""Parameter counts of the published checkpoints."""


@pytest.mark.catches("recipe-precision")
@pytest.mark.catches("llama-kv-heads")
@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_those_published(name, devices):
    config = recipe(name)
    bound = config.plan.bind(devices)
    with use(bound):
        spec = describe(maker(config.model))
    assert spec.parameter_count() == PUBLISHED[name]
    validate(bound, spec.infos)
    assert config.plan.precision.compute == "bfloat16"
    assert config.plan.precision.params == "float32"


def test_the_default_has_about_ten_million_parameters():
    spec = describe(maker(recipe(DEFAULT_RECIPE).model))
    assert 9e6 < spec.parameter_count() < 11e6


def test_llama_tiny_is_as_documented():
    config = recipe("llama_tiny")
    model, data = config.model, config.data
    assert (model.layers, model.embed, model.heads, model.kv_heads) == (4, 128, 8, 4)
    assert (model.mlp, model.vocab) == (384, 512)
    assert (data.seq_len, data.global_batch, data.path) == (96, 24, None)
    assert config.plan.precision.compute == "float32"


@pytest.mark.catches("recipe-name")
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_knows_its_name_and_reaches_its_final_rate(name):
    config = recipe(name)
    assert config.recipe == name
    rate = make_schedule(config.optimizer, config.schedule_steps)
    with jax.default_device("cpu"):
        peak, end = float(rate(config.optimizer.warmup)), float(rate(config.steps))
    assert peak == pytest.approx(config.optimizer.peak_lr)
    assert end == pytest.approx(config.optimizer.peak_lr * config.optimizer.final_lr_share)


@pytest.mark.catches("recipe-nearest")
def test_a_misspelt_recipe_is_named():
    with pytest.raises(
        InputError, match="no recipe is called 'lama_tiny'; did you mean 'llama_tiny'"
    ):
        recipe("lama_tiny")
