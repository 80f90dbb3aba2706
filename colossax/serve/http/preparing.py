"""From what was asked to what an engine is asked: models, tokens, lengths, seeds, grammars."""

import asyncio
import dataclasses
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from colossax.data.chats.template import ChatTemplate
from colossax.errors import InputError
from colossax.scheduling import EngineRequest
from colossax.scheduling.keep import WORDS
from colossax.serve.backend import Backend
from colossax.serve.grammar import Grammars
from colossax.serve.http.echoing import NOTHING, Echo
from colossax.serve.http.errors import bad, no_model, unavailable
from colossax.serve.http.fields import Ask
from colossax.serve.options import Limits

T = TypeVar("T")
_SEEDS = 2**32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """One continuation to be made.

    Attributes:
        index: Of the answer's choice.
        request: What the engine is asked.
        echo: What is told of the prompt before the continuation.
    """

    index: int
    request: EngineRequest
    echo: Echo = NOTHING


class Preparer:
    """Makes requests of an engine out of what was asked; slow parts run in threads.

    Args:
        backend: Whose facts count.
        limits: How much may be asked.
    """

    def __init__(self, backend: Backend, limits: Limits) -> None:
        self._backend, self._limits = backend, limits
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="prepare")
        # Their own: compiling that is given up goes on until it has an end.
        self._compiling = ThreadPoolExecutor(2, thread_name_prefix="grammar")
        self._grammars: Grammars | None = None
        self._template: ChatTemplate | None = None

    def close(self) -> None:
        """End the threads."""
        for pool in (self._threads, self._compiling):
            pool.shutdown(wait=False, cancel_futures=True)

    async def wanted(self, ask: Ask) -> list[Wanted]:
        """All continuations that were asked for, in the order of the answer's choices.

        Raises:
            Refusal: The model is not served, or a value cannot be honoured with this model.
        """
        adapter = self.adapter(ask.model)
        if not self._backend.facts.speaks:
            raise bad(
                f"model: {ask.model} tells embeddings and continues no text; ask /v1/embeddings",
                "model",
            )
        count = ask.n * max(1, len(ask.prompts))
        if count > (most := self.most_choices):
            raise bad(
                f"n: asks for {count} continuations in all; ask for at most {most} at a time", "n"
            )
        self._check_ids([token for token, _ in ask.sampling.logit_bias], "logit_bias")
        if ask.keep is not None and ask.keep.kind != (keeps := self._backend.facts.keeps):
            kept = "all tokens" if keeps is None else f"{WORDS[keeps]} and a window"
            raise bad(
                f"keep: this server keeps {kept} of each request; leave it out, or ask one that was"
                f" started with --keeps {ask.keep.kind}",
                "keep",
            )
        if ask.messages:
            prompts = [await self.chat_tokens(ask.messages, ask.tools.given)]
        else:
            prompts = await self.prompt_tokens(ask.prompts, "prompt")
        lengths = [self._length(ask, prompt) for prompt in prompts]
        echoes = self._echoes(ask, prompts)
        self._check_scores(ask, echoes)
        grammar = await self._grammar_of(ask)
        return [
            Wanted(
                index=i * ask.n + j,
                request=EngineRequest(
                    prompt=tuple(prompt),
                    max_tokens=max(length, 1),
                    score_from=1 if echo.scored else None,
                    ends=self._backend.facts.ends,
                    sampling=dataclasses.replace(ask.sampling, seed=_seed(ask.seed, j)),
                    waits=grammar is not None,
                    grammar=grammar,
                    adapter=adapter,
                    keep=ask.keep,
                ),
                echo=echo,
            )
            for i, (prompt, length, echo) in enumerate(zip(prompts, lengths, echoes, strict=True))
            for j in range(ask.n)
        ]

    @property
    def most_choices(self) -> int:
        """Continuations that one request may ask for; more would never have room."""
        return min(self._limits.choices, self._backend.facts.seats + self._limits.queue)

    def adapter(self, model: str) -> str | None:
        """The adapter that a model's name means; None: the base model.

        Raises:
            Refusal: 404, it is not served.
        """
        facts = self._backend.facts
        if model not in facts.names:
            raise no_model(model, facts.names)
        return None if model == facts.model else model

    async def prompt_tokens(
        self, prompts: Sequence[str | tuple[int, ...]], name: str
    ) -> list[list[int]]:
        """Token ids of prompts.

        Raises:
            Refusal: 400, one is too long or has ids that the model does not know.
        """
        found = []
        for i, prompt in enumerate(prompts):
            where = name if len(prompts) == 1 else f"{name}[{i}]"
            if isinstance(prompt, str):
                tokens = await self._in_thread(self._encode, prompt)
            else:
                self._check_ids(prompt, where)
                tokens = list(prompt)
            found.append(self._checked(tokens, where))
        return found

    def _encode(self, text: str) -> list[int]:
        """Of a text that is continued nothing stands around; of one that is read whole it does."""
        facts = self._backend.facts
        return (facts.tokenizer.encode if facts.speaks else facts.tokenizer.encode_framed)(text)

    async def chat_tokens(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Token ids of a chat.

        Raises:
            Refusal: 400, the model has no template, or its template refuses them.
        """
        try:
            template = self._chat_template()
            if tools and not template.takes_tools:
                raise bad(
                    f"tools: the chat template of {self._backend.facts.model} does not tell the"
                    " model of tools; leave them out, or ask for JSON by response_format",
                    "tools",
                )
            size, most = len(json.dumps(tools).encode()), self._limits.schema_bytes
            if size > most:  # a template may write them with more blanks than letters
                raise bad(f"tools: are {size} bytes; give at most {most}", "tools")
            tokens = await self._in_thread(template.tokens, messages, tools)
        except InputError as problem:
            raise bad(str(problem), "messages") from None
        return self._checked(tokens, "messages")

    def _chat_template(self) -> ChatTemplate:
        facts = self._backend.facts
        if facts.chat_template is None:
            raise bad(
                f"messages: {facts.model} has no chat template; give 'prompt' to /v1/completions",
                "messages",
            )
        if self._template is None:
            self._template = ChatTemplate(
                facts.chat_template,
                facts.tokenizer,
                bos=facts.bos,
                eos=facts.eos,
                most_chars=self._limits.template_chars,
            )
        return self._template

    def _check_ids(self, tokens: Sequence[int], name: str) -> None:
        vocab = self._backend.facts.vocab
        wrong = next((token for token in tokens if not 0 <= token < vocab), None)
        if wrong is not None:
            raise bad(f"{name}: has token {wrong}; give ids from 0 to {vocab - 1}", name)

    def _checked(self, tokens: list[int], name: str) -> list[int]:
        slots, most = self._backend.facts.slots, self._limits.prompt_tokens
        longest = min(slots - self._backend.facts.speaks, most or slots)
        if not tokens:
            raise bad(f"{name}: has no tokens; give at least one", name)
        if len(tokens) > longest:
            raise bad(
                f"{name}: has {len(tokens)} tokens; at most {longest} are read",
                name,
                "context_length_exceeded",
            )
        return tokens

    def _length(self, ask: Ask, prompt: Sequence[int]) -> int:
        room = self._backend.facts.slots - len(prompt)
        if ask.max_tokens is not None and ask.max_tokens > room:
            raise bad(
                f"max_tokens: {ask.max_tokens} beside a prompt of {len(prompt)} are more than the"
                f" {self._backend.facts.slots} tokens there is room for; give at most {room}",
                "max_tokens",
                "context_length_exceeded",
            )
        return room if ask.max_tokens is None else ask.max_tokens

    def _echoes(self, ask: Ask, prompts: Sequence[Sequence[int]]) -> list[Echo]:
        if not ask.echo:
            return [NOTHING] * len(prompts)
        decode = self._backend.facts.tokenizer.decode
        scored, alone = ask.sampling.logprobs is not None, ask.max_tokens == 0
        return [
            Echo(
                text=said if isinstance(said, str) else decode(ids),
                prompt=tuple(ids),
                scored=scored,
                alone=alone,
            )
            for said, ids in zip(ask.prompts, prompts, strict=True)
        ]

    def _check_scores(self, ask: Ask, echoes: Sequence[Echo]) -> None:
        """They are told at once, and kept for a client that does not read."""
        each = ask.n * (1 + (ask.sampling.logprobs or 0))
        scores = each * sum(len(echo.prompt) for echo in echoes if echo.scored)
        if scores > (most := self._limits.scores):
            raise bad(
                f"logprobs: with 'echo' asks for {scores} log-probabilities of prompts; ask for at"
                f" most {most} at a time: fewer prompts, or fewer of the likeliest tokens",
                "logprobs",
            )

    async def _grammar_of(self, ask: Ask) -> str | None:
        if ask.tools.enforced is not None:
            return await self._compiled(ask.tools.enforced, "tools")
        return None if ask.schema is None else await self._compiled(ask.schema, "response_format")

    async def _compiled(self, schema: str, name: str) -> str:
        limits = self._limits
        if len(schema.encode()) > limits.schema_bytes:
            raise bad(
                f"{name}: its schema has {len(schema.encode())} bytes; give at most"
                f" {limits.schema_bytes}",
                name,
            )
        work = asyncio.get_running_loop().run_in_executor(
            self._compiling, self._grammar, schema, name
        )
        try:
            async with asyncio.timeout(limits.grammar_s):
                return await asyncio.shield(work)
        except InputError as problem:
            raise bad(str(problem), name) from None
        except TimeoutError:
            work.add_done_callback(_heard)
            raise bad(
                f"{name}: its schema takes more than {limits.grammar_s:g} s to compile; make it"
                " simpler",
                name,
            ) from None

    def _grammar(self, schema: str, name: str) -> str:
        facts = self._backend.facts
        if self._grammars is None:
            self._grammars = Grammars(facts.tokenizer, facts.vocab, facts.ends)
        return self._grammars.compiled(schema, name)

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)


def _heard(work: asyncio.Future[str]) -> None:
    """Nobody waits for it any more, and asyncio would say that its failure was never heard."""
    if not work.cancelled():
        work.exception()


def _seed(given: int | None, choice: int) -> int:
    """Of a choice: the given one and those after it, or any."""
    return secrets.randbelow(_SEEDS) if given is None else (given + choice) % _SEEDS


def check_running(backend: Backend) -> None:
    """Refuse while programs are compiled.

    Raises:
        Refusal: 503.
    """
    if not backend.ready():
        raise unavailable("the model is not ready yet; ask /ready when it is", "not_ready")
