"""What whoever starts a server may choose."""

import dataclasses
from typing import Annotated

from colossax.config import Count, Natural, NotNegative, Positive, check_types, within
from colossax.errors import InputError

PORT = 8000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """How much one request, one client and all together may take.

    Attributes:
        body_bytes: Largest body of a request.
        body_s: Seconds that a body, or the head before it, may take to arrive.
        header_bytes: Largest head of a request: its line and headers.
        prompt_tokens: Longest prompt; None: what the model has slots for.
        choices: Most continuations of one request: its prompts times `n`.
        inputs: Most texts of one request for embeddings.
        queue: Continuations that may wait beside those with a seat; more are told to come later.
        rate: Requests a second that a key, or an address, may make in the long run; None: any.
        burst: Requests that it may make at once.
        stall_s: Seconds that a client may not read while there is something to read.
        buffer_bytes: Most that is kept for a client that does not read.
        grammar_s: Seconds that a grammar may take to compile.
        schema_bytes: Largest JSON schema, and all tools of a chat.
        scores: Most log-probabilities of a request's prompts, the likeliest's among them.
        template_chars: Longest prompt that a chat template may write.
    """

    body_bytes: Count = 4 << 20
    body_s: Positive = 30.0
    header_bytes: Annotated[int, within(1024, 1 << 20)] = 16 << 10
    prompt_tokens: Count | None = None
    choices: Count = 128
    inputs: Count = 2048
    queue: Natural = 256
    rate: Positive | None = None
    burst: Count = 32
    stall_s: Positive = 30.0
    buffer_bytes: Count = 1 << 20
    grammar_s: Positive = 5.0
    schema_bytes: Count = 64 << 10
    scores: Count = 1 << 18
    template_chars: Count = 4 << 20

    def __post_init__(self):
        check_types(self, "limits")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Where a server listens, to whom, and how it ends.

    Attributes:
        host: Address that it listens on.
        port: 0 takes any free one.
        api_key_file: Keys that are accepted, one a line; None: any, and none.
        cors: Origins whose pages may ask, `*` for all; none by default.
        drain_s: Seconds that running requests have to finish after SIGTERM.
        health_s: Seconds that a busy engine may go without a step before it is told to be unwell.
        limits: How much requests may take.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, within(0, 65535)] = PORT
    api_key_file: str | None = None
    cors: tuple[str, ...] = ()
    drain_s: NotNegative = 30.0
    health_s: Positive = 60.0
    limits: Limits = Limits()

    def __post_init__(self):
        check_types(self, "")
        for origin in self.cors:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise InputError(
                    f"--cors: found '{origin}'; give an origin as https://example.org, or *"
                )
