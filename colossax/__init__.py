"""Train and serve models larger than one device's memory, on whatever devices are there."""

from typing import TYPE_CHECKING

from colossax.versions import require_supported_jax

require_supported_jax()

# ruff: noqa: E402, I001 (an old JAX must be refused before anything else imports it)
from colossax.lazy import lazily
from colossax.quiet import before_jax

before_jax()

if TYPE_CHECKING:
    from colossax.config import Plan as Plan
    from colossax.config import preset as preset
    from colossax.sharding import attention as attention
    from colossax.sharding import constrain as constrain
    from colossax.sharding import linear as linear
    from colossax.sharding import use as use
    from colossax.planner import boost as boost
    from colossax.planner import build_step as build_step
    from colossax.planner import fit_offload as fit_offload
    from colossax.planner.searching import plan as plan
    from colossax.tasks import next_token_loss as next_token_loss
    from colossax.run import fit as fit
else:
    __getattr__, __dir__ = lazily(__name__)

__version__ = "0.1.0"
