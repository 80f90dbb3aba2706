"""Options of who guesses tokens ahead, for the verbs that continue texts."""

import argparse
from typing import Any

from colossax.cli.arguments import number
from colossax.config import user_path
from colossax.errors import InputError

NGRAMS = "ngrams"

TOKENS = 4


def draft_options(parser: Any) -> None:
    """Declare them; `drafter_of` reads them."""
    parser.add_argument(
        "--draft",
        metavar="WHO",
        help=f"who guesses tokens ahead, of which a step looks at several: {NGRAMS}, which copies"
        " what followed the same words before, or a CHECKPOINT: of a smaller model of the same"
        " vocabulary, or of a drafter that learned beside this model (`colossax train"
        " glide_tiny`); no guess changes a token",
    )
    parser.add_argument(
        "--draft-tokens",
        metavar="N",
        type=number(1, 63),
        help=f"tokens that are guessed, one behind another; default {TOKENS}",
    )
    parser.add_argument(
        "--draft-nodes",
        metavar="N",
        type=number(1, 63),
        help="guesses of a model with others for the same places, a tree; default none",
    )


def check_draft(args: argparse.Namespace) -> None:
    """Refuse what says nothing, before anything is read.

    Raises:
        InputError: Guesses are counted that nobody makes, or n-grams have nodes.
    """
    for option, value in {
        "--draft-tokens": args.draft_tokens,
        "--draft-nodes": args.draft_nodes,
    }.items():
        if args.draft is None and value is not None:
            raise InputError(f"{option}: nobody guesses; give --draft {NGRAMS} or a CHECKPOINT too")
    if args.draft == NGRAMS and args.draft_nodes is not None:
        raise InputError("--draft-nodes: n-grams guess one line of tokens; give --draft-tokens")


def drafter_of(args: argparse.Namespace, loaded: Any, devices: Any) -> Any:
    """Who guesses for a model that is loaded; None where nobody was asked for.

    Raises:
        InputError: Its checkpoint is none, or of a model that cannot guess for this one.
    """
    if args.draft is None:
        return None
    from colossax.inference import NgramDrafter, holds_drafter, open_checkpoint, open_drafter

    tokens = args.draft_tokens or TOKENS
    if args.draft == NGRAMS:
        return NgramDrafter(tokens)
    path = user_path(args.draft, "--draft")
    if holds_drafter(path):
        return open_drafter(path).beside(loaded).drafter(args.draft_tokens, nodes=args.draft_nodes)
    stored = open_checkpoint(path)
    ours, theirs = loaded.tokenizer, stored.tokenizer
    if ours is not None and theirs is not None and ours.definition != theirs.definition:
        raise InputError(
            f"--draft: '{args.draft}' has another tokenizer than the model it is to guess for;"
            " give one that was trained with the same, such as with `colossax train --init`"
        )
    plan = stored.plan.replace(mesh=loaded.bound.plan.mesh)
    small = stored.load(plan, devices, unroll=True)
    return small.drafter(tokens, nodes=args.draft_nodes)
