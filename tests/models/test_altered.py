"""Models made of other models' parameters say what the truth says: logits, not numbers alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.checkpoint import RecordReader
from colossax.errors import CheckpointError, InputError
from colossax.models import (
    DeepSeekV3Config,
    GPT2Config,
    GPTOSSConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen2MoEConfig,
    Qwen3Config,
    config_from_json,
    maker,
    merged,
    most_used,
    params_of_checkpoint,
    params_of_tree,
    pruned,
    upcycled,
    with_layers,
    write_checkpoint,
)
from colossax.nn import describe
from colossax.nn.config import Llama3Scaling
from colossax.sharding.experts import LinearRouter
from tests.models.test_families import TINY

SIZES = {"vocab": 32, "embed": 16, "layers": 2, "heads": 2, "kv_heads": 1, "mlp": 24, "max_seq": 16}
DENSE = LlamaConfig(**SIZES, init_std=0.3)
SPARSE = MixtralConfig(**SIZES, experts=4, choices=2, init_std=0.3)
KINDS = Qwen2MoEConfig(
    **{**SIZES, "layers": 4},
    expert_mlp=12,
    shared_mlp=8,
    experts=4,
    choices=2,
    every=2,
    init_std=0.3,
)
SEEN = GPTOSSConfig(
    **{**SIZES, "layers": 4}, experts=4, choices=2, head_dim=8, window=4, init_std=0.3
)
"""By turns of layers that see other keys, and so of two stacks."""
GROUPED = DeepSeekV3Config(
    **{name: size for name, size in SIZES.items() if name != "kv_heads"} | {"layers": 1},
    **{"expert_mlp": 12, "experts": 4, "choices": 2, "shared": 1, "groups": 1, "kept_groups": 1},
    **{"kv_rank": 8, "q_rank": 8, "nope_dim": 4, "rope_dim": 4, "v_dim": 8},
)
TOKENS = np.random.default_rng(0).integers(0, 32, (2, 12))


@functools.cache
def fresh(config, seed=0):
    """A model of random numbers, large enough for each to matter."""
    rng, spec = np.random.default_rng(seed), describe(maker(config))
    drawn = [rng.normal(0, 0.5, info.shape) for info in jax.tree.leaves(spec.infos)]
    tree = jax.tree.unflatten(jax.tree.structure(spec.infos), drawn)
    return params_of_tree(config, jax.tree.map(lambda x: x.astype(np.float32), tree))


def logits(params, tree=None):
    """What a model says."""
    tree = params.tree() if tree is None else tree
    call = jax.jit(lambda tree, tokens: params.spec.merge(tree)(tokens))
    return np.asarray(call(tree, TOKENS))


KEEP = ((3, 1), (0, 3))


@pytest.mark.catches("pruned-alike-in-all-layers")
def test_a_pruned_model_is_one_whose_router_never_chooses_the_others(monkeypatch):
    """Of the truth the experts that are kept come first, and the columns of the others are out."""
    params = fresh(SPARSE)
    tree = params.tree()
    for row, kept in enumerate(KEEP):
        order = [*kept, *(set(range(4)) - set(kept))]
        for path in ("up", "gate", "down"):
            array = at(tree, path)
            array[row] = array[row][order]
        router = at(tree, "router/w")
        router[row] = router[row][:, order]
    call = LinearRouter.__call__
    with monkeypatch.context() as patch:
        out = jnp.where(jnp.arange(4) < 2, 0, -jnp.inf)
        patch.setattr(LinearRouter, "__call__", lambda self, x: call(self, x) + out)
        wanted = logits(params, tree)
    found = pruned(params, KEEP)
    assert found.config.experts == 2
    np.testing.assert_allclose(logits(found), wanted, atol=1e-5)


def test_layers_of_several_stacks_keep_their_own_experts():
    keep = ((0, 1), (1, 2), (2, 3), (0, 3))
    found = pruned(fresh(SEEN), keep)
    for number, row in enumerate(keep):
        place = f"layers/{('local', 'full')[number % 2]}/mlp/up", number // 2
        for new, old in enumerate(row):
            wanted = fresh(SEEN).read(*place, old)
            np.testing.assert_array_equal(found.read(*place, new), wanted)


@pytest.mark.catches("one-group-is-several")
def test_experts_of_one_group_are_each_for_itself():
    """Their biases of the choice go with them, and a merged model is pruned again."""
    params = fresh(GROUPED)
    found = pruned(params, [(1, 3)])
    assert found.config == dataclasses.replace(GROUPED, experts=2)
    for path, axis in (("up", -3), ("down", -3), ("router/w", -1), ("bias", -1)):
        whole, kept = (at(one.tree(), path) for one in (params, found))
        np.testing.assert_array_equal(kept, whole.take([1, 3], axis=axis), err_msg=path)
    both = merged(params, params)
    assert both.config.experts == 8
    again = pruned(both, [range(4, 8)])
    jax.tree.map(np.testing.assert_array_equal, again.tree(), params.tree())
    several = fresh(dataclasses.replace(GROUPED, groups=2, kept_groups=1))
    with pytest.raises(InputError, match="stand in 2 groups cannot be left out"):
        pruned(several, [(1, 3)])


def at(tree, path):
    """An array of the stack's MLPs, to be written to."""
    found = tree["layers"]["segments"]
    found = found[next(iter(found))]["mlp"]
    for name in path.split("/"):
        found = found[name]
    return found


