"""The prompts of a run: from a configuration to what is asked in each step."""

import dataclasses
import hashlib

import numpy as np

from colossax.data import Chat, Mixture, RowSource, Tokenizer
from colossax.data.chats.encoding import template_source
from colossax.data.chats.prompts import Prompt, PromptOrder, Prompts, read_prompts
from colossax.errors import InputError
from colossax.processes.group import Group
from colossax.tasks.config import TrainConfig
from colossax.tasks.posttraining.config import longest_prompt
from colossax.tasks.posttraining.conversations import opened_files, template_of
from colossax.tasks.text import names_of

_VALIDATION_SEED = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """Prompts as tokens, split into what is learned from and what is held out.

    Attributes:
        tokenizer: Text to tokens and back.
        chat: How messages become text.
        prompts: Of all sources.
        order: Numbers of prompts, as they are asked one after another.
        held_out: Numbers of those held out, each source's in a drawn order; of as many as are taken
            from the beginning each source has its share.
        fingerprint: Hash of what is asked.
        description: For people, a line for each source.
    """

    tokenizer: Tokenizer
    chat: Chat
    prompts: tuple[Prompt, ...]
    order: RowSource
    held_out: tuple[int, ...]
    fingerprint: str
    description: tuple[str, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return tuple(sorted({self.tokenizer.eos, *self.chat.ends}))

    def asked(self, first: int, count: int) -> list[Prompt]:
        """So many prompts from number `first` of the run on."""
        numbers = (int(self.order[first + at]["prompt"][0]) for at in range(count))
        return [self.prompts[number] for number in numbers]


def open_prompts(config: TrainConfig, group: Group) -> Asked:
    """Find the files, read tokenizer and template, make tokens of all prompts.

    Raises:
        InputError: Files, tokenizer or template cannot be read, or do not fit, or none are given;
            or the processes read different files.
    """
    each, tokenizer, chat = opened_files(config, group)

    def read() -> list[Prompts]:
        template = template_of(chat, tokenizer)
        return [read_prompts(documents, template) for documents in each]

    found = group.together(read)
    return group.together(
        lambda: _asked(config, tokenizer, chat, dict(zip(names_of(each), found, strict=True)))
    )


def _asked(
    config: TrainConfig, tokenizer: Tokenizer, chat: Chat, found: dict[str, Prompts]
) -> Asked:
    orders, held_out, told, first = [], list[tuple[float, int]](), list[str](), 0
    weights = [*config.data.sources.values()]
    hashed = hashlib.blake2b(template_source(chat.template or "", chat.bos, "").encode())
    for (name, each), weight in zip(found.items(), weights, strict=True):
        training, own = each.split(config.data.validation_fraction, longest=longest_prompt(config))
        orders.append(PromptOrder(training, seed=config.seed, first=first))
        drawn = PromptOrder(own, seed=_VALIDATION_SEED, first=first)
        numbers = (int(drawn[row]["prompt"][0]) for row in range(len(own)))
        held_out += [((row + 0.5) / weight, number) for row, number in enumerate(numbers)]
        told.append(_described(name if len(found) > 1 else "", weight, each, training, own))
        first += len(each.prompts)
        hashed.update(each.fingerprint.encode())
    return Asked(
        tokenizer=tokenizer,
        chat=dataclasses.replace(chat, ends=_ends(chat, tokenizer, found)),
        prompts=tuple(prompt for each in found.values() for prompt in each.prompts),
        order=orders[0] if len(orders) == 1 else Mixture(orders, weights, seed=config.seed),
        held_out=tuple(number for _, number in sorted(held_out)),
        fingerprint=hashed.hexdigest()[:32],
        description=tuple(told),
    )


def _ends(chat: Chat, tokenizer: Tokenizer, found: dict[str, Prompts]) -> tuple[int, ...]:
    """With the special token by which the template ends an answer, where it does."""
    messages = next(iter(found.values())).prompts[0].messages
    try:
        answered = [*messages, {"role": "assistant", "content": "."}]
        tokens, _ = template_of(chat, tokenizer).told(answered, len(messages))
    except InputError:  # it writes no answers
        return chat.ends
    special = {*tokenizer.specials.values()} - {tokenizer.eos}
    return tuple(sorted({*chat.ends, *({tokens[-1]} & special)}))


def _described(
    name: str, weight: float, found: Prompts, training: np.ndarray, held_out: np.ndarray
) -> str:
    told = f"{len(training):,} prompts, {len(held_out):,} held out"
    if long := len(found.prompts) - len(training) - len(held_out):
        told += f", {long:,} left out as they leave no room for an answer"
    return f"{weight:.1%} {name}: {told}" if name else told
