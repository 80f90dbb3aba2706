"""Which engines may let go of the middle of a sequence."""

import math
from collections.abc import Sequence
from typing import Any

from colossax.config import RING_AXES, BoundPlan
from colossax.errors import InputError, PlanError
from colossax.scheduling import EngineRequest
from colossax.scheduling.keep import KEEPS, WORDS

STAGES_KEEP_ALL = (
    "keeps: stages keep all tokens of each request; leave it out, or give the devices of 'stage'"
    " to 'tensor' or 'fsdp'"
)


def check_all_kept(requests: Sequence[EngineRequest]) -> None:
    """Refuse requests that let go of tokens where a sequence's layers are in stages.

    Raises:
        InputError: One does.
    """
    if any(one.keep is not None for one in requests):
        raise InputError(STAGES_KEEP_ALL)


def kept_by(requests: Sequence[EngineRequest]) -> str | None:
    """What an engine of these requests lets them keep, one of `KEEPS`; None: they keep all.

    Raises:
        InputError: They ask for several.
    """
    kinds = sorted({one.keep.kind for one in requests if one.keep is not None})
    if len(kinds) > 1:
        raise InputError(
            "keep: some requests keep sinks and some heavy hitters, and an engine knows one of"
            " them; continue those apart"
        )
    return next(iter(kinds), None)


def check_keep(request: EngineRequest, keeps: str | None) -> None:
    """Refuse a request that lets go of tokens, where the engine keeps all or others.

    Raises:
        InputError: It does.
    """
    keep = request.keep
    if keep is None or keep.kind == keeps:
        return
    if keeps is None:
        raise InputError(
            "keep: this engine keeps all tokens of each request; leave it out, or make the"
            f" engine with keeps='{keep.kind}'"
        )
    raise InputError(
        f"keep: this engine keeps {WORDS[keeps]} and a window of requests that let go of others;"
        f" ask for those, or make the engine with keeps='{keep.kind}'"
    )


def check_keeps(keeps: str, config: Any, bound: BoundPlan, *, drafts: bool) -> None:
    """Refuse models that cannot let go of what lies between, and company.

    Args:
        keeps: What requests may keep beside a window.
        config: Of the decoder.
        bound: Devices of the engine.
        drafts: Whether tokens are guessed ahead.

    Raises:
        InputError: Saying what stands in the way.
        PlanError: Devices share a sequence's pages.
    """
    if keeps not in KEEPS:
        raise InputError(f"keeps: found '{keeps}'; give {' or '.join(KEEPS)}, or leave it out")
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
            f"keeps: the model {why}, so that requests cannot keep {WORDS[keeps]} and a window"
            " alone; leave it out"
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
