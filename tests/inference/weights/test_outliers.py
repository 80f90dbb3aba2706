"""Inputs that are far larger than others: found by reading text, kept as they are beside int8."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.cli import main
from colossax.config import Plan
from colossax.errors import InputError
from colossax.inference import Outliers, find_outliers
from colossax.models import LlamaConfig, maker
from colossax.nn import describe
from colossax.nn.quantised.codes import Packing, quantised
from colossax.nn.quantised.scaled import ScaledWeight
from colossax.scheduling import EngineRequest
from colossax.sharding import linear, use
from tests.fresh import fresh_params
from tests.inference.weights.made import logits, written

pytestmark = pytest.mark.slow

CONFIG = LlamaConfig(vocab=64, embed=64, layers=2, heads=4, kv_heads=2, mlp=128, max_seq=32)
FEATURES = [3, 17, 40]
"""Of what norms give, so many times as large as others; matrices make up for it."""
TIMES = 200
READS = ("attn/q/w", "attn/k/w", "attn/v/w", "mlp/gate/w", "mlp/up/w")
TOKENS = np.random.default_rng(3).integers(0, 64, (4, 16)).astype(np.int32)


def planted(info, x):
    """Another parameter of the same function."""
    if info.path.endswith(("attn_norm/scale", "mlp_norm/scale")):
        return x.at[:, jnp.array(FEATURES)].multiply(TIMES)
    if info.path.endswith(READS):
        return x.at[:, jnp.array(FEATURES)].divide(TIMES)
    return x


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model as it is drawn, and one with outliers."""
    where, bound = tmp_path_factory.mktemp("models"), Plan().bind(jax.devices()[:1])
    with use(bound):
        spec = describe(maker(CONFIG))
    params = fresh_params(CONFIG, spec, bound, jax.random.key(5))
    odd = jax.tree.map(planted, spec.infos, params)
    return written(where / "drawn", CONFIG, spec, params), written(where / "odd", CONFIG, spec, odd)


def loaded(stored, plan=None, **how):
    plan = plan or Plan()
    return stored.load(plan, jax.devices()[: math.prod(plan.mesh.values())], **how)


@pytest.fixture(scope="module")
def found(models):
    return find_outliers(loaded(models[1]), [TOKENS[:2], TOKENS[2:]], count=4)


def error(stored, **how):
    """Of logits in int8, against the model's own, of their deviation."""
    wanted = logits(loaded(stored), TOKENS)
    kept = stored.with_weights("int8", **how)
    return np.abs(logits(loaded(kept), TOKENS) - wanted).max() / wanted.std()


@pytest.mark.catches("squares-not-noted")
def test_those_of_the_first_layer_are_numpys(models, found):
    tree = loaded(models[1]).params
    x = np.asarray(tree["embed"]["table"], "d")[TOKENS]
    scale = np.asarray(next(iter(jax.tree.leaves(tree["layers"]["segments"][0]["attn_norm"]))), "d")
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + CONFIG.norm_eps) * scale[0]
    largest = np.sort(np.argsort(-(normed**2).sum((0, 1)), kind="stable")[:4])
    for name in ("q", "k", "v"):
        np.testing.assert_array_equal(found.columns[f"layers/attn/{name}/w"][0], largest)
    assert found.count == 4
    assert len(found.columns) == 7 and all(len(rows) == 2 for rows in found.columns.values())
    for name in READS:
        assert all(set(FEATURES) <= set(row) for row in found.columns[f"layers/{name}"].tolist())


@pytest.mark.catches("outliers-of-the-first-layer")
def test_each_layer_keeps_its_own(models, found):
    kept = loaded(models[1].with_weights("int8", outliers=found))
    infos, arrays = jax.tree.leaves(kept.spec.infos), jax.tree.leaves(kept.params)
    columns = {i.stood_at: x for i, x in zip(infos, arrays, strict=True) if "columns" in i.path}
    assert columns.keys() == found.columns.keys()
    for path, rows in found.columns.items():
        np.testing.assert_array_equal(columns[path], rows)
    assert any(np.any(rows[0] != rows[1]) for rows in found.columns.values())


@pytest.mark.catches("outliers-in-codes")
def test_a_model_with_outliers_is_near_itself_with_them_alone(models, found):
    drawn, odd = models
    without, kept = error(odd), error(odd, outliers=found)
    assert without > 10 * kept
    assert kept < 2 * error(drawn)


