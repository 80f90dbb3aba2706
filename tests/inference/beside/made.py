"""A base and adapters of it, as checkpoints; what they add is large enough to be seen in tokens."""

import jax
import jax.numpy as jnp
import numpy as np

from colossax.checkpoint import Checkpointer, RecordReader, slot_of
from colossax.checkpoint.base import base_document
from colossax.config import Plan, to_json
from colossax.inference import open_checkpoint
from colossax.models import LlamaConfig, config_to_json, maker
from colossax.models.adapters.stored import adapter_infos, adapter_of_checkpoint, with_parts
from colossax.nn import AdapterConfig, describe
from colossax.sharding import use
from tests.inference.weights.made import through_codes

CONFIG = LlamaConfig(
    vocab=128, embed=64, layers=4, heads=8, kv_heads=2, mlp=128, max_seq=64, rope_theta=100.0
)
ADAPTERS = {
    "narrow": AdapterConfig(rank=2, alpha=2.0, targets="attn/*"),
    "wide": AdapterConfig(rank=8, alpha=24.0, targets="attn/o,mlp/*", rslora=True),
    "head": AdapterConfig(rank=4, alpha=4.0, targets="attn/q,head"),
}
"""Other ranks, scales and maps each."""


def base(folder, config=CONFIG, seed=0, says=None, **documents):
    """A checkpoint of a model, all of whose numbers are random; `documents` beside it.

    Of tokens it says those of `says` alone, if they are given: others have logits of 0.
    """
    noise = np.random.default_rng(seed)
    with use(Plan().bind(jax.devices()[:1])):
        infos = jax.tree.leaves(describe(maker(config)).infos)
    arrays = [_first(info, noise) for info in infos]
    if says is not None:
        ((_, head),) = [one for one in zip(infos, arrays, strict=True) if one[0].path == "head/w"]
        head[:, [token for token in range(config.vocab) if token not in says]] = 0
    return _saved(folder, infos, arrays, {"model": config_to_json(config), **documents})


def adapter(folder, of, config, seed, *, scale=0.3, spoil=None, step=1, **more):
    """A checkpoint of an adapter of one; `spoil` is what one of its numbers is."""
    noise = np.random.default_rng(seed)
    infos = list(adapter_infos(of.model, config).values())
    arrays = [noise.normal(size=i.shape).astype(np.float32) * scale for i in infos]
    if spoil is not None:
        arrays[-1].flat[0] = spoil
    reader = RecordReader(of.directory, of.step)
    documents = {
        "model": config_to_json(of.model),
        "adapter": to_json(config),
        "base": base_document(reader, "model", folder),
        **more,
    }
    return _saved(folder, infos, arrays, documents, step)


def adapters(folder, of, configs=ADAPTERS):
    """Of each configuration one, by its name."""
    return {
        name: adapter(folder / name, of, config, seed)
        for seed, (name, config) in enumerate(configs.items(), 1)
    }


def _first(info, noise):
    if info.path.endswith("scale"):
        return np.ones(info.shape, np.float32)
    return noise.normal(size=info.shape).astype(np.float32) * 0.1


def _saved(folder, infos, arrays, documents, step=1):
    slots = [slot_of(i, "model/params", dtype=a.dtype) for i, a in zip(infos, arrays, strict=True)]
    with Checkpointer(folder) as checkpointer:
        given = [jnp.asarray(x) for x in arrays]
        checkpointer.save(step, list(zip(slots, given, strict=True)), documents)
    return open_checkpoint(folder)


def merged(folder, of, stored, form="own"):
    """A checkpoint of the base with an adapter in its matrices; of what its codes stand for."""
    found = adapter_of_checkpoint(RecordReader(stored.directory, stored.step))
    with use(Plan().bind(jax.devices()[:1])):
        infos = jax.tree.leaves(describe(maker(of.model)).infos)
    arrays = []
    for info in infos:
        rows = range(info.total_layers) if info.stacked else (None,)
        own = [found.base.read(info.path, row, None) for row in rows]
        whole = np.stack(own) if info.stacked else own[0]
        whole = whole if form == "own" else through_codes(info, whole, form)
        for at, row in enumerate(rows):
            if parts := found.parts(info.path, row):
                where = at if info.stacked else ...
                whole[where] = with_parts(whole[where], parts, stored.adapter.scale)
        arrays.append(whole)
    return _saved(folder, infos, arrays, {"model": config_to_json(of.model)})
