"""Two encoders, of texts and of images, train on every mesh as on one device."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax import Plan
from colossax.aot import collectives
from colossax.config import BatchConfig, OffloadConfig, PipelineConfig, Precision
from colossax.errors import InputError, PlanError
from colossax.models import CLIPConfig, SigLIPConfig, maker
from colossax.nn import DualEncoder, EncoderPart
from colossax.optim import adamw
from colossax.planner import build_step
from colossax.sharding import activation_sharding, use
from colossax.tasks import image_text_loss
from tests.cases import quick_first
from tests.oracle import assert_losses_close
from tests.step.test_decoder_parts import PLANS, mesh

ROWS, LENGTH, VOCAB, END = 8, 16, 64, 50
PART = {"layers": 2, "heads": 4, "mlp": 64, "norm_eps": 1e-5}
SIZES = {
    "vocab": VOCAB,
    "max_seq": LENGTH,
    **dict.fromkeys(("height", "width"), 8),
    **dict.fromkeys(("patch_height", "patch_width"), 2),
    "channels": 2,
    "init_std": 0.2,
}
"""16 patches, which devices share, and of CLIP a class token: 17, so each has whole images."""

MODELS = {
    "siglip": (
        "sigmoid",
        SigLIPConfig(
            text=EncoderPart(embed=48, activation="gelu_tanh", **PART),
            image=EncoderPart(embed=32, activation="gelu_tanh", **PART),
            log_scale=1.0,
            shift=-1.0,
            **SIZES,
        ),
    ),
    "clip": (
        "softmax",
        CLIPConfig(
            text=EncoderPart(embed=48, activation="quick_gelu", **PART),
            image=EncoderPart(embed=32, activation="quick_gelu", **PART),
            projection=24,
            log_scale=1.0,
            eos=END,
            **SIZES,
        ),
    ),
}


def given(seed=0):
    """Images, and texts that end at different places, the rest of their rows being others."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(0, END, (ROWS, LENGTH)).astype(np.int32)
    tokens[np.arange(ROWS), 3 + np.arange(ROWS)] = END
    return {
        "pixels": draw.standard_normal((ROWS, 8, 8, 2)).astype(np.float32),
        "tokens": tokens,
    }


def built(plan, model, devices=None, **options):
    form, config = MODELS[model]
    loss = image_text_loss(form=form)
    devices = jax.devices()[:devices]
    return build_step(maker(config), adamw(3e-3, eps=1e-3), loss, plan, devices=devices, **options)


def run(plan, model, devices=None):
    """Losses, gradient norms and right guesses of three steps."""
    step = built(plan, model, devices)
    state, found = step.init(0), []
    for _ in range(3):
        state, metrics = step(state, given())
        found.append([float(metrics[name]) for name in ("loss", "grad_norm", "accuracy")])
    return np.asarray(found)


@functools.cache
def truth(model):
    return run(Plan(mesh={"data": 1}), model, 1)


CUTS = {"stages": (2, 2), "stages, ring": (3, 1)}
"""Of plans that name none, for two stacks of layers can be cut anywhere."""


def whole(name, plan):
    """The plan with one microbatch, which every stage gets as a whole then."""
    if name not in CUTS and "stage" not in plan.mesh:
        return plan
    cuts = CUTS.get(name, plan.pipeline.cuts)
    return plan.replace(pipeline=PipelineConfig(microbatches=1, cuts=cuts))


ALL = {"data": mesh(data=8), "data, fsdp, tensor": mesh(data=2, fsdp=2, tensor=2), **PLANS}
ALL = {name: whole(name, plan) for name, plan in ALL.items() if plan.batch.accumulation == 1}
CASES = [(name, model) for model in MODELS for name in ALL]
QUICK = [("data, ring, tensor", "siglip"), ("fsdp, tensor", "clip")]


@pytest.mark.parametrize(("name", "model"), quick_first(CASES, QUICK))
def test_every_plan_trains_as_one_device(name, model):
    assert_losses_close(run(ALL[name], model), truth(model))


ODD = {
    "ulysses": (mesh(ulysses=2), 2),
    "stages, ring": (whole("stages, ring", mesh(stage=2, ring=2)), 4),
}


@pytest.mark.catches("odd-images-share-rows")
@pytest.mark.catches("rows-of-layers-run-elsewhere")
@pytest.mark.parametrize("name", quick_first(ODD, ["ulysses"]))
def test_images_whose_tokens_devices_do_not_divide_are_whole(name):
    """Layers of a stage are traced where nothing says that they are of whole images."""
    plan, devices = ODD[name]
    assert_losses_close(run(plan, "clip", devices), truth("clip"))


@pytest.mark.sweep
@pytest.mark.parametrize("share", ["parameters", "activations"])
def test_so_they_are_with_layers_in_host_memory(share):
    offload = OffloadConfig(**{share: 1.0})
    plan = mesh(data=2, ring=2, tensor=2).replace(offload=offload)
    assert_losses_close(run(plan, "clip"), truth("clip"))


