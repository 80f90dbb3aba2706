"""Options of who guesses tokens ahead, for the verbs that continue texts."""

import argparse
from typing import Any

from colossax.cli.options.arguments import number
from colossax.config import user_path
from colossax.errors import InputError

NGRAMS = "ngrams"

RETRIEVAL = "retrieval"

TOKENS = 4


def draft_options(parser: Any) -> None:
    """Declare them; `drafter_of` reads them."""
    parser.add_argument(
        "--draft",
        metavar="WHO",
        help=f"who guesses tokens ahead, of which a step looks at several: {NGRAMS}, which copies"
        " what followed the same words before, or a CHECKPOINT: of a smaller model of the same"
        " vocabulary, or of a drafter that learned beside this model (`colossax train"
        f" glide_tiny`); or {RETRIEVAL}: the model itself, which sees a few pages of a long text;"
        f" {RETRIEVAL}+{NGRAMS} or {RETRIEVAL}+CHECKPOINT: those guess first, and it looks at"
        " several of their guesses at once; no guess changes a token",
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
    parser.add_argument(
        "--draft-pages",
        metavar="N",
        type=number(1),
        help=f"pages of each text that {RETRIEVAL} finds for each kv head, beside the first and"
        " the last ones; default 64",
    )


def check_draft(args: argparse.Namespace) -> None:
    """Refuse what says nothing, before anything is read.

    Raises:
        InputError: Guesses or pages are counted that nobody makes or finds, or n-grams or retrieval
            have nodes.
    """
    retrieves, below = _parts(args.draft)
    if args.draft_pages is not None and not retrieves:
        raise InputError(f"--draft-pages: nobody finds pages; give --draft {RETRIEVAL} too")
    if retrieves and args.draft_nodes is not None:
        raise InputError("--draft-nodes: retrieval guesses one line of tokens; give --draft-tokens")
    if retrieves and below == "":
        raise InputError(
            f"--draft: found '{args.draft}', and nobody behind the plus; give {RETRIEVAL} alone, or"
            f" {RETRIEVAL}+{NGRAMS}"
        )
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
    retrieves, who = _parts(args.draft)
    if not retrieves:
        given = args.draft_tokens, args.draft_nodes
        return _guesser(args.draft, *given, loaded=loaded, devices=devices)
    from colossax.inference import RetrievalDrafter

    below, tokens = None, args.draft_tokens or TOKENS
    if who is not None:
        below = _guesser(who, min(TOKENS, max(1, tokens - 1)), None, loaded=loaded, devices=devices)
    pages = {} if args.draft_pages is None else {"pages": args.draft_pages}
    return RetrievalDrafter(tokens, below=below, **pages)


def _parts(who: str | None) -> tuple[bool, str | None]:
    """Whether the model itself guesses, and who guesses before it, or alone."""
    if who == RETRIEVAL:
        return True, None
    start = f"{RETRIEVAL}+"
    if who is not None and who.startswith(start):
        return True, who[len(start) :]
    return False, who


def _guesser(who: str, tokens: int | None, nodes: int | None, *, loaded: Any, devices: Any) -> Any:
    """Somebody beside the model: n-grams, or of a checkpoint."""
    from colossax.inference import NgramDrafter, holds_drafter, open_checkpoint, open_drafter

    if who == NGRAMS:
        return NgramDrafter(tokens or TOKENS)
    path = user_path(who, "--draft")
    if holds_drafter(path):
        return open_drafter(path).beside(loaded).drafter(tokens, nodes=nodes)
    stored = open_checkpoint(path)
    ours, theirs = loaded.tokenizer, stored.tokenizer
    if ours is not None and theirs is not None and ours.definition != theirs.definition:
        raise InputError(
            f"--draft: '{who}' has another tokenizer than the model it is to guess for;"
            " give one that was trained with the same, such as with `colossax train --init`"
        )
    plan = stored.plan.replace(mesh=loaded.bound.plan.mesh)
    small = stored.load(plan, devices, unroll=True)
    return small.drafter(tokens or TOKENS, nodes=nodes)