def test_the_most_used_are_kept_or_any():
    params = fresh(SPARSE)
    loads = [[0.1, 0.5, 0.5, 0.2], [0.9, 0.0, 0.1, 0.3]]
    assert most_used(params, 2, loads=loads) == ((1, 2), (0, 3))
    assert most_used(params, 1, loads=loads) == ((1,), (0,))
    drawn = {most_used(params, 2, seed=seed) for seed in range(8)}
    assert len(drawn) > 4 and all(len(set(row)) == 2 for keep in drawn for row in keep)
    several = fresh(KINDS)
    with_dense = [[0, 0, 0, 0], loads[0], [0, 0, 0, 0], loads[1]]
    assert most_used(several, 2, loads=with_dense) == ((1, 2), (0, 3))


@pytest.mark.catches("merged-twice-the-first")
def test_merged_models_have_the_experts_of_both():
    one, other = fresh(SPARSE), fresh(SPARSE, seed=1)
    both = merged(one, other)
    assert both.config == dataclasses.replace(SPARSE, experts=8)
    tree, first, second = both.tree(), one.tree(), other.tree()
    for path, axis in (("up", 1), ("gate", 1), ("down", 1), ("router/w", 2)):
        wanted = np.concatenate([at(first, path), at(second, path)], axis=axis)
        np.testing.assert_array_equal(at(tree, path), wanted)
    jax.tree.map(np.testing.assert_array_equal, tree["embed"], first["embed"])
    np.testing.assert_array_equal(both.read("layers/mlp/up", 1, 5), at(second, "up")[1, 1])
    again = pruned(both, [range(4)] * 2)
    jax.tree.map(np.testing.assert_array_equal, again.tree(), first)


@pytest.mark.catches("upcycled-of-the-first-layer")
@pytest.mark.parametrize("dense", [DENSE, Qwen3Config(**SIZES, head_dim=8)], ids=["llama", "qwen3"])
def test_an_upcycled_model_says_what_the_dense_one_said(dense):
    params = fresh(dense)
    found = upcycled(params, 3, choices=2)
    assert found.config.decoder().mixture.experts == 3
    np.testing.assert_allclose(logits(found), logits(params), atol=2e-5)


def test_what_is_drawn_anew_is_of_whole_units_and_of_one_size():
    params = fresh(dataclasses.replace(DENSE, mlp=512))
    found = upcycled(params, 2, redrawn=0.5)
    changed = []
    for name, axis in (("up", 0), ("gate", 0), ("down", 1)):
        matrix, copy = (
            params.read(f"layers/mlp/{name}/w", 1, None),
            found.read(f"layers/mlp/{name}", 1, 1),
        )
        other = copy != matrix
        changed.append(other.all(axis=axis))
        np.testing.assert_array_equal(other.any(axis=axis), changed[-1])
        assert copy.std() == pytest.approx(matrix.std(), rel=0.1)
        assert np.any(copy != found.read(f"layers/mlp/{name}", 1, 0))
    assert 0.4 < changed[0].mean() < 0.6
    np.testing.assert_array_equal(changed[0], changed[1])
    np.testing.assert_array_equal(changed[0], changed[2])
    noisy = upcycled(params, 2, noise=0.1).read("layers/mlp/up", 0, 0)
    matrix = params.read("layers/mlp/up/w", 0, None)
    assert (noisy - matrix).std() == pytest.approx(0.1 * matrix.std(), rel=0.1)


