"""What `--help` says of a recipe's values."""

import pytest

from colossax.cli import main
from colossax.cli.options.overrides import override_names
from colossax.cli.options.values import described_values, shown
from colossax.config import PRESETS
from colossax.config.axes import MESH_AXES
from colossax.recipes import RECIPES, recipe


@pytest.fixture
def shown_help(capsys):
    """What `colossax train` says of itself, as one line."""

    def ask(*words):
        with pytest.raises(SystemExit):
            main(["train", *words, "--help"])
        return " ".join(capsys.readouterr().out.split())

    return ask


@pytest.mark.catches("help-of-another-recipe")
def test_help_has_the_recipe_s_own_values(shown_help):
    tiny, large = shown_help("llama_tiny"), shown_help("llama3_8b")
    for text, name in ((tiny, "llama_tiny"), (large, "llama3_8b")):
        config = recipe(name)
        assert f"--optimizer.peak_lr VALUE default {config.optimizer.peak_lr}" in text
        assert f"optimizer steps in all (1 or more); default {config.steps}" in text
    assert "validations; 0: at the end alone (0 or more); default 0 --keep" in tiny
    assert "Added to the root of that. (a number above 0)" in tiny


def test_help_has_choices(shown_help):
    text = shown_help("llama_tiny")
    for choices in (PRESETS, MESH_AXES, ("cosine", "linear", "wsd", "constant")):
        assert ", ".join(choices) in text
    assert "How split matmuls communicate. (auto, compiler, gather, cannon, overlap)" in text


@pytest.mark.catches("value-without-meaning")
@pytest.mark.parametrize("name", RECIPES)
def test_every_value_has_a_meaning(name):
    config = recipe(name)
    text = described_values(config).splitlines()
    bare = [
        line
        for line, after in zip(text, [*text[1:], ""], strict=True)
        if line.startswith("  --")
        and "ROLE" not in line
        and not after.startswith("      ")
        or line.startswith("  --")
        and after.startswith("      (")
    ]
    assert not bare
    listed = sum(line.startswith("  --") for line in text)
    assert listed > 0.8 * len(list(override_names(config)))


@pytest.mark.parametrize(
    "value, text",
    [(None, "none"), (1, "1"), (1.0, "1.0"), (True, "true"), ("def ", "'def '"), ({}, "empty")],
)
def test_a_value_is_shown_as_it_is_written(value, text):
    assert shown(value) == text
