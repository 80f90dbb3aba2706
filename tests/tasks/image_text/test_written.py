"""Digits whose captions a decoder writes, as a run: its rows, its refusals, and that it learns."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from colossax import Plan
from colossax.errors import InputError
from colossax.inference import open_checkpoint
from colossax.recipes import recipe
from colossax.tasks import image_task, task_of
from colossax.tasks.config import train_config_from_json, train_config_to_json
from colossax.tasks.image_sets import IMAGE_SETS
from colossax.tasks.image_text.templates import END
from colossax.tasks.image_text.written import Written, written
from tests.tasks.small_text import changed, check_resumed, ran, smaller
from tests.tasks.test_digits import MESH, drawn, split

CONFIG = recipe("llava_digits")
PLACES, VOCAB, SEQ = 16, 264, 48
CAPTIONS = tuple(f"{'x' * (label % 5)}{label}" for label in range(100))
"""Of the drawn images, whose labels say which they are."""


def rows(**data):
    one = split(**data)
    return Written(split=one, captions=CAPTIONS, places=PLACES, vocab=VOCAB, length=SEQ)


def test_it_goes_through_json_and_back():
    assert train_config_from_json(train_config_to_json(CONFIG)) == CONFIG


@pytest.mark.catches("written-one-late")
@pytest.mark.catches("places-are-told")
def test_an_image_stands_before_its_caption():
    """What is told of each token is the next one, and of places but the last one nothing."""
    found, plain = (next(one.batches(3)) for one in (rows(), split()))
    np.testing.assert_array_equal(found["pixels"][:, 0], plain["pixels"])
    for row, label in enumerate(plain["labels"]):
        spelt = [*CAPTIONS[label].encode(), END]
        counted = np.flatnonzero(found["weights"][row])
        assert counted.tolist() == list(range(PLACES - 1, PLACES - 1 + len(spelt)))
        assert found["targets"][row, counted].tolist() == spelt
        assert found["tokens"][row, :PLACES].tolist() == list(range(VOCAB, VOCAB + PLACES))
        assert found["tokens"][row, counted[1:]].tolist() == spelt[:-1]


def test_a_batch_is_a_function_of_its_number():
    all_of_them = list(itertools.islice(rows().batches(0), 9))
    for start in (2, 7):
        for one, other in zip(rows().batches(start), all_of_them[start:], strict=False):
            assert one.keys() == other.keys() == {"pixels", "tokens", "targets", "weights"}
            for name in one:
                np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.catches("rows-of-no-label-are-told")
def test_what_fills_a_batch_up_counts_for_nothing():
    found = list(rows(global_batch=16).validation())
    counted = [bool(row.any()) for one in found for row in one["weights"]]
    assert counted == [True] * 25 + [False] * 7
    lengths = [len(CAPTIONS[label]) + 1 for label in split().held_out.labels]
    assert rows().mean_written == np.mean(lengths)


@pytest.mark.catches("flops-without-the-encoder-of-images")
def test_a_planner_needs_no_images():
    task = task_of(CONFIG)
    assert (task.name, task.tokens, task.counted) == ("llava_digits", 64 * SEQ, "tokens")
    assert {n: x.shape for n, x in task.shapes.items()} == {
        "pixels": (64, 1, 8, 8, 1),
        "tokens": (64, SEQ),
        "targets": (64, SEQ),
        "weights": (64, SEQ),
    }
    text, image = CONFIG.model.decoder(), CONFIG.model.image_encoder()
    maps = 6 * PLACES * 64 * (64 + 64)
    both = text.train_flops_per_token(SEQ) * SEQ + image.train_flops_per_token(17) * 17
    assert task.flops == (both + maps) * 64


def test_captions_are_part_of_which_run_it_is(monkeypatch):
    monkeypatch.setattr(image_task, "read_images", lambda name: drawn())
    monkeypatch.setattr(
        "colossax.tasks.image_text.written.IMAGE_SETS",
        {"digits": type("Set", (), {"names": CAPTIONS, "height": 8, "width": 8, "channels": 1})},
    )
    first = task_of(CONFIG)
    assert first.introduction()[1].startswith("of each 'a photo of the digit xxxx99' or another")
    told = first.identity()
    monkeypatch.setattr("colossax.tasks.image_text.written.TEMPLATES", ("{}",))
    other = task_of(CONFIG).identity()
    assert {name for name in told if told[name] != other[name]} == {"data.captions"}
    assert set(first.documents()) == {"model"}


def data(**changes):
    return changed(CONFIG, "data", **changes)


def words(**changes):
    text = dataclasses.replace(CONFIG.model.text, **changes)
    return changed(CONFIG, "model", text=text)


@pytest.mark.catches("rows-too-short-for-captions")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: data(images=None), "data.images: the model reads images, and the run is on text"),
        (lambda: data(seq_len=41), "data.seq_len: found 41, and an image .* have up to 42 tokens"),
        (lambda: data(seq_len=65), "data.seq_len: found 65, .* the model's rows 64; give a number"),
        (lambda: data(path="x"), "data.path: it is of text, and the run is on images, 'digits'"),
        (lambda: words(vocab=256, eos=None), "model.image_token: found 257, which is none"),
        (lambda: words(eos=255), "captions of 'digits' are bytes that end in 256"),
        (lambda: changed(CONFIG, "model", channels=3), "model.channels: found 3, and images of"),
        (lambda: changed(CONFIG, "sample", prompt="a"), "sample.prompt: it is of text"),
    ],
)
def test_what_makes_no_sense_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        change()


TINY = {"data": {"global_batch": 16, "validation_batches": 3}}
BAR = 0.9
"""Share of 359 held-out digits whose captions are right to the last byte after 300 steps of 64."""


@pytest.mark.sweep
@pytest.mark.slow
def test_a_run_reaches_its_bar_on_a_mixed_mesh(tmp_path, capfd):
    config = CONFIG.replace(steps=300, validate_every=0, checkpoint_every=0, plan=Plan(mesh=MESH))
    final = ran(config, tmp_path / "run")
    assert final["validation_loss"] < 0.2 * final["caption_entropy"]
    assert "classes alone give" in capfd.readouterr().err
    held_out = written(config).split.held_out
    loaded = open_checkpoint(tmp_path / "run").load(devices=jax.devices()[:1])
    spec, right = loaded.spec, 0
    told = jax.jit(lambda params, **rows: spec.merge(params)(**rows).argmax(-1))
    for batch in written(config).validation():
        given = {name: batch[name] for name in ("tokens", "pixels")}
        hits = (np.asarray(told(loaded.params, **given)) == batch["targets"]) | (
            batch["weights"] == 0
        )
        right += int((hits.all(1) & batch["weights"].any(1)).sum())
    assert right >= BAR * len(held_out) and len(held_out) == 359
    # What is right token by token is what the plain greedy continuation is.
    generator, places = loaded.generator(slots=SEQ), list(range(VOCAB, VOCAB + PLACES))
    names = IMAGE_SETS["digits"].names
    said = [
        generator.generate(places, images=pixels[None], max_tokens=32)
        for pixels in held_out.pixels[:40]
    ]
    texts = [bytes(one.tokens[:-1]).decode(errors="replace") for one in said]
    wanted = [f"a photo of the digit {names[label]}" for label in held_out.labels[:40]]
    assert sum(map(str.__eq__, texts, wanted)) >= 0.85 * 40


@pytest.mark.sweep
@pytest.mark.slow
def test_resumed_on_other_meshes_it_sees_the_same_rows(tmp_path):
    """Two steps on each mesh after another are six of a run that nobody touched."""
    check_resumed(smaller(CONFIG, TINY), [MESH, {"fsdp": 4, "ring": 2}, {"data": 8}], tmp_path)
