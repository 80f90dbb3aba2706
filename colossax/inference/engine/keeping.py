"""Which engines may let go of the middle of a sequence."""

import math
from typing import Any

from colossax.config import RING_AXES, BoundPlan
from colossax.errors import InputError, PlanError
from colossax.scheduling import EngineRequest


def check_keep(request: EngineRequest, keeps: bool) -> None:
    """Refuse a request that lets go of tokens, where the engine keeps all.

    Raises:
        InputError: It does.
    """
    if request.keep is not None and not keeps:
        raise InputError(
            "keep: this engine keeps all tokens of each request; leave it out, or make the"
            " engine with keeps=True"
        )


def check_keeps(config: Any, bound: BoundPlan, *, drafts: bool) -> None:
    """Refuse models whose first tokens cannot be brought closer than they stood, and company.

    Args:
        config: Of the decoder.
        bound: Devices of the engine.
        drafts: Whether tokens are guessed ahead.

    Raises:
        InputError: Saying what stands in the way.
        PlanError: Devices share a sequence's pages.
    """
    if drafts:
        raise InputError(
            "keeps: a drafter sees all tokens of a request, and guesses ahead of a window's ring;"
            " leave out keeps, or serve without drafts"
        )
    if bound.size(RING_AXES) > 1:
        raise PlanError(
            "keeps: the devices of 'ring' share a sequence's pages by their places, and a window's"
            " are taken in turn; leave keeps out, or give those devices to 'tensor' or 'fsdp'"
        )
    if (why := _why_not(config)) is not None:
        raise InputError(
            f"keeps: the model {why}, so that requests cannot keep the first of their tokens and a"
            " window alone; leave it out"
        )


def _why_not(config: Any) -> str | None:
    ropes = [one for one in (config.rope, config.local_rope) if one is not None]
    found = {
        "has layers with a window or chunks": config.window or config.chunk,
        "keeps latents, whose turned part is not apart": config.latent,
        "has a table of positions": config.learned_positions,
        "has biases by distance": config.alibi or config.relative,
        "turns by a length": any(
            one.stretched_from is not None and one.stretched_from < math.inf for one in ropes
        ),
        "has positions of several axes": any(one.sections is not None for one in ropes),
        "reads a source": config.longest_source,
    }
    return next((why for why, is_so in found.items() if is_so), None)
