"""Rewards of answers by a model that was trained to tell them."""

import collections
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from colossax.checkpoint import find_checkpoint
from colossax.data import Chat
from colossax.data.chats.encoding import chat_template
from colossax.data.chats.prompts import Prompt
from colossax.data.chats.template import PLAIN
from colossax.errors import InputError
from colossax.models import CHAT_DOCUMENT
from colossax.tasks.posttraining.rewards.pool import Rewarded


class Judge:
    """A model of `colossax train reward`, which reads each prompt with its answer.

    By its own template and tokenizer, and on all devices of a run, its weights cut over them.

    Args:
        path: Its checkpoint.

    Raises:
        InputError: It is of a model that tells no reward, or has no tokenizer.
        CheckpointError: There is none.

    Cost: its parameters, and a forward pass of the tokens of prompts and answers.
    """

    def __init__(self, path: str):
        from colossax.inference import open_checkpoint  # what reads is loaded where it does

        self._path, self._stored = path, open_checkpoint(path)
        head = getattr(self._stored.model, "head", None)
        if head is None or head.pool is None or head.outputs != 1:
            told = "the next token" if head is None else f"{head}"
            raise InputError(
                f"rollout.judge: the model of '{path}' tells {told} and no reward; give a"
                " checkpoint of colossax train reward"
            )
        if self._stored.tokenizer is None:
            raise InputError(
                f"rollout.judge: '{path}' has no tokenizer; give a checkpoint of colossax train"
                " reward"
            )
        chat = Chat.from_json(find_checkpoint(path).document(CHAT_DOCUMENT, dict))
        self._template = chat_template(
            chat.template or PLAIN,
            self._stored.tokenizer,
            bos=chat.bos,
            instead="give another rollout.judge",
        )
        self._embedder: Any = None

    def load(self, devices: Sequence[jax.Device]) -> Any:
        """Its parameters, read onto the devices at the first call."""
        if self._embedder is None:
            loaded = self._stored.load(devices=devices, unroll=True)
            self._embedder, self._params = loaded.embedder(), loaded.params
        return self._params

    def __call__(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> Rewarded:
        """What each answer is worth; NaN of those that could not be read. Comes after `load`.

        Args:
            prompts: What was asked.
            texts: The answer to each.
        """
        values = np.full(len(texts), np.nan)
        failures: collections.Counter[str] = collections.Counter()
        said: list[str] = []
        waiting: dict[int, int] = {}

        def fail(why: str, message: str) -> None:
            failures[why] += 1
            said.append(message)

        for at, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            answer = {"role": "assistant", "content": text}
            try:
                tokens, _ = self._template.told(
                    [*prompt.messages, answer], len(prompt.messages), prompt.tools
                )
                waiting[self._embedder.add(tokens)] = at
            except InputError as problem:
                fail("unread", f"{self._path}: {problem}")
        while waiting:
            for one in self._embedder.step():
                at = waiting.pop(one.number)
                if one.vector is None:
                    fail("not finite", f"{self._path}: {one.message}")
                else:
                    values[at] = one.vector[0]
        return Rewarded(values=values, failures=dict(failures), said=said[0] if said else "")
