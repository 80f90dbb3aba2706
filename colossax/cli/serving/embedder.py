"""What `colossax serve` does with a model that tells embeddings."""

import argparse
from typing import Any

from colossax.cli.machine.devices import choose_devices
from colossax.cli.options.overrides import Override
from colossax.cli.serving.plans import plan_asked
from colossax.errors import InputError
from colossax.serve.engine import Wire, run_embedder

TEXTS = 2048
"""That may be inside at once: as many as OpenAI takes with one request."""

_UNUSED = {
    "pages": "--pages",
    "host_pages": "--host-pages",
    "deterministic": "--deterministic",
    "no_prefix_reuse": "--no-prefix-reuse",
    "chat_template": "--chat-template",
    "window_rings": "--window-rings",
    "keeps": "--keeps",
    "draft": "--draft",
    "adapter": "--adapter",
}


def with_pooling(args: argparse.Namespace, stored: Any) -> Any:
    """The checkpoint as it was asked for: telling embeddings where words say so.

    Raises:
        InputError: The model is an encoder, and neither files nor words say how it pools; or words
            say what needs a pooling.
    """
    if args.pool is not None:
        stored = stored.embedding(pool=args.pool, normalise=not args.no_normalise)
    elif args.no_normalise:
        raise InputError(
            "--no-normalise: needs --pool, which says what a text's vector is; give it"
        )
    elif not stored.embeds and not stored.config.causal:
        raise InputError(
            "CHECKPOINT: the model is an encoder, and its files do not say what a text's vector is;"
            " give --pool mean, or first, last or first_mean"
        )
    return stored


def serve_embeddings(
    wire: Wire, args: argparse.Namespace, overrides: list[Override], stored: Any, facts: Any
) -> None:
    """Load the model, tell the server of it, and serve.

    Args:
        wire: To the server.
        args, overrides: Words of the command line.
        stored: The checkpoint, with its head.
        facts: Of the model as one that continues texts would tell them.

    Raises:
        InputError: Words ask for what an embedder has not.
    """
    for name, word in _UNUSED.items():
        if getattr(args, name):
            raise _unused(word)
    if args.cache != "own":
        raise _unused("--cache")
    plan = plan_asked(args, overrides, stored)
    if plan.offload.auto:
        raise InputError(
            "plan.offload: auto is for models that continue texts; give a share, as parameters=0.5"
        )
    loaded = stored.load(plan, choose_devices(args.devices), unroll=True)
    embedder = loaded.embedder(tokens=args.mixed_tokens, longest=facts["slots"])
    facts |= {"seats": TEXTS, "embeds": True, "speaks": False, "chat_template": None}
    facts |= {"width": embedder.width, "unit": stored.model.head.normalise}
    again = [] if args.step is not None else ["--step", str(stored.step)]
    wire.send({"say": "facts", "facts": facts, "again": again})
    embedder.warm()
    run_embedder(wire, embedder)


def _unused(word: str) -> InputError:
    return InputError(
        f"{word}: the model tells embeddings, which have neither pages nor chats; leave it out"
    )
