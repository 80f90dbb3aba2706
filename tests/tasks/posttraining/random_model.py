"""A checkpoint of a model that nobody has taught."""

import jax

from colossax.config import Plan
from colossax.models import maker, params_of_tree, write_checkpoint
from colossax.optim import adamw
from colossax.planner import build_step
from colossax.tasks import next_token_loss
from tests.serve.fake import TOKENIZER


def write_random(model, folder, seed=1, tokenizer=TOKENIZER):
    """Write it, with a tokenizer of bytes; the folder."""
    devices = jax.devices()[:1]
    step = build_step(maker(model), adamw(1e-3), next_token_loss(), Plan(), devices=devices)
    params = params_of_tree(model, step.init(seed=seed)["params"])
    write_checkpoint(params, folder, {"tokenizer": tokenizer.to_json()})
    return folder
