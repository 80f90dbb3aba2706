"""The conversations of a run: from a configuration to global batches on the devices."""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from colossax.checkpoint import find_checkpoint
from colossax.config import to_json, user_path
from colossax.data import BatchLoader, Chat, Documents, Mixture, RowSource, Tokenizer
from colossax.data.chats.encoding import Answers, chat_template, encode_answers, template_source
from colossax.data.chats.forms import Wanted
from colossax.data.chats.rows import AnswerRows, JudgedRows
from colossax.data.chats.template import PLAIN, ChatTemplate
from colossax.documents import read_small
from colossax.errors import DataError, InputError
from colossax.models import CHAT_DOCUMENT, config_to_json
from colossax.processes.group import Group
from colossax.step.step import Step
from colossax.tasks.config import TrainConfig
from colossax.tasks.initial import initial_adapter, initial_tokenizer
from colossax.tasks.posttraining.config import ObjectiveConfig, against_reference
from colossax.tasks.posttraining.kto import DESIRABLE, mismatched_dims
from colossax.tasks.text import Placement, documents_of, names_of, tokenizer_of
from colossax.typing import TEXT_BATCH_DIMS, TOKEN_DIMS, Batch

ROW_DIMS = {**TOKEN_DIMS, **mismatched_dims(), DESIRABLE: ("batch", None)}
"""Dims of all arrays that rows of answers have."""

