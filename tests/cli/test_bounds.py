"""Numbers that cannot be meant, refused alike wherever they come from."""

import dataclasses
import functools
import json
import re
import typing
from collections.abc import Mapping

import pytest

from colossax.config import Plan, bound_of, check_types
from colossax.config.bounds import field_hints, split_hint
from colossax.errors import InputError
from colossax.models import FAMILIES
from colossax.models.conversions import CONVERSIONS
from colossax.nn import DecoderConfig, Llama3Scaling, RopeConfig
from colossax.recipes import recipe, recipe_from_file
from colossax.run import RunConfig
from colossax.step.options import StepOptions
from colossax.tasks import DataConfig, OptimizerConfig, SampleConfig, TrainConfig
from tests.cli.test_own_recipes import colossax, configured

SIZE = ("0", "-1", "2147483648")
FRACTION = ("nan", "-0.1", "1.5")
NOT_NEGATIVE = ("nan", "inf", "-inf", "-0.1", "1e39")
POSITIVE = (*NOT_NEGATIVE, "0", "1e-300")

TABLE = {
    "optimizer.peak_lr": NOT_NEGATIVE,
    "optimizer.warmup": ("-1", "2147483648"),
    "optimizer.weight_decay": NOT_NEGATIVE,
    "optimizer.b1": (*FRACTION, "1"),
    "optimizer.b2": (*FRACTION, "1"),
    "optimizer.b3": (*FRACTION, "1"),
    "optimizer.momentum": (*FRACTION, "1"),
    "optimizer.eps": POSITIVE,
    "optimizer.schedule_steps": SIZE,
    "optimizer.final_lr_share": FRACTION,
    "optimizer.power": POSITIVE,
    "clip_norm": POSITIVE,
    "z_loss": NOT_NEGATIVE,
    "steps": SIZE,
    "seed": ("-1", "9223372036854775808"),
    "keep": SIZE,
    "checkpoint_every": ("-1", "2147483648"),
    "validate_every": ("-1", "2147483648"),
    "stop_after_skipped": ("-1", "2147483648"),
    "data.seq_len": (*SIZE, "257"),
    "data.global_batch": SIZE,
    "data.tokenizer_vocab": SIZE,
    "data.validation_fraction": (*FRACTION, "0", "1"),
    "data.validation_batches": SIZE,
    "sample.max_tokens": SIZE,
    "sample.temperature": NOT_NEGATIVE,
    "model.vocab": SIZE,
    "model.embed": (*SIZE, "129"),
    "model.layers": (*SIZE, "1000000000"),
    "model.heads": SIZE,
    "model.kv_heads": (*SIZE, "3"),
    "model.head_dim": (*SIZE, "3"),
    "model.mlp": SIZE,
    "model.max_seq": SIZE,
    "model.norm_eps": NOT_NEGATIVE,
    "model.init_std": NOT_NEGATIVE,
    "model.rope_theta": POSITIVE,
    "model.eos": ("-1", "512", "2147483648"),
    "plan.batch.accumulation": SIZE,
    "plan.batch.microbatch": SIZE,
    "plan.loss.vocab_chunks": SIZE,
    "plan.offload.parameters": FRACTION,
    "plan.offload.disk": FRACTION,
    "plan.offload.device_gb": POSITIVE,
}
"""Fields of a configuration, and numbers as they are written that each of them refuses."""

OWN_RULES = {(Plan, "version")}
"""Numbers whose class itself says what may be; segments are in a tuple."""

SETTINGS = {entry.ours: entry.foreign[0] for entry in CONVERSIONS["llama"].settings} | {
    "eos": "eos_token_id",
    "rope_theta": "rope_theta",
}
"""Fields of a model as config.json calls them."""


def number(text):
    return int(text) if re.fullmatch(r"-?\d+", text) else float(text)


def typed(name, text):
    """The number in the type of the field, as a recipe in Python would have it."""
    *path, last = name.split(".")
    owner = functools.reduce(getattr, path, recipe("llama_tiny"))
    hint = field_hints(type(owner))[last]
    kinds = [split_hint(part)[0] for part in (hint, *typing.get_args(hint))]
    return float(text) if float in kinds else number(text)


def replaced(config, path, value):
    below = value if len(path) == 1 else replaced(getattr(config, path[0]), path[1:], value)
    return dataclasses.replace(config, **{path[0]: below})


def nested(path, value):
    return value if not path else {path[0]: nested(path[1:], value)}


def by_constructor(name, text, _folder):
    replaced(recipe("llama_tiny"), name.split("."), typed(name, text))


def by_file(name, text, folder):
    file = folder / "mine.json"
    changes = nested(name.split("."), number(text))
    file.write_text(json.dumps({"recipe": "llama_tiny", **changes}))
    recipe_from_file(str(file))


