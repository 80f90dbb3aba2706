"""Options of `colossax generate --chat`."""

import argparse
from typing import Any

from colossax.cli.options.arguments import number
from colossax.config import check_text
from colossax.errors import InputError

_OF_A_CHAT = ("system", "chat_template", "slots")
_OF_PROMPTS = ("prompt", "prompt_tokens")


def chat_options(parser: Any) -> None:
    """Declare them; `check_chat` refuses what contradicts."""
    parser.add_argument(
        "--chat",
        action="store_true",
        help="a conversation: each line of standard input is said to the model, whose answer is"
        " written as it comes; /reset begins anew, /exit ends",
    )
    parser.add_argument("--system", metavar="TEXT", help="what a conversation begins with")
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="Jinja template that makes prompts of messages; default the checkpoint's",
    )
    parser.add_argument(
        "--slots",
        metavar="N",
        type=number(2),
        help="longest conversation in tokens; default what the model can",
    )


def check_chat(args: argparse.Namespace) -> None:
    """Refuse options of a conversation without one, and those of prompts beside one.

    Raises:
        InputError: There are any, several adapters are given, or a system prompt that is no text.
    """
    if not args.chat:
        for name in (one for one in _OF_A_CHAT if getattr(args, one) is not None):
            raise InputError(f"{_option(name)}: is of a conversation; add --chat")
        return
    for name in (one for one in _OF_PROMPTS if getattr(args, one) is not None):
        raise InputError(
            f"{_option(name)}: --chat reads what is said from standard input; leave one of them out"
        )
    if len(args.adapter or ()) > 1:
        raise InputError(
            f"--adapter: found {len(args.adapter)}, and --chat talks to one model; give one of them"
        )
    if args.system is not None:
        if not args.system:
            raise InputError("--system: it is empty; give a text, or leave it out")
        check_text(args.system, "--system")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