_VALIDATION_SEED = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """The answers of one path.

    Attributes:
        name: Of the path, for people and metrics.
        weight: Share of the rows, at most 1.
        answers: All of them.
        training: Numbers of the examples to train on.
        held_out: Numbers of those held out.
    """

    name: str
    weight: float
    answers: Answers
    training: np.ndarray
    held_out: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversations:
    """Conversations as tokens, split into what is trained on and what is held out.

    Attributes:
        config: The run.
        tokenizer: Text to tokens and back.
        chat: How messages become text.
        sources: One, or those of a mixture.
    """

    config: TrainConfig
    tokenizer: Tokenizer
    chat: Chat
    sources: tuple[Source, ...]

    @property
    def fingerprint(self) -> str:
        """Hash of what is learned from."""
        told = "".join(source.answers.fingerprint for source in self.sources)
        return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()

    @property
    def description(self) -> tuple[str, ...]:
        """For people, a line for each source."""
        return tuple(self._described(source) for source in self.sources)

    def check(self) -> None:
        """Make the rows of both sides, so that what is wrong with them is said before training.

        Raises:
            DataError: See `AnswerRows`.
        """
        for source in self.sources:
            for examples in (source.training, source.held_out):
                self._rows_of(source, examples, self.config.seed)

    @contextlib.contextmanager
    def batches(self, step: Step, start: int) -> Iterator[Iterator[Batch]]:
        """Endless global batches from number `start` on, made ahead by threads."""
        place = self._placement(step)
        with BatchLoader(self._rows, place.global_batch, wanted=place.wanted, start=start) as to:
            yield map(place, to)

    def held_out(self, step: Step, source: Source) -> Iterator[Batch]:
        """The held-out batches of a source, the same for every seed, each example once at most."""
        data, place = self.config.data, self._placement(step)
        rows = self._rows_of(source, source.held_out, _VALIDATION_SEED, epochs=1)
        there_are = -(-rows.count // place.global_batch)
        count = min(there_are, max(1, round(source.weight * data.validation_batches)))
        batches = BatchLoader(rows, place.global_batch, wanted=place.wanted, threads=0)
        return map(place, (next(batches) for _ in range(count)))

    @functools.cached_property
    def _rows(self) -> RowSource:
        seed = self.config.seed
        each = [self._rows_of(source, source.training, seed) for source in self.sources]
        weights = [source.weight for source in self.sources]
        return each[0] if len(each) == 1 else Mixture(each, weights, seed=seed)

    def _rows_of(
        self, source: Source, examples: np.ndarray, seed: int, *, epochs: int | None = None
    ) -> AnswerRows:
        data, objective = self.config.data, self.config.objective
        kind = JudgedRows if objective.name == "kto" else AnswerRows
        return kind(
            source.answers,
            examples,
            seq_len=data.seq_len,
            documents=objective.documents,
            seed=seed,
            alone=data.packing == "whole",
            epochs=epochs,
        )

    def _placement(self, step: Step) -> Placement:
        return Placement(step, self.config.data.global_batch, ROW_DIMS)

    def _described(self, source: Source) -> str:
        answers, seq_len = source.answers, self.config.data.seq_len
        lengths = answers.lengths.reshape(-1, answers.of).sum(axis=1)
        kind = "pairs" if answers.of == 2 else "conversations"
        rows = self._rows_of(source, source.training, self.config.seed)
        told = (
            f"{len(source.training):,} {kind} in {rows.count:,} rows of {seq_len:,} tokens,"
            f" {len(source.held_out):,} held out"
        )
        if long := int((lengths > seq_len).sum()):
            told += f", {long:,} left out as they are longer than a row"
        share = f"{source.weight:.1%} {source.name}: " if len(self.sources) > 1 else ""
        return f"{share}{told}"


def row_shapes(config: TrainConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a run's global batch."""
    data = config.data
    names: Mapping[str, Any] = TEXT_BATCH_DIMS
    if config.objective.name == "kto":
        names = {**TEXT_BATCH_DIMS, **mismatched_dims()}
    shapes = {
        name: jax.ShapeDtypeStruct(
            (data.global_batch, data.seq_len),
            np.float32 if name.endswith("weights") else np.int32,
        )
        for name in names
    }
    if config.objective.name == "kto":
        size = (data.global_batch, config.objective.documents)
        shapes[DESIRABLE] = jax.ShapeDtypeStruct(size, np.int32)
    return shapes


def open_conversations(config: TrainConfig, group: Group) -> Conversations:
    """Find the files, read tokenizer and template, encode.

    With several processes the first encodes; the others wait and read what it has kept, or encode
    for themselves where they share no cache.

    Raises:
        InputError: Files, tokenizer or template cannot be read, or do not fit, or none are given;
            or the processes read different files.
    """
    each, tokenizer, chat = opened_files(config, group)

    def encode() -> tuple[Source, ...]:
        named = zip(each, config.data.sources.values(), names_of(each), strict=True)
        return tuple(_source(config, tokenizer, chat, *one) for one in named)

    group.from_first(lambda: encode() and None)
    sources = group.together(encode)
    found = Conversations(
        config=config, tokenizer=tokenizer, chat=_ending(chat, tokenizer, sources), sources=sources
    )
    group.together(found.check)
    return found


def opened_files(config: TrainConfig, group: Group) -> tuple[list[Documents], Tokenizer, Chat]:
    """The files of each source, and by what text is made of their messages and read.

    Raises:
        InputError: See `open_conversations`.
    """
    data = config.data
    _check_given(config)
    each = group.together(lambda: [documents_of(data, path) for path in data.sources])
    first = group.from_first(
        lambda: [
            [documents.fingerprint for documents in each],
            tokenizer_of(data, each[0], config.model, initial_tokenizer(config)),
            _chat(config).to_json(),
        ]
    )
    fingerprints, tokenizer_json, chat_json = first
    tokenizer, chat = Tokenizer.from_json(tokenizer_json), Chat.from_json(chat_json)
    group.together(lambda: _check_same(each, fingerprints, group.process_id))
    return each, tokenizer, chat


def template_of(chat: Chat, tokenizer: Tokenizer) -> ChatTemplate:
    """How messages become tokens."""
    assert chat.template is not None
    return chat_template(
        chat.template,
        tokenizer,
        bos=chat.bos,
        instead="give another with --objective.template FILE",
    )


def _check_given(config: TrainConfig) -> None:
    """Refuse a run without a checkpoint or data, or one whose reference is no whole model."""
    name = config.objective.name
    if config.init is None and config.data.tokenizer is None:
        raise InputError(
            f"init: {name} teaches a model that is there, with its tokenizer; give its checkpoint"
            " with --init, such as colossax import writes"
        )
    if None in config.data.sources:
        raise InputError(
            f"data.path: {name} learns from conversations; give a file or folder of JSONL, JSON,"
            " Parquet or Arrow with --data"
        )
    if against_reference(config) and config.init is not None:
        if initial_adapter(config.init) is not None:
            raise InputError(
                f"init: '{config.init}' is an adapter, and without it the model is not what {name}"
                " starts from; start from what colossax export --merge --as-checkpoint writes"
            )


def _chat(config: TrainConfig) -> Chat:
    """The checkpoint's, with the template that is asked for, or a plain one."""
    stored = None
    if config.init is not None:
        stored = find_checkpoint(config.init).document("chat", dict)
    chat = Chat.from_json(stored)
    path = config.objective.template
    if path is None:
        return dataclasses.replace(chat, template=chat.template or PLAIN)
    file = user_path(path, "objective.template")
    try:
        return dataclasses.replace(chat, template=read_small(file).decode("utf-8"))
    except (OSError, ValueError) as problem:
        raise InputError(
            f"objective.template: {file} cannot be read ({problem}); give a file of Jinja's source"
        ) from None


def _ending(chat: Chat, tokenizer: Tokenizer, sources: tuple[Source, ...]) -> Chat:
    """With the special tokens that the answers end with, at which a server is to stop."""
    special = {*tokenizer.specials.values()} - {tokenizer.eos}
    ends = set().union(*(source.answers.ends() for source in sources)) & special
    return dataclasses.replace(chat, ends=tuple(sorted({*chat.ends, *ends})))


def _source(
    config: TrainConfig,
    tokenizer: Tokenizer,
    chat: Chat,
    documents: Documents,
    weight: float,
    name: str,
) -> Source:
    assert chat.template is not None
    template = template_of(chat, tokenizer)
    wanted = _wanted(config.objective)
    source = template_source(chat.template, chat.bos, tokenizer.end)
    answers = encode_answers(documents, tokenizer, template, wanted, source)
    answers = dataclasses.replace(answers, whole=config.objective.name == "reward")
    training, held_out = answers.split(
        config.data.validation_fraction,
        longest=config.data.seq_len,
        least=2 if wanted is Wanted.JUDGED else 1,
    )
    return Source(name=name, weight=weight, answers=answers, training=training, held_out=held_out)


def _wanted(objective: ObjectiveConfig) -> Wanted:
    """What an objective asks of each record."""
    if objective.name == "kto":
        return Wanted.JUDGED
    return Wanted.PAIR if objective.on_pairs else Wanted.CONVERSATION


def _check_same(each: list[Documents], fingerprints: list[str], process_id: int) -> None:
    for documents, fingerprint in zip(each, fingerprints, strict=True):
        if documents.fingerprint != fingerprint:
            raise DataError(
                f"{documents.origin}: process {process_id} reads other files there than process 0;"
                f" give all processes the same"
            )


def identified(
    found: Any, identity: Callable[..., dict[str, Any]], more: Mapping[str, Any]
) -> dict[str, Any]:
    """What decides the losses of a run on what was opened.

    Args:
        found: With `fingerprint` and `tokenizer`.
        identity: Of a run, from `text` and `tokenizer`, their fingerprints.
        more: What it learns from that, as JSON.
    """
    told = identity(text=found.fingerprint, tokenizer=found.tokenizer.fingerprint)
    return {**told, **more}


def kept_documents(config: TrainConfig, found: Any) -> dict[str, Any]:
    """What each checkpoint of a run on what was opened has, as JSON."""
    return {
        "model": config_to_json(config.model),
        "tokenizer": found.tokenizer.to_json(),
        CHAT_DOCUMENT: found.chat.to_json(),
        **({"adapter": to_json(config.adapter)} if config.adapter else {}),
    }
