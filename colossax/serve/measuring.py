"""A server measured from outside: requests that come as people do, and what they wait for."""

import asyncio
import dataclasses
import json
import math
import random
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import httpx

from colossax.config import Count, Positive, Share, check_types, within
from colossax.errors import InputError

WORDS = (
    "the model reads what it is given and says what comes next, one token after another; a page"
    " holds sixteen of them, and 0123456789 (some) [signs] {more} are among its tokens. def f(x):"
)
"""Whose tokens prompts are drawn from: any server has some for it."""

MEDIAN_PROMPT, MEDIAN_SAID, SPREAD = 120, 180, 0.9
"""Of lengths that are spread as those of conversations (ShareGPT) are, in tokens; lognormal."""

TIMEOUT_S = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """What comes.

    Attributes:
        requests: How many.
        rate: Requests a second on average, at times of a Poisson process.
        longest: Most tokens of a prompt and of what is said, each.
        lengths: JSONL of `prompt` and `said`, numbers of tokens, taken in order and again from the
            first; None: lognormal.
        cancelled: Share of the requests that are given up halfway.
        seed: Of times, lengths and prompts.
    """

    requests: Count = 200
    rate: Positive = 8.0
    longest: Count = 512
    lengths: Path | None = None
    cancelled: Share = 0.0
    seed: Annotated[int, within(0, 2**32 - 1)] = 0

    def __post_init__(self):
        check_types(self, "load")


@dataclasses.dataclass(kw_only=True)
class Asked:
    """One request, and when it heard what; seconds since it was sent.

    Attributes:
        at_s: When it is sent, since the first.
        prompt: Tokens.
        said: Most tokens to say.
        gives_up: After how many pieces its client leaves; None: it stays.
        first_s: Its first piece.
        last_s: Its last.
        pieces: How many came.
        tokens: As the server counts them; of one that was given up, pieces.
        status: Of its answer; 0: the connection broke.
        problem: How; empty: it did not.
    """

    at_s: float
    prompt: list[int]
    said: int
    gives_up: int | None = None
    first_s: float = math.nan
    last_s: float = math.nan
    pieces: int = 0
    tokens: int = 0
    status: int = 0
    problem: str = ""

    @property
    def whole(self) -> bool:
        """Whether it heard all that it stayed for."""
        return self.status == 200 and (self.tokens > 0 or self.gives_up is not None)

    @property
    def between_s(self) -> float:
        """Mean time of a token behind the first."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else 0.0


def requests_of(load: Load, tokens: Sequence[int]) -> list[Asked]:
    """When what comes.

    Args:
        load: See there.
        tokens: That prompts are drawn from.

    Raises:
        InputError: The file of lengths cannot be read.
    """
    noise, now, found = random.Random(load.seed), 0.0, []
    lengths = None if load.lengths is None else _lengths(load.lengths)
    for i in range(load.requests):
        if lengths is None:
            prompt, said = (
                noise.lognormvariate(math.log(median), SPREAD)
                for median in (MEDIAN_PROMPT, MEDIAN_SAID)
            )
        else:
            prompt, said = lengths[i % len(lengths)]
        prompt, said = (max(1, min(load.longest, round(n))) for n in (prompt, said))
        leaves = noise.random() < load.cancelled
        found.append(
            Asked(
                at_s=now,
                prompt=[noise.choice(tokens) for _ in range(prompt)],
                said=said,
                gives_up=max(1, said // 2) if leaves else None,
            )
        )
        now += noise.expovariate(load.rate)
    return found


def _lengths(path: Path) -> list[tuple[int, int]]:
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        found = [(int(row["prompt"]), int(row["said"])) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise InputError(
            f"--lengths: {path} cannot be read ({problem}); give lines as"
            ' {"prompt": 120, "said": 80}'
        ) from problem
    if not found:
        raise InputError(f"--lengths: {path} is empty; give a line for each request")
    return found


async def measured(url: str, load: Load, *, key: str | None = None) -> list[Asked]:
    """All requests sent at their times, and heard to their ends.

    Args:
        url: Of the server, without `/v1`.
        load: What comes.
        key: Of the server.

    Raises:
        InputError: Nobody answers there, or not as such a server does.
    """
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    # Each with a connection of its own: a server may close an idle one just as it is used again.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url=url, headers=headers, limits=limits, timeout=TIMEOUT_S, trust_env=False
    ) as client:
        model, tokens = await _known(client, url)
        asked, began = requests_of(load, tokens), time.perf_counter()
        await asyncio.gather(*(_sent(client, model, one, began) for one in asked))
    return asked


async def _known(client: httpx.AsyncClient, url: str) -> tuple[str, list[int]]:
    """The model's name, and tokens to ask with."""
    try:
        models = await client.get("/v1/models")
        models.raise_for_status()
        name = models.json()["data"][0]["id"]
        found = await client.post("/tokenize", json={"model": name, "prompt": WORDS})
        found.raise_for_status()
        return name, sorted(set(found.json()["tokens"]))
    except (httpx.HTTPError, httpx.InvalidURL, KeyError, ValueError, IndexError) as problem:
        raise InputError(
            f"URL: no server of `colossax serve` answers at {url} ({problem}); give its address, as"
            " http://127.0.0.1:8000, and --key if it wants one"
        ) from problem