@pytest.mark.catches("student-of-first-layers")
def test_a_student_has_the_layers_that_were_kept():
    deep = fresh(dataclasses.replace(DENSE, layers=4))
    student = with_layers(deep, [1, 3])
    jax.tree.map(
        np.testing.assert_array_equal,
        student.tree()["layers"],
        jax.tree.map(lambda x: x[[1, 3]], deep.tree()["layers"]),
    )
    seen = with_layers(fresh(SEEN), [2, 3])
    for path in ("layers/local/mlp/up", "layers/full/attn/q/w"):
        np.testing.assert_array_equal(seen.read(path, 0, None), fresh(SEEN).read(path, 1, None))
    sparse = with_layers(fresh(KINDS), [2, 3])
    for path in ("layers/sparse/mlp/up", "layers/sparse/attn/q/w", "layers/dense/mlp/up/w"):
        np.testing.assert_array_equal(sparse.read(path, 0, None), fresh(KINDS).read(path, 1, None))


@pytest.mark.catches("layers-of-two-stacks")
@pytest.mark.parametrize("family", ["t5", "bart", "clip", "siglip"])
def test_of_two_stacks_no_layers_are_kept(family):
    with pytest.raises(InputError, match="layers: the model has several stacks of layers, as"):
        with_layers(fresh(TINY[family]), [0])


def test_they_are_written_and_read_again(tmp_path):
    found = pruned(fresh(SPARSE), KEEP)
    write_checkpoint(found, tmp_path / "out")
    reader = RecordReader(tmp_path / "out")
    assert config_from_json(reader.documents()["model"]) == found.config
    stored = params_of_checkpoint(reader)
    jax.tree.map(np.testing.assert_array_equal, stored.tree(), found.tree())
    assert reader.experts("model/params/layers/mlp/up") == 2
    one = stored.read("layers/mlp/up", 1, 1)
    np.testing.assert_array_equal(one, fresh(SPARSE).read("layers/mlp/up", 1, 3))
    with pytest.raises(CheckpointError, match="already holds step 0"):
        write_checkpoint(found, tmp_path / "out")


def wider(**changes):
    return fresh(dataclasses.replace(SPARSE, **changes))


REFUSED = {
    "prune: a llama has no experts": lambda: pruned(fresh(DENSE), KEEP),
    "1 experts are kept, and a token chooses 2": lambda: pruned(fresh(SPARSE), [[0], [1]]),
    "5 experts are to be kept, and there are 4": lambda: most_used(fresh(SPARSE), 5),
    "found \\[0, 0\\]; give different ones of 0 to 3": lambda: pruned(
        fresh(SPARSE), [[0, 0], [0, 1]]
    ),
    "found 1 layers that keep \\[2\\]": lambda: pruned(fresh(SPARSE), [[0, 1]]),
    "of 2 x 3 layers and experts, and the model has 2 x 4": lambda: most_used(
        fresh(SPARSE), 2, loads=np.zeros((2, 3))
    ),
    "merge: a llama has no experts": lambda: merged(fresh(DENSE), fresh(DENSE)),
    "merge: mlp is 24 in one and 32 in the other": lambda: merged(fresh(SPARSE), wider(mlp=32)),
    "one is a mixtral and the other a qwen2_moe": lambda: merged(fresh(SPARSE), fresh(KINDS)),
    "upcycle: a mixtral has experts already": lambda: upcycled(fresh(SPARSE), 4),
    "upcycle: no family with experts has the parts of a gpt2": lambda: upcycled(
        fresh(GPT2Config(vocab=32, embed=16, layers=2, heads=2, mlp=24, max_seq=16)), 4
    ),
    "upcycle: rope of this llama is .* for which mixtral has no place": lambda: upcycled(
        fresh(dataclasses.replace(DENSE, rope_scaling=Llama3Scaling())), 4
    ),
    "choices: 2 experts of a token, and there are 1": lambda: upcycled(fresh(DENSE), 1),
    "experts.noise": lambda: upcycled(fresh(DENSE), 4, noise=-1.0),
    "layers: found 1,0; give some of 0 to 1": lambda: with_layers(fresh(DENSE), [1, 0]),
    "those kept are sparse, sparse, and a model of 2 layers has dense, sparse": lambda: with_layers(
        fresh(KINDS), [1, 3]
    ),
    "those kept are local sparse, local sparse, and a model of 2 layers": lambda: with_layers(
        fresh(SEEN), [0, 2]
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message):
    with pytest.raises(InputError, match=message):
        REFUSED[message]()
