"""What an engine's process tells, as those who asked read it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from colossax.scheduling import Emitted
from colossax.serve.backend import EngineFailed, Facts
from colossax.serve.text import Tokenizer


async def said_by(told: asyncio.Queue[Emitted]) -> AsyncIterator[Emitted]:
    """Of a request, to its end."""
    while True:
        one = await told.get()
        yield one
        if one.ended is not None:
            return


async def vector_by(told: asyncio.Queue[Any]) -> list[float]:
    """Of a text.

    Raises:
        EngineFailed: The engine ended it otherwise.
    """
    while isinstance(one := await told.get(), Emitted):
        if one.ended is not None:
            raise EngineFailed(one.message or "it was cancelled by the server")
    return one


def facts_of(document: dict[str, Any]) -> Facts:
    """As an engine says them."""
    tokenizer = Tokenizer(**document.pop("tokenizer"))
    ends, adapters = (tuple(document.pop(name)) for name in ("ends", "adapters"))
    return Facts(tokenizer=tokenizer, ends=ends, adapters=adapters, **document)
