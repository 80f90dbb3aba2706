"""How a checkpoint's model is talked to: its chat template, and what ends its answers."""

import argparse
from typing import Any

from colossax.checkpoint import RecordReader
from colossax.config import user_path
from colossax.data import Chat
from colossax.errors import InputError


def chat_of(stored: Any) -> Chat:
    """What a checkpoint keeps of it, an adapter's own before its base's."""
    readers = (RecordReader(stored.directory, stored.step), stored.origin[0])
    found = (reader.document("chat", dict) for reader in readers)
    return Chat.from_json(next(filter(None, found), None))


def ends_of(stored: Any, chat: Chat) -> tuple[int, ...]:
    """Token ids that end an answer."""
    config = stored.config
    eos = stored.tokenizer.eos if config.eos is None else config.eos
    return tuple(sorted({eos, *(token for token in chat.ends if token < config.vocab)}))


def slots_of(args: argparse.Namespace, config: Any) -> int:
    """Longest prompt and continuation together, as asked for or as the model can.

    Raises:
        InputError: The model cannot.
    """
    slots = config.max_seq if args.slots is None else args.slots
    if slots > config.max_seq:
        raise InputError(
            f"--slots: found {slots}, but the model's longest sequence is {config.max_seq}; give"
            f" {config.max_seq} or fewer"
        )
    return slots


def template_of(args: argparse.Namespace) -> str | None:
    """The chat template that was given; None where none was.

    Raises:
        InputError: It cannot be read.
    """
    if args.chat_template is None:
        return None
    path = user_path(args.chat_template, "--chat-template")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise InputError(f"--chat-template: {path} cannot be read ({problem})") from problem
