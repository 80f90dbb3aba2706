"""Notes whose names are written, as a run: its refusals, that it learns, that it goes on."""

import itertools

import numpy as np
import pytest

from colossax import Plan
from colossax.cli.generate import check_reads_text
from colossax.errors import InputError
from colossax.inference import open_checkpoint
from colossax.recipes import recipe
from colossax.tasks import MaskConfig, SpanConfig, task_of
from colossax.tasks.config import train_config_from_json, train_config_to_json
from colossax.tasks.sound.task import Rows
from tests.tasks.small_text import changed, check_resumed, ran, smaller

CONFIG = recipe("whisper_tones")
MESH = {"data": 2, "fsdp": 2, "tensor": 2}


def test_it_goes_through_json_and_back():
    assert train_config_from_json(train_config_to_json(CONFIG)) == CONFIG


def test_a_planner_needs_no_sound():
    task = task_of(CONFIG)
    assert (task.name, task.tokens) == ("whisper_tones", 64 * 8)
    assert {name: x.shape for name, x in task.shapes.items()} == {
        "frames": (64, 64, 80),
        **dict.fromkeys(("tokens", "targets", "weights"), (64, 8)),
    }
    assert task.flops == CONFIG.model.train_flops(32, 8) * 64
    assert task.introduction() == [
        "sound: notes played one after another, 12 names, 64 frames a row and 8 tokens written"
    ]
    assert task.baselines() == {"name_entropy": pytest.approx(np.log(12))}
    assert set(task.documents()) == {"model"}


@pytest.mark.catches("audio-is-no-identity")
def test_sound_is_part_of_which_run_it_is():
    assert task_of(CONFIG).identity()["data.audio"] == "tones"


def test_a_batch_is_a_function_of_its_number():
    rows = Rows.of(changed(CONFIG, "data", global_batch=4))
    all_of_them = list(itertools.islice(rows.batches(0), 5))
    for one, other in zip(itertools.islice(rows.batches(3), 2), all_of_them[3:], strict=True):
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])
    shapes = task_of(CONFIG).shapes
    assert {name: (x.shape[1:], x.dtype) for name, x in all_of_them[0].items()} == {
        name: (x.shape[1:], x.dtype) for name, x in shapes.items()
    }


@pytest.mark.catches("tones-held-out-by-seed")
def test_the_same_sounds_are_held_out_for_every_seed():
    first, other = (Rows.of(CONFIG.replace(seed=seed)) for seed in (0, 1))
    assert first.validation == other.validation != first.training != other.training
    assert len(list(first.held_out())) == CONFIG.data.validation_batches


def data(**fields):
    return changed(CONFIG, "data", **fields)


def model(**fields):
    return changed(CONFIG, "model", **fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: data(audio="tone"), "data.audio: unknown 'tone'; did you mean 'tones'"),
        (
            lambda: data(audio=None),
            "data.audio: the model's encoder reads sound, and the run is",
        ),
        (lambda: data(path="x"), "data.path: it is of something else, and the run is on sound"),
        (lambda: data(masking=MaskConfig()), "data.masking: it is of something else"),
        (lambda: data(spans=SpanConfig()), "data.spans: it is of something else"),
        (lambda: data(images="digits"), "data.images: it is of something else"),
        (lambda: data(seq_len=9), "data.seq_len: found 9 of 16, and a text of 'tones' has 8"),
        (lambda: model(max_seq=7), "data.seq_len: found 8 of 7, and a text of 'tones' has 8"),
        (lambda: model(max_source=31), "model.max_source: found 31, and .* give 32 or more"),
        (lambda: model(eos=11), "model.start: found 12, and 11 as model.eos; names of 'tones' are"),
        (lambda: model(eos=None), "model.start: found 12, and None as model.eos"),
        (
            lambda: CONFIG.replace(model=recipe("t5_stdlib").model),
            "data.audio: 'tones' is sound, notes played one after another, and the model reads",
        ),
        (
            lambda: CONFIG.replace(model=recipe("llama_tiny").model),
            "data.audio: 'tones' is sound, .* start from a recipe of sound, as whisper_tones",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        change()


def test_layouts_are_not_compared():
    from colossax.aot import parse_target
    from colossax.planner.deciding.candidates import compare_layouts

    with pytest.raises(InputError, match="--compare-layouts: whisper_tones reads sound, and what"):
        compare_layouts(CONFIG, parse_target("h100:1x2"))


@pytest.mark.catches("text-for-sound")
def test_prompts_of_text_are_refused():
    with pytest.raises(InputError, match="CHECKPOINT: the model's encoder reads sound"):
        check_reads_text(CONFIG.model)
    check_reads_text(recipe("t5_stdlib").model)
    check_reads_text(recipe("llama_tiny").model)


TINY = smaller(
    CONFIG,
    {
        "model": {"embed": 32, "mlp": 64, "decoder_mlp": 64, "layers": 1, "decoder_layers": 1},
        "data": {"global_batch": 16, "validation_batches": 2},
    },
)
"""`whisper_tones` with a tenth of the work."""

BAR = 0.25
"""Of ln 12, what a token costs that is one of twelve names by chance: the validation loss after 300
steps of 64 sounds. Set before the first run."""


@pytest.mark.sweep
@pytest.mark.slow
def test_a_run_reaches_its_bar_on_a_mixed_mesh(tmp_path, capfd):
    config = CONFIG.replace(steps=300, validate_every=0, checkpoint_every=0, plan=Plan(mesh=MESH))
    final = ran(config, tmp_path / "run")
    assert final["validation_loss"] < BAR * np.log(12)
    assert final["name_entropy"] == pytest.approx(np.log(12))
    said = capfd.readouterr().err
    assert "sound: notes played one after another, 12 names, 64 frames a row" in said
    assert "names by chance give 2.4849" in said
    check_it_writes(tmp_path / "run")


def check_it_writes(folder):
    """Of most sounds that are held out all names, in order, and no more."""
    generator = open_checkpoint(folder).load().generator(slots=16)
    rows, right, count = Rows.of(CONFIG).validation, 0, 20
    for number in range(count):
        told = generator.generate([12], frames=rows[number]["frames"], max_tokens=8).tokens
        right += list(told) == [*rows.notes(number).tolist(), 13]
    assert right > count / 2


MESHES = [MESH, {"fsdp": 4, "ring": 2}, {"data": 4, "ulysses": 2}]


@pytest.mark.sweep
@pytest.mark.slow
def test_resumed_on_other_meshes_it_hears_the_same_sounds(tmp_path):
    """Two steps on each mesh after another are six of a run that nobody touched."""
    check_resumed(TINY, MESHES, tmp_path)