def by_command_line(name, text, _folder):
    option = name if "." in name else name.replace("_", "-")
    configured("llama_tiny", f"--{option}={text}")


def by_import(name, text, _folder):
    llama = CONVERSIONS["llama"]
    settings = llama.settings_of(recipe("llama_tiny").model)
    settings.pop("rope_parameters")
    llama.config_from({**settings, SETTINGS[name.split(".")[1]]: number(text)})


DOORS = {"constructor": by_constructor, "file": by_file, "command line": by_command_line}


def refused(door, name, texts, folder):
    """What a door says of each number, one sentence that names the field and a remedy."""
    for text in texts:
        with pytest.raises(InputError) as problem:
            door(name, text, folder)
        said = str(problem.value)
        assert re.search(r"(give|choose|shorten)\b", said), said
        assert "\n" not in said and len(said) < 300, said
        yield said


@pytest.mark.catches("bounds-int32")
@pytest.mark.catches("bounds-float32")
@pytest.mark.catches("bounds-nan")
@pytest.mark.catches("bounds-not-checked")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", TABLE)
def test_a_number_that_cannot_be_meant(door, name, tmp_path):
    for said in refused(DOORS[door], name, TABLE[name], tmp_path):
        assert name.split(".")[-1] in said


@pytest.mark.catches("import-bounds")
@pytest.mark.parametrize("name", [name for name in TABLE if name.startswith("model.")])
def test_a_number_of_an_import(name, tmp_path):
    foreign = SETTINGS[name.split(".")[1]]
    for said in refused(by_import, name, TABLE[name], tmp_path):
        assert said.startswith("config.json: ")
        assert foreign in said or "model" in said


@pytest.mark.catches("eos-beyond")
def test_a_token_that_ends_documents_is_of_the_vocabulary():
    config = recipe("llama_tiny").model
    assert dataclasses.replace(config, eos=511).eos == 511
    with pytest.raises(InputError, match="model.eos: found 512.* give 0 to 511, or none"):
        dataclasses.replace(config, eos=512)


def numbers_of(cls):
    """Fields of a dataclass that are numbers, of its values where they may be None."""
    for field, hint in field_hints(cls).items():
        kinds = {split_hint(part)[0] for part in (hint, *typing.get_args(hint))}
        if kinds & {int, float} and not kinds & {str, bool} and not issubclass_mapping(hint):
            yield field


def issubclass_mapping(hint):
    origin = typing.get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Mapping)


@pytest.mark.parametrize(
    "cls",
    [
        *(type(getattr(Plan(), part)) for part in ("batch", "loss")),
        *(family.config for family in FAMILIES.values()),
        *(DataConfig, DecoderConfig, Llama3Scaling, OptimizerConfig, RopeConfig, RunConfig),
        *(SampleConfig, StepOptions, TrainConfig),
    ],
)
def test_every_number_has_a_bound(cls):
    assert [name for name in numbers_of(cls) if bound_of(cls, name) is None] == []


def test_a_warm_up_longer_than_the_run_ends_in_it():
    config = configured("llama_tiny", "--steps=3", "--optimizer.warmup=10")
    assert (config.steps, config.optimizer.warmup) == (3, 10)


def test_the_command_line_ends_with_2_and_one_line(tmp_path):
    out = tmp_path / "run"
    words = ("llama_tiny", f"--out={out}", "--optimizer.peak_lr=nan")
    assert colossax("train", *words) == (
        2,
        "",
        "colossax: optimizer.peak_lr: found nan, which is not finite; give 0 or more\n",
    )
    code, _, said = colossax("generate", str(tmp_path), "--prompt=a", "--temperature=nan")
    assert (code, "--temperature: found nan, which is not finite" in said) == (2, True)
    assert not out.exists()


@pytest.mark.catches("bounds-not-checked")
def test_a_step_is_held_to_the_same_bounds():
    for bad in (float("nan"), 0.0, -1.0):
        with pytest.raises(InputError, match="clip_norm: found .*give a number above 0"):
            StepOptions(clip_norm=bad)


def test_a_configuration_of_one_s_own():
    """Bounds beside the fields of any dataclass."""
    from colossax.config import above, within

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Mine:
        share: typing.Annotated[float, within(0, 1)] = 0.5
        sizes: Mapping[str, typing.Annotated[int, above(2)]] = dataclasses.field(
            default_factory=dict
        )

        def __post_init__(self):
            check_types(self, "mine")

    assert Mine(share=1.0, sizes={"a": 3}).share == 1.0
    with pytest.raises(InputError, match=r"^mine.share: found 1.5; give 0 to 1$"):
        Mine(share=1.5)
    with pytest.raises(InputError, match="mine.sizes of 'a': found 2; give a number above 2"):
        Mine(sizes={"a": 2})
