"""Checkpoints of the golden families, and of what their matrices' codes stand for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from colossax.checkpoint import Checkpointer, slot_of
from colossax.config import Plan
from colossax.inference import open_checkpoint
from colossax.models import config_to_json, maker
from colossax.models.hf_folder import read_params
from colossax.nn import describe
from colossax.sharding import use
from tests.models.test_parity import GOLDEN

LARGEST = {"int8": 127, "fp8": 448}


def decoded(w, axes, form):
    """What codes of a matrix stand for: NumPy's, in float64, of scales in float32."""
    scales = np.abs(w).max(axes, keepdims=True) * np.float32(1 / LARGEST[form])
    codes = w / np.where(scales > 0, scales, 1)
    if form == "int8":
        codes = np.round(codes)
    else:
        codes = np.clip(codes, -448, 448).astype(jnp.float8_e4m3fn)
    return codes.astype(np.float64) * scales


def input_axes(info):
    """Of a matrix that is to be in codes, by what it is called; None of anything else."""
    *_, of, name = ("", *info.path.split("/"))
    if of == "router" or name not in ("w", "up", "gate", "down"):
        return None
    if info.first_layer is None and info.path != "head/w":
        return None
    if name != "w":
        return (1,)  # of experts
    if of in ("shared_gate", "kv_up"):
        return None
    return (0, 1) if of == "o" else (0,)


def through_codes(info, w, form):
    """A parameter, layer by layer, in its own type."""
    axes = input_axes(info)
    if axes is None:
        return w
    if info.stacked:
        return np.stack([decoded(row, axes, form) for row in w]).astype(w.dtype)
    return decoded(w, axes, form).astype(w.dtype)


@functools.cache
def golden(case):
    """Configuration, description and parameters of a golden family."""
    config, params = read_params(GOLDEN / case)
    with use(Plan().bind(jax.devices()[:1])):
        return config, describe(maker(config)), jax.tree.map(np.asarray, params)


def written(folder, config, spec, params):
    """A checkpoint of a model."""
    infos, arrays = jax.tree.leaves(spec.infos), jax.tree.leaves(params)
    slots = [slot_of(i, "model/params", dtype=p.dtype) for i, p in zip(infos, arrays, strict=True)]
    with Checkpointer(folder) as checkpointer:
        arrays = [jnp.asarray(x) for x in arrays]
        documents = {"model": config_to_json(config)}
        checkpointer.save(1, list(zip(slots, arrays, strict=True)), documents)
    return open_checkpoint(folder)


def stored(folder, case):
    """The checkpoint of a golden family, written once."""
    if (folder / case).exists():
        return open_checkpoint(folder / case)
    return written(folder / case, *golden(case))


def stood_for(folder, case, form):
    """One of what the codes of its matrices stand for."""
    config, spec, params = golden(case)
    params = jax.tree.map(lambda i, w: through_codes(i, w, form), spec.infos, params)
    return written(folder / f"{case}-{form}", config, spec, params)


def logits(model, tokens):
    """Of tokens `[b, s]`."""

    def of(params, tokens):
        with use(model.bound):
            return model.spec.merge(params)(tokens)

    return np.asarray(jax.jit(of)(model.params, jnp.asarray(tokens)))
