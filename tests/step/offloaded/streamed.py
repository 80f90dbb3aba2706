"""Runs of a small model whose layers are updated during backward, and how states are compared."""

import re

import jax
import numpy as np

from colossax.config import OffloadConfig, Plan, Segment
from colossax.models import LlamaConfig, maker
from colossax.planner import Facts, build_step, settle
from colossax.step import StepOptions
from colossax.tasks import next_token_loss
from tests.fresh import fresh_state
from tests.step.test_step import text_batch

CONFIG = LlamaConfig(vocab=64, embed=32, layers=4, heads=4, kv_heads=2, mlp=48, max_seq=32)
STEPS = 5
FULL = Plan(segments=(Segment(remat="full"),))
"""The ordinary plan."""

HOST = {"parameters": 1.0, "optimizer": 1.0, "activations": 1.0}
"""Shares that put everything into host memory."""

SHARED = {"parameters": 0.5, "optimizer": 0.75}


def offloaded(plan=FULL, **settings):
    """The plan with these offload settings."""
    return plan.replace(offload=OffloadConfig(**settings))


def host(plan=FULL, **settings):
    """The plan with everything in host memory, and these settings."""
    return offloaded(plan, **HOST, **settings)


def batch(seed=0, rows=8):
    """Packed rows with padding."""
    return text_batch(rows=rows, seed=seed)


def started(plan, optimizer, *, model=CONFIG, loss=None, devices=None, **options):
    """(state, step) of a small model; on one device unless told."""
    of_family = hasattr(model, "vocab")
    make_model = maker(model) if of_family else model
    loss = loss or next_token_loss(z_loss=1e-3)
    devices = jax.devices()[:1] if devices is None else devices
    facts = Facts(
        make_model=make_model,
        optimizer=optimizer,
        loss=loss,
        options=StepOptions(**options),
        devices=devices,
    )
    settled = settle(plan, facts)
    step = build_step(make_model, optimizer, loss, settled, devices=devices, **options)
    return (fresh_state(model, step) if of_family else step.init()), step


def stepped(state, step, *, steps=STEPS, rows=8, batches=None):
    """(state, metrics of each step as floats; those of each layer as lists)."""
    found = []
    for each in batches or [batch(number, rows) for number in range(steps)]:
        state, metrics = step(state, each)
        found.append({name: np.asarray(value).tolist() for name, value in metrics.items()})
    return state, found


def by_path(step, tree):
    """`{path: [layers, ...]}` of parameters or of the optimizer's state, whatever the segments."""
    pairs = jax.tree_util.tree_flatten_with_path(step.spec.infos)[0]
    infos = {jax.tree_util.keystr(path): info for path, info in pairs}
    parts = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name, leaf = jax.tree_util.keystr(path), np.asarray(leaf)
        info = next((i for own, i in infos.items() if name.endswith(own)), None)
        first = None if info is None else info.first_layer
        name = re.sub(r"\['segments'\]\[\d+\]", "", name)
        whole = leaf if first is None or info.stacked else leaf[None]
        parts.setdefault(name, {})[first or 0] = whole
    return {
        name: np.concatenate([of[k] for k in sorted(of)])
        if len(of) > 1
        else next(iter(of.values()))
        for name, of in parts.items()
    }