def test_texts_whose_tokens_devices_do_not_divide_are_refused():
    step = built(mesh(ring=2, data=4), "clip")
    odd = given()
    odd["tokens"] = odd["tokens"][:, :15]
    message = "'tokens': dim 'seq' has size 15, which mesh axis 'ring' of 2 devices does not divide"
    with pytest.raises(PlanError, match=message):
        step(step.init(0), odd)


@pytest.mark.catches("rows-compared-in-parts")
@pytest.mark.parametrize(
    "plan",
    [
        mesh(data=2).replace(batch=BatchConfig(accumulation=2)),
        mesh(data=2).replace(batch=BatchConfig(microbatch=2)),
        mesh(data=2).replace(batch=BatchConfig(microbatch=2, reduce_once=True)),
        mesh(stage=2).replace(pipeline=PipelineConfig(cuts=(2, 2))),
    ],
    ids=["accumulation", "microbatch", "reduce once", "stages"],
)
def test_a_batch_that_is_cut_up_is_refused(plan):
    """Each part's texts would be negatives of its own images alone."""
    step = built(plan, "siglip", plan.bind(jax.devices()[:2]).mesh.size)
    with pytest.raises(InputError, match="loss: it compares each row of a batch with all others"):
        step(step.init(0), given())


@pytest.mark.sweep
def test_with_one_microbatch_gradients_may_be_reduced_once():
    plan = mesh(data=2).replace(batch=BatchConfig(reduce_once=True))
    assert_losses_close(run(plan, "siglip", 2), truth("siglip"))


HALVES = [("bfloat16", "bfloat16"), ("float16", "float32")]


@pytest.mark.catches("scale-in-16-bits")
@pytest.mark.parametrize("compute, params", HALVES)
def test_what_scores_are_multiplied_by_stays_in_float32(compute, params):
    precision = Precision(compute=compute, params=params)
    step = built(mesh(fsdp=4, tensor=2).replace(precision=precision), "siglip")
    found = step.abstract["params"]
    assert {found[name].dtype.name for name in ("log_scale", "shift")} == {"float32"}
    assert found["text"]["embed"]["table"].dtype.name == params


@pytest.mark.sweep
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("compute, params", HALVES)
def test_in_16_bits_losses_are_near(compute, params, model):
    precision = Precision(compute=compute, params=params)
    found = run(mesh(fsdp=4, tensor=2).replace(precision=precision), model)
    np.testing.assert_allclose(found[:, :2], truth(model)[:, :2], rtol=0.01)


@pytest.mark.catches("rows-compared-with-copies")
def test_rows_that_fill_up_what_is_evaluated_are_refused():
    step = built(mesh(data=8), "siglip")
    state = step.init(0)
    whole = step.evaluate(state, given())
    assert float(whole["contrastive"][1]) == ROWS
    with pytest.raises(InputError, match="the 3 rows that fill the batch up to a multiple of 8"):
        step.evaluate(state, {name: x[:5] for name, x in given().items()})


def test_two_files_on_disk_are_refused(tmp_path):
    plan = mesh(data=1).replace(offload=OffloadConfig(optimizer=1.0, disk=1.0))
    with pytest.raises(PlanError, match="plan.offload.disk: the layers of .* and a file holds one"):
        built(plan, "clip", 1, disk=tmp_path)


@pytest.mark.catches("texts-not-gathered-once")
def test_texts_are_gathered_once_and_nothing_else_is():
    """Of scores of all pairs and of their gradients; the rest are sums of a number of each text."""
    bound = mesh(data=2, fsdp=4).bind(jax.devices())
    rows, width = 64, 256
    shapes = [
        jax.ShapeDtypeStruct(
            (rows, width),
            jnp.float32,
            sharding=activation_sharding(bound, ("batch", None), (rows, width), name="x"),
        )
    ] * 2
    given = {"tokens": jnp.zeros((rows, 2), jnp.int32), "pixels": jnp.zeros((rows, 1, 1, 1))}

    def value(texts, images):
        model = types.SimpleNamespace(log_scale=jnp.float32(1), shift=None)
        model.embeddings = lambda tokens, **_: (texts, images)
        model.scores = functools.partial(DualEncoder.scores, model)
        terms, _ = image_text_loss()(model, given)
        return terms["contrastive"][0]

    with use(bound):
        program = jax.jit(jax.value_and_grad(value, argnums=(0, 1))).lower(*shapes).compile()
    found = collectives(program.as_text(), bound.mesh)
    gathers = [one for one in found if one.kind == "all-gather"]
    assert [(one.axes, one.count, one.bytes) for one in gathers] == [
        (("data", "fsdp"), 1, rows * width * 4)
    ]
    sums = sorted(one.bytes for one in found if one.kind != "all-gather")
    assert sums[-1] == rows * width * 4, "gradients of the texts' embeddings"
    assert all(size <= 2 * rows * 4 for size in sums[:-1])
