"""Digits with captions as a run: what it is made of, its refusals, and that it learns."""

import itertools

import numpy as np
import pytest

from colossax import Plan
from colossax.errors import InputError
from colossax.models import SigLIPConfig
from colossax.recipes import recipe
from colossax.tasks import image_task, task_of
from colossax.tasks.config import train_config_from_json, train_config_to_json
from colossax.tasks.image_sets import IMAGE_SETS
from colossax.tasks.image_text.captions import END, Captioned, encoded
from colossax.tasks.image_text.templates import TEMPLATES, longest_row
from tests.tasks.small_text import changed, check_resumed, ran, smaller
from tests.tasks.test_digits import MESH, drawn, split

CONFIG = recipe("clip_digits")
NAMES = IMAGE_SETS["digits"].names
CALLED = tuple(f"{NAMES[label % 10]} {label}" for label in range(100))
"""Of the drawn images, whose labels say which they are."""


def captioned(causal=True, **data):
    return Captioned(split=split(**data), names=CALLED, length=40, causal=causal)


def texts(batch):
    """Each row as it reads up to its end."""
    rows = [row[: row.tolist().index(END)] for row in batch["tokens"]]
    return [bytes(row.tolist()).decode() for row in rows]


def batches(pairs, start, count):
    return list(itertools.islice(pairs.batches(start), count))


def test_it_goes_through_json_and_back():
    assert train_config_from_json(train_config_to_json(CONFIG)) == CONFIG


@pytest.mark.catches("captions-of-others")
def test_each_image_has_a_caption_of_its_own_class():
    found = batches(captioned(), 0, 3)
    plain = list(itertools.islice(split().batches(0), 3))
    for one, other in zip(found, plain, strict=True):
        np.testing.assert_array_equal(one["pixels"], other["pixels"])
        for text, label in zip(texts(one), other["labels"], strict=True):
            assert text in [template.format(CALLED[label]) for template in TEMPLATES]
    said = [text for one in found for text in texts(one)]
    rests = [text.replace(CALLED[int(text.split()[-1])], "") for text in said if "," not in text]
    assert len(set(rests)) >= len(TEMPLATES) - 1, "templates take turns"


@pytest.mark.catches("captions-turn-anew")
def test_a_batch_is_a_function_of_its_number():
    """Of 8 rows, which 5 templates do not divide."""
    all_of_them = batches(captioned(), 0, 9)
    for start in (2, 7):
        for one, other in zip(batches(captioned(), start, 2), all_of_them[start:], strict=False):
            assert one.keys() == other.keys() == {"pixels", "tokens", "segments"}
            for name in one:
                np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.catches("text-behind-its-end")
def test_texts_end_once():
    """What fills up a row is no text to a causal encoder, and some to another."""
    rows = encoded(["a", "ring"], 6, causal=True)
    assert rows["tokens"].tolist() == [[97, *[END] * 5], [*b"ring", END, END]]
    assert rows["segments"].tolist() == [[0, 0, -1, -1, -1, -1], [0, 0, 0, 0, 0, -1]]
    assert (encoded(["a"], 6, causal=False)["segments"] == 0).all()


def test_classes_are_told_beside_what_is_held_out():
    pairs = Captioned(split=split(global_batch=16), names=NAMES, length=40, causal=True)
    found = list(pairs.validation())
    labels = np.concatenate([one["matches"] for one in found])
    assert labels[:25].tolist() == split().held_out.labels.tolist()
    assert (labels[25:] == -1).all()
    for one in found:
        assert texts(one)[:10] == [f"a photo of the digit {name}" for name in NAMES]
        assert (one["segments"][:10, 0] == 0).all() and (one["segments"][10:] == -1).all()
        assert one["tokens"].shape == (16, 40)


@pytest.mark.catches("flops-of-one-encoder")
def test_a_planner_needs_no_images():
    task = task_of(CONFIG)
    assert (task.name, task.tokens, task.counted) == ("clip_digits", 64, "images")
    assert {n: x.shape for n, x in task.shapes.items()} == {
        "pixels": (64, 8, 8, 1),
        "tokens": (64, 40),
        "segments": (64, 40),
    }
    model = CONFIG.model
    text, image = model.text_encoder(), model.image_encoder()
    both = text.train_flops_per_token(40) * 40 + image.train_flops_per_token(17) * 17
    assert task.flops == both * 64 > 0


