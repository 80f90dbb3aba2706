"""Handwritten digits as a run: what it is made of, its refusals, and that it learns."""

import itertools
import sys
import types

import numpy as np
import pytest

from colossax import Plan
from colossax.errors import InputError
from colossax.models import BERTConfig
from colossax.nn import HeadConfig
from colossax.recipes import recipe
from colossax.tasks import MaskConfig, image_task, images, task_of
from colossax.tasks.config import train_config_from_json, train_config_to_json
from colossax.tasks.images import NO_LABEL, Images, SplitImages
from tests.tasks.small_text import changed, check_resumed, ran, smaller

CONFIG = recipe("vit_digits")
MESH = {"data": 2, "fsdp": 2, "tensor": 2}
COUNT = 100


def drawn(count=COUNT):
    """Images of nothing, whose label says which they are."""
    draw = np.random.default_rng(0)
    pixels = draw.random((count, 8, 8, 1)).astype(np.float32)
    return Images(pixels=pixels, labels=np.arange(count, dtype=np.int32))


def split(seed=0, **data):
    given = {"global_batch": 8, "validation_fraction": 0.25, "validation_batches": 100, **data}
    return SplitImages.of(drawn(), changed(CONFIG, "data", **given).data, seed)


def batches(split_images, start, count):
    return list(itertools.islice(split_images.batches(start), count))


def test_it_goes_through_json_and_back():
    assert train_config_from_json(train_config_to_json(CONFIG)) == CONFIG


@pytest.mark.catches("images-held-out-by-seed")
def test_the_same_images_are_held_out_for_every_seed():
    first, other = split(0), split(1)
    assert (len(first.training), len(first.held_out)) == (75, 25)
    assert first.held_out.fingerprint == other.held_out.fingerprint
    both = np.concatenate([first.training.labels, first.held_out.labels])
    assert sorted(both) == list(range(COUNT))
    assert first.held_out.labels.tolist() != list(range(25)), "they are drawn"


@pytest.mark.catches("images-in-one-order")
def test_an_epoch_has_each_image_once_in_an_order_of_its_own():
    """Of 75 images in batches of 8; an epoch may end inside a batch."""
    labels = np.concatenate([one["labels"] for one in batches(split(), 0, 20)])
    first, second = labels[:75], labels[75:150]
    assert sorted(first) == sorted(second) == sorted(split().training.labels)
    assert first.tolist() != second.tolist()
    assert (
        first.tolist()
        != np.concatenate([one["labels"] for one in batches(split(1), 0, 10)])[:75].tolist()
    )


def test_a_batch_is_a_function_of_its_number():
    """And pixels stay with their labels."""
    all_of_them = batches(split(), 0, 20)
    for start in (3, 9, 13):
        for one, other in zip(batches(split(), start, 4), all_of_them[start:], strict=False):
            np.testing.assert_array_equal(one["labels"], other["labels"])
            np.testing.assert_array_equal(one["pixels"], drawn().pixels[one["labels"]])


@pytest.mark.catches("images-told-twice")
def test_each_held_out_image_is_told_once():
    found = list(split().validation())
    assert [len(one["labels"]) for one in found] == [8, 8, 8, 8]
    labels = np.concatenate([one["labels"] for one in found])
    assert labels[:25].tolist() == split().held_out.labels.tolist()
    assert (labels[25:] == NO_LABEL).all()
    assert len(list(split(validation_batches=2).validation())) == 2


def test_a_planner_needs_no_images():
    task = task_of(CONFIG)
    assert (task.name, task.tokens, task.counted) == ("vit_digits", 64, "images")
    assert {n: x.shape for n, x in task.shapes.items()} == {
        "pixels": (64, 8, 8, 1),
        "labels": (64,),
    }
    assert task.flops == CONFIG.model.decoder().train_flops_per_token(17) * 17 * 64


@pytest.mark.catches("images-are-no-identity")
def test_which_images_are_part_of_which_run_it_is(monkeypatch):
    monkeypatch.setattr(image_task, "read_images", lambda name: drawn())
    first = task_of(CONFIG)
    assert first.introduction() == ["images: 80 of 8 x 8 x 1 in 80 classes, 20 held out"]
    assert first.baselines() == {"class_entropy": pytest.approx(np.log(80))}
    monkeypatch.setattr(image_task, "read_images", lambda name: drawn(99))
    assert first.identity()["data.images"] != task_of(CONFIG).identity()["data.images"]
    assert set(first.documents()) == {"model"}
    averaged = task_of(changed(CONFIG, "optimizer", ema=0.9))
    assert averaged.introduction()[1:] == ["validation is of averages of the parameters"]


def text(**data):
    return changed(CONFIG, "data", **data)


