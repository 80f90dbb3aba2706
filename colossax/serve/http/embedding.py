"""Embeddings: from what was asked to vectors."""

import asyncio
import math
from collections.abc import Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response

from colossax.errors import InputError
from colossax.serve.backend import Backend, EngineDown, EngineFailed, EngineFull
from colossax.serve.http import answers, fields
from colossax.serve.http.errors import bad
from colossax.serve.http.generating import refusal_of
from colossax.serve.http.limits import Doors, body_of
from colossax.serve.http.preparing import Preparer, check_running
from colossax.serve.http.reading import members
from colossax.serve.http.streaming import while_there
from colossax.serve.options import Limits

FORMATS = ("float", "base64")


class Embedding:
    """Answers with vectors.

    Args:
        backend: Tells them.
        preparer: Makes tokens of texts.
        doors: Who is inside.
        count: Is told of tokens that are read.
        limits: How much may be asked.
    """

    def __init__(
        self,
        backend: Backend,
        preparer: Preparer,
        doors: Doors,
        count: Callable[[float], None],
        limits: Limits,
    ) -> None:
        self._backend, self._preparer, self._doors = backend, preparer, doors
        self._count, self._limits = count, limits

    async def answer(self, request: Request) -> Response:
        """A vector of each text of a request.

        Raises:
            Refusal: It cannot be answered.
        """
        body = fields.json_of(await body_of(request, self._limits))
        found = members(body, "", fields.EMBEDDINGS, ("model", "input"))
        self._check_model(found["model"])
        packing = found.get("encoding_format", "float")
        if packing not in FORMATS:
            raise bad(
                f"encoding_format: found '{packing}'; give {' or '.join(FORMATS)}",
                "encoding_format",
            )
        dimensions, width = found.get("dimensions"), self._backend.facts.width
        if dimensions is not None and dimensions > width:
            raise bad(
                f"dimensions: found {dimensions}, and the model's embeddings have {width}; give at"
                f" most {width}",
                "dimensions",
            )
        if len(found["input"]) > (most := self._most):
            raise bad(f"input: has {len(found['input'])} texts; give at most {most}", "input")
        check_running(self._backend)
        prompts = await self._preparer.prompt_tokens(found["input"], "input")
        vectors = await self._vectors(request, [tuple(prompt) for prompt in prompts])
        if dimensions is not None:
            vectors = [shortened(one, dimensions, self._backend.facts.unit) for one in vectors]
        count = sum(map(len, prompts))
        self._count(count)
        packed = packing == "base64"
        told = await asyncio.to_thread(_written, found["model"], vectors, count, packed)
        return Response(told, media_type="application/json")

    @property
    def _most(self) -> int:
        """Texts that one request may have; more would never have room."""
        return min(self._limits.inputs, self._backend.facts.seats + self._limits.queue)

    def _check_model(self, name: str) -> None:
        if not self._backend.facts.embeds:
            name = self._backend.facts.model
            raise bad(f"model: {name} tells no embeddings; ask a server of a model that does")
        adapter = self._preparer.adapter(name)
        if adapter is not None:
            raise bad(f"model: the adapter '{adapter}' tells no embeddings", "model")

    async def _vectors(self, request: Request, prompts: list[tuple[int, ...]]) -> list[list[float]]:
        self._doors.enter(len(prompts))
        try:
            return await while_there(self._backend.embed(prompts), request.receive, self._doors)
        except (InputError, EngineFull, EngineDown, EngineFailed) as problem:
            raise refusal_of(problem) from None
        finally:
            self._doors.leave(len(prompts))


def shortened(vector: Sequence[float], dimensions: int, unit: bool) -> list[float]:
    """The first numbers of a vector.

    Args:
        vector: Of the model.
        dimensions: How many.
        unit: Whether they are brought to length 1 again.
    """
    kept = list(vector[:dimensions])
    length = math.sqrt(sum(x * x for x in kept)) if unit else 0.0
    return [x / length for x in kept] if length else kept


def _written(model: str, vectors: Sequence[Sequence[float]], count: int, packed: bool) -> bytes:
    return answers.dumped(answers.embeddings(model, vectors, count, packed=packed))