@pytest.mark.catches("captions-are-no-identity")
def test_captions_are_part_of_which_run_it_is(monkeypatch):
    monkeypatch.setattr(image_task, "read_images", lambda name: drawn())
    first = task_of(CONFIG)
    assert first.introduction()[1] == (
        "captions of 5 forms; classes are told as 'a photo of the digit nine'"
    )
    named = "colossax.tasks.image_text.captions.TEMPLATES"
    told = first.identity()
    monkeypatch.setattr(named, ("{}",))
    other = task_of(CONFIG).identity()
    assert {name for name in told if told[name] != other[name]} == {"data.captions"}
    assert set(first.documents()) == {"model"}


SIGLIP = CONFIG.replace(
    recipe="siglip_digits",
    model=SigLIPConfig(
        vocab=264,
        max_seq=40,
        text=CONFIG.model.text,
        image=CONFIG.model.image,
        height=8,
        width=8,
        channels=1,
        patch_height=2,
        patch_width=2,
        init_std=0.2,
        shift=-2.0,
    ),
)


def data(**changes):
    return changed(CONFIG, "data", **changes)


def test_the_longest_caption_fits():
    assert longest_row(IMAGE_SETS["digits"]) == 34


@pytest.mark.catches("captions-too-long")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: data(images="digit"), "data.images: unknown 'digit'; did you mean 'digits'"),
        (lambda: data(images=None), "data.images: the model reads images, and the run is on text"),
        (lambda: data(seq_len=33), "data.seq_len: found 33, and captions .* have up to 34 tokens"),
        (lambda: data(seq_len=41), "data.seq_len: found 41, .* the model's rows 40; give a number"),
        (lambda: data(path="x"), "data.path: it is of text, and the run is on images, 'digits'"),
        (lambda: data(global_batch=8), "data.global_batch: found 8, .* the captions of 10 classes"),
        (lambda: changed(CONFIG, "model", vocab=256, eos=None), "model.vocab: found 256 with eos"),
        (lambda: changed(CONFIG, "model", eos=255), "captions of 'digits' are bytes that end in"),
        (lambda: changed(CONFIG, "model", channels=3), "model.channels: found 3, and images of"),
        (lambda: changed(CONFIG, "sample", prompt="a"), "sample.prompt: it is of text"),
    ],
)
def test_what_makes_no_sense_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        change()


TINY = {
    "model": {"projection": 16},
    "data": {"global_batch": 16, "validation_batches": 3},
}
BAR_ACCURACY = 0.9
"""Share of 359 held-out digits that captions tell after 200 steps of 64: guesses have 0.1."""


@pytest.mark.sweep
@pytest.mark.slow
def test_a_run_reaches_its_bar_on_a_mixed_mesh(tmp_path, capfd):
    config = CONFIG.replace(steps=200, validate_every=0, checkpoint_every=0, plan=Plan(mesh=MESH))
    final = ran(config, tmp_path / "run")
    assert final["validation_accuracy"] >= BAR_ACCURACY
    assert final["validation_loss"] < 0.2 * final["class_entropy"]
    said = capfd.readouterr().err
    assert "images: 1,438 of 8 x 8 x 1 in 10 classes, 359 held out" in said
    assert "of held-out images told right by captions" in said


@pytest.mark.sweep
@pytest.mark.slow
def test_pairs_told_right_or_wrong_learn_too(tmp_path):
    """As SigLIP does."""
    final = ran(SIGLIP.replace(steps=200, validate_every=0, checkpoint_every=0), tmp_path / "run")
    assert final["validation_accuracy"] >= 0.75


@pytest.mark.sweep
@pytest.mark.slow
def test_resumed_on_other_meshes_it_sees_the_same_pairs(tmp_path):
    """Two steps on each mesh after another are six of a run that nobody touched."""
    check_resumed(smaller(CONFIG, TINY), [MESH, {"fsdp": 4, "tensor": 2}, {"data": 8}], tmp_path)
