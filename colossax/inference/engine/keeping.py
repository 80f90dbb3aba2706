"""Which models may let go of the middle of a sequence."""

import math
from typing import Any

from colossax.errors import InputError


def check_keeps(config: Any) -> None:
    """Refuse models whose first tokens cannot be brought closer than they stood.

    Args:
        config: Of the decoder.

    Raises:
        InputError: Saying what stands in the way.
    """
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