async def _sent(client: httpx.AsyncClient, model: str, one: Asked, began: float) -> None:
    await asyncio.sleep(max(0.0, began + one.at_s - time.perf_counter()))
    sent = time.perf_counter()
    body: dict[str, Any] = {
        "model": model,
        "prompt": one.prompt,
        "max_tokens": one.said,
        "temperature": 0,
        "seed": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            one.status = answer.status_code
            async for line in _lines(answer):
                if not line.startswith(b"data: {"):
                    continue
                piece = json.loads(line.removeprefix(b"data: "))
                if piece.get("usage"):
                    one.tokens = piece["usage"]["completion_tokens"]
                if not piece.get("choices"):
                    continue
                now = time.perf_counter() - sent
                one.first_s = now if math.isnan(one.first_s) else one.first_s
                one.last_s, one.pieces = now, one.pieces + 1
                if one.gives_up is not None and one.pieces >= one.gives_up:
                    one.tokens = one.pieces
                    return
    except (httpx.HTTPError, ValueError, LookupError) as problem:  # or no answer of such a server
        one.status, one.problem = 0, repr(problem)


async def _lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Of a stream of events: what ends a line in other texts is in the midst of one here."""
    held = b""
    async for came in answer.aiter_bytes():
        *whole, held = (held + came).split(b"\n")
        for line in whole:
            yield line


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a request must not wait longer for to count as good.

    Attributes:
        first_s: Its first token.
        between_s: Each further one, on average.
    """

    first_s: Positive = 1.0
    between_s: Positive = 0.1

    def __post_init__(self):
        check_types(self, "bounds")


def summary(asked: Sequence[Asked], bounds: Bounds) -> dict[str, Any]:
    """Numbers of a measurement: seconds, tokens a second, requests a second."""
    heard = [one for one in asked if one.whole and not math.isnan(one.first_s)]
    stayed = [one for one in heard if one.gives_up is None]
    wall_s = max((one.at_s + one.last_s for one in heard), default=math.nan)
    good = [
        one for one in stayed if one.first_s <= bounds.first_s and one.between_s <= bounds.between_s
    ]
    return {
        "requests": len(asked),
        "heard": len(heard),
        "given_up": sum(one.gives_up is not None for one in heard),
        "failed": {
            str(status): sum(one.status == status for one in asked if not one.whole)
            for status in sorted({one.status for one in asked if not one.whole})
        },
        "wall_s": wall_s,
        "prompt_tokens": sum(len(one.prompt) for one in heard),
        "said_tokens": sum(one.tokens for one in heard),
        "said_tokens_per_s": sum(one.tokens for one in heard) / wall_s,
        "requests_per_s": len(heard) / wall_s,
        "goodput_per_s": len(good) / wall_s,
        "good_share": len(good) / len(stayed) if stayed else math.nan,
        "first_token_s": _quantiles([one.first_s for one in heard]),
        "between_tokens_s": _quantiles([one.between_s for one in stayed if one.tokens > 1]),
        "request_s": _quantiles([one.last_s for one in stayed]),
    }


def _quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {}
    return {
        name: ordered[min(len(ordered) - 1, int(share * len(ordered)))]
        for name, share in {"p50": 0.5, "p90": 0.9, "p99": 0.99}.items()
    }
