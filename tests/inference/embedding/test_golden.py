"""Vectors of texts that share rows are those of `transformers`' padded batch (tests/golden)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import colossax
from colossax.errors import InputError
from colossax.inference import Embedder
from colossax.inference.embedding.heads import with_embedding
from colossax.models import maker
from colossax.models.conversions import CONVERSIONS
from colossax.models.hf_folder import read_params, read_settings
from colossax.nn import describe
from tests.cases import quick_first
from tests.inference.test_generator import single
from tests.models.test_parity import GOLDEN, kept

pytestmark = pytest.mark.slow

VECTORS = load_file(GOLDEN / "embeddings.safetensors")
CASES = [tuple(name.split("/")) for name in VECTORS if "/" in name and not name.endswith("/ids")]


@pytest.mark.catches("embedding-not-normalised")
@pytest.mark.parametrize(("model", "pool"), quick_first(CASES, [("modernbert", "mean")]))
def test_vectors(model, pool):
    config, params = read_params(GOLDEN / model)
    with colossax.use(single()):
        spec = describe(maker(with_embedding(config, pool, normalise=True)))
    arrays = jax.tree.map(jnp.asarray, kept(params, spec.infos))
    rows = zip(VECTORS[f"{model}/ids"], VECTORS["lengths"], strict=True)
    texts = [ids[:length].tolist() for ids, length in rows]
    one = Embedder(spec, single(), arrays, tokens=64)
    np.testing.assert_allclose(one.embed(texts), VECTORS[f"{model}/{pool}"], atol=1e-5)
    assert sum(one.stats.steps.values()) < len(texts)


def test_poolings_and_models_that_are_refused():
    config = read_params(GOLDEN / "bert")[0]
    with pytest.raises(InputError, match="pool: 'avg' is unknown; known: first"):
        with_embedding(config, "avg", normalise=True)
    for name in ("vit", "clip", "t5", "whisper", "llava"):
        settings = read_settings(GOLDEN / name)
        other = CONVERSIONS[settings["model_type"]].config_from(settings)
        with pytest.raises(
            InputError, match=r"model.head: |reads more than one text, or something"
        ):
            with_embedding(other, "mean", normalise=True)
