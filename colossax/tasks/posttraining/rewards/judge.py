"""Rewards of answers by a model that was trained to tell them."""

import collections
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from colossax.config import Plan
from colossax.data import Chat
from colossax.data.chats.encoding import chat_template
from colossax.data.chats.prompts import Prompt
from colossax.data.chats.template import PLAIN
from colossax.errors import InputError, PlanError
from colossax.models import CHAT_DOCUMENT
from colossax.tasks.posttraining.rewards.pool import Rewarded


class Judge:
    """A model of `colossax train reward`, which reads each prompt with its answer.

    By its own template and tokenizer, and on all devices of a run, its weights cut over them.

    Args:
        path: Its checkpoint.
        step: Which of its checkpoints; None: the latest.

    Raises:
        InputError: It is of a model that tells no reward, or has no tokenizer.
        CheckpointError: There is none.

    Cost: its parameters, and a forward pass of the tokens of prompts and answers; answers that are
    alike are read once.
    """

    def __init__(self, path: str, step: int | None = None):
        from colossax.inference import open_checkpoint  # what reads is loaded where it does

        try:
            self._path, self._stored = path, open_checkpoint(path)
            if step not in (None, self._stored.step):
                self._stored = open_checkpoint(self._stored.directory, step=step)
        except InputError as problem:
            raise type(problem)(f"rollout.judge: {problem}") from None
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
        chat = Chat.from_json(self._stored.origin[0].document(CHAT_DOCUMENT, dict))
        self._template = chat_template(
            chat.template or PLAIN,
            self._stored.tokenizer,
            bos=chat.bos,
            instead="give another rollout.judge",
        )
        self._embedder: Any = None

    @property
    def step(self) -> int:
        """Of its checkpoint."""
        return self._stored.step

    def load(self, devices: Sequence[jax.Device]) -> Any:
        """Its parameters, read onto the devices at the first call.

        Where the devices do not divide them each has all.
        """
        if self._embedder is None:
            plan = Plan(mesh={"data": len(devices)}, precision=self._stored.precision)
            try:
                loaded = self._stored.load(devices=devices, unroll=True)
            except PlanError:
                loaded = self._stored.load(plan, devices, unroll=True)
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
        alike: dict[tuple[int, ...], list[int]] = {}
        waiting: dict[int, list[int]] = {}

        def fail(why: str, message: str, count: int = 1) -> None:
            failures[why] += count
            said.append(f"{self._path}: {message}")

        for at, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            answer = {"role": "assistant", "content": text}
            try:
                tokens, _ = self._template.told(
                    [*prompt.messages, answer], len(prompt.messages), prompt.tools
                )
                if (known := alike.get(tuple(tokens))) is None:
                    known = waiting[self._embedder.add(tokens)] = alike[tuple(tokens)] = []
                known.append(at)
            except InputError as problem:
                fail("unread", str(problem))
        while waiting:
            for one in self._embedder.step():
                own = waiting.pop(one.number)
                if one.vector is None:
                    fail("not finite", one.message, len(own))
                else:
                    values[own] = one.vector[0]
        return Rewarded(values=values, failures=dict(failures), said=said[0] if said else "")