@pytest.mark.catches("image-sizes-unchecked")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: text(images="digit"), "data.images: unknown 'digit'; did you mean 'digits'"),
        (lambda: text(images=None), "data.images: the model reads images, and the run is on text"),
        (
            lambda: text(seq_len=16),
            "data.seq_len: found 16, and an image is 16 patches and a class",
        ),
        (lambda: text(path="x"), "data.path: it is of text, and the run is on images, 'digits'"),
        (lambda: text(tokenizer_vocab=9), "data.tokenizer_vocab: it is of text"),
        (lambda: text(masking=MaskConfig()), "data.masking: it is of text"),
        (lambda: text(packing="whole"), "data.packing: it is of text"),
        (lambda: changed(CONFIG, "sample", prompt="a"), "sample.prompt: it is of text"),
        (lambda: CONFIG.replace(z_loss=0.1), "z_loss: it is of text"),
        (
            lambda: changed(CONFIG, "adapter", rank=2),
            "adapter.rank: found 2, and a run on images trains its whole model; leave it out",
        ),
        (
            lambda: changed(CONFIG, "model", channels=3),
            "model.channels: found 3, and images of 'digits' have 1; give that",
        ),
        (
            lambda: changed(CONFIG, "model", height=16),
            "model.height: found 16, and images of 'digits' have 8",
        ),
        (
            lambda: changed(CONFIG, "model", patch_width=3),
            "model.patch_width: patches of 3 pixels do not divide the image's width of 8; give one",
        ),
        (lambda: changed(CONFIG, "model", head=None), "model.head: 'digits' has 10 classes, and"),
        (
            lambda: changed(CONFIG, "model", head=HeadConfig(outputs=9, pool="first")),
            "model.head: 'digits' has 10 classes, and the model tells none or fewer; give head, as",
        ),
        (
            lambda: CONFIG.replace(model=BERTConfig(vocab=8, embed=8, layers=1, heads=2, mlp=8)),
            "data.images: 'digits' is 1,797 handwritten digits, .*, and the model reads tokens",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        change()


def test_layouts_are_not_compared():
    from colossax.aot import parse_target
    from colossax.planner.deciding.candidates import compare_layouts

    with pytest.raises(InputError, match="--compare-layouts: vit_digits reads images, and what"):
        compare_layouts(CONFIG, parse_target("h100:1x2"))


def test_what_ships_them_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InputError, match=r"data.images: .* pip install 'colossax\[vision\]'"):
        images.read_images("digits")


def test_pixels_are_from_0_to_1(monkeypatch):
    given = types.SimpleNamespace(images=np.full((3, 8, 8), 16.0), target=np.array([1, 2, 3]))
    module = types.SimpleNamespace(load_digits=lambda: given)
    monkeypatch.setitem(sys.modules, "sklearn", types.SimpleNamespace(datasets=module))
    monkeypatch.setitem(sys.modules, "sklearn.datasets", module)
    found = images.read_images("digits")
    assert found.pixels.shape == (3, 8, 8, 1) and (found.pixels == 1).all()
    assert (found.pixels.dtype, found.labels.dtype) == (np.float32, np.int32)


TINY = smaller(
    CONFIG,
    {
        "model": {"embed": 32, "layers": 2, "mlp": 64},
        "data": {"global_batch": 16, "validation_batches": 3},
    },
)
"""`vit_digits` with a tenth of the work."""

BAR_ACCURACY = 0.9
"""Share of 359 held-out digits that is told right after 200 steps of 64: guesses have 0.1."""


@pytest.mark.sweep
@pytest.mark.slow
def test_a_run_reaches_its_bar_on_a_mixed_mesh(tmp_path, capfd):
    config = CONFIG.replace(steps=200, validate_every=0, checkpoint_every=0, plan=Plan(mesh=MESH))
    final = ran(config, tmp_path / "run")
    assert final["validation_accuracy"] >= BAR_ACCURACY
    assert final["validation_loss"] < 0.2 * final["class_entropy"]
    said = capfd.readouterr().err
    assert "images: 1,438 of 8 x 8 x 1 in 10 classes, 359 held out" in said
    assert "steps 1 to 200 of 64 images into" in said and "images/s" in said


@pytest.mark.sweep
@pytest.mark.slow
def test_resumed_on_other_meshes_it_sees_the_same_images(tmp_path):
    """Two steps on each mesh after another are six of a run that nobody touched."""
    meshes = [MESH, {"fsdp": 4, "tensor": 2}, {"stage": 2, "fsdp": 2, "data": 2}]
    check_resumed(TINY, meshes, tmp_path)


@pytest.mark.sweep
def test_a_run_without_the_extra_ends_before_it_trains(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InputError, match="scikit-learn"):
        ran(TINY.replace(steps=1), tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()