def test_products_are_those_of_float64():
    noise = np.random.default_rng(0)
    w = noise.normal(size=(48, 6)).astype(np.float32)
    w[7] *= 500
    dims = ("embed", "mlp")
    packing = Packing(form="int8", double=False, shape=w.shape, dims=dims, contract=1, outliers=2)
    parts = quantised(packing, jnp.asarray(w), jnp.array([7, 30]))
    np.testing.assert_array_equal(parts["kept"], w[[7, 30]])
    rest = w.copy()
    rest[[7, 30]] = 0
    scales = np.abs(rest).max(0) * np.float32(1 / 127)
    np.testing.assert_array_equal(parts["scales"], scales)  # that do not reach for what is kept
    wanted = np.asarray(parts["codes"], "d") * scales
    wanted[[7, 30]] = w[[7, 30]]
    weight, x = ScaledWeight(parts, packing), noise.normal(size=(5, 48)).astype(np.float32)
    np.testing.assert_allclose(weight.gathered(), wanted, rtol=1e-6)
    np.testing.assert_allclose(linear(jnp.asarray(x), weight), x @ wanted, rtol=1e-5, atol=1e-3)


@pytest.mark.sweep
def test_any_mesh_finds_and_serves_what_one_device_does(models, found):
    plan, odd = Plan(mesh={"fsdp": 2, "tensor": 2}), models[1]
    again = find_outliers(loaded(odd, plan), [TOKENS], count=4)
    assert again.columns.keys() == found.columns.keys()
    for path, rows in found.columns.items():
        np.testing.assert_array_equal(again.columns[path], rows)
    kept = odd.with_weights("int8", outliers=found)
    wanted, split = (logits(loaded(kept, one), TOKENS) for one in (None, plan))
    np.testing.assert_allclose(split, wanted, rtol=0, atol=1e-5)


@pytest.mark.sweep
def test_an_engine_serves_them_as_a_generator_does(models, found):
    kept, prompt = models[1].with_weights("int8", outliers=found), (5, 9, 2, 33)
    unrolled = loaded(kept, Plan(mesh={"fsdp": 1}), unroll=True)
    engine = unrolled.engine(slots=32, seats=2, page_tokens=4, mixed_tokens=8)
    (said,) = engine.generate_all([EngineRequest(prompt=prompt, max_tokens=8)])
    wanted = loaded(kept).generator(slots=32).generate(prompt, max_tokens=8)
    assert tuple(x.token for x in said) == wanted.tokens


def test_they_are_kept_in_a_file(models, found, tmp_path, capsys):
    found.save(tmp_path / "outliers.json")
    again = Outliers.read(tmp_path / "outliers.json")
    for path, rows in found.columns.items():
        np.testing.assert_array_equal(again.columns[path], rows)
    said = []
    for more in ([], [f"--outliers={tmp_path / 'outliers.json'}"]):
        words = ["generate", str(models[1].directory), "--prompt-tokens=5,9,2,33", "--devices=1"]
        assert main([*words, "--max-tokens=16", "--no-cache", "--weights=int8", *more]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] != said[1]


@pytest.mark.catches("outliers-of-another-model")
def test_what_does_not_fit_is_refused(models, found, tmp_path):
    drawn, _ = models
    with pytest.raises(
        InputError, match="outliers: they are kept beside int8 and fp8, and weights"
    ):
        drawn.with_weights("nf4", outliers=found)
    with pytest.raises(InputError, match="own form, and this one is kept as int8; load it without"):
        find_outliers(loaded(drawn, weights="int8"), [TOKENS])
    with pytest.raises(InputError, match="outliers: there are no batches"):
        find_outliers(loaded(drawn), [])
    with pytest.raises(InputError, match="outliers: count is 0; give 1 or more"):
        find_outliers(loaded(drawn), [TOKENS], count=0)
    few = {path: rows[:1] for path, rows in found.columns.items()}
    with pytest.raises(
        InputError, match="'layers/attn/k/w' has 2 layers of 64 inputs, and they are"
    ):
        loaded(drawn.with_weights("int8", outliers=Outliers(few)))
    del few["layers/attn/q/w"]
    with pytest.raises(InputError, match="the model has 'layers/attn/q/w', unlike the one"):
        loaded(drawn.with_weights("int8", outliers=Outliers(few)))
    file = tmp_path / "outliers.json"
    for text, message in (
        ("{}", "holds no outliers, or not as many of each map"),
        ('{"a": [[1], [1, 2]]}', "is no file of outliers .*its layers have not as many inputs"),
        ('{"a": [[1.5]]}', "is no file of outliers"),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=message):
            Outliers.read(file)
