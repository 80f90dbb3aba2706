"""What is counted, in Prometheus' text form."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from colossax.serve.backend import Backend
from colossax.serve.http.generating import Clock
from colossax.serve.http.limits import Doors
from colossax.serve.http.records import Records

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_OF_REPLICAS = (
    "waiting", "seats_used", "pages_free", "pages_used", "pages_cached", "pages_host", "host_bytes",
)  # fmt: skip
_FIRST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BETWEEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 5)


class Metrics:
    """All counts of one server.

    Attributes:
        records: The last continuations one by one.
    """

    def __init__(self, backend: Backend, doors: Doors) -> None:
        self.records = Records()
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "colossax_requests",
            "Requests by endpoint and status.",
            ("endpoint", "status"),
            registry=self._registry,
        )
        self.prompt_tokens = Counter(
            "colossax_prompt_tokens", "Tokens of prompts.", registry=self._registry
        )
        self.tokens = Counter("colossax_tokens", "Tokens said.", registry=self._registry)
        self.of_model = Counter(
            "colossax_model_tokens",
            "Tokens said, by the name that was asked for: the model's or an adapter's.",
            ("model",),
            registry=self._registry,
        )
        self._first = Histogram(
            "colossax_first_token_seconds",
            "Time from a request to its first token.",
            buckets=_FIRST_S,
            registry=self._registry,
        )
        self._between = Histogram(
            "colossax_between_tokens_seconds",
            "Time from a token to the next of the same request.",
            buckets=_BETWEEN_S,
            registry=self._registry,
        )
        self.dropped = Counter(
            "colossax_dropped_streams",
            "Streams that ended because the client did not read, or went away.",
            ("why",),
            registry=self._registry,
        )
        self._registry.register(_OfEngine(backend, doors))

    def clock(self, since: float, prompt_tokens: int) -> Clock:
        """For one continuation of a prompt, that was asked for at this time."""
        record = self.records.begin(since, prompt_tokens)
        return Clock(since, record, self._first.observe, self._between.observe)

    def text(self) -> bytes:
        """All of it."""
        return generate_latest(self._registry)


class _OfEngine(Collector):
    """What the engine says of itself, asked when it is read."""

    def __init__(self, backend: Backend, doors: Doors) -> None:
        self._backend, self._doors = backend, doors

    def describe(self) -> Iterable[Metric]:
        """Nothing beforehand, so that registering asks for nothing."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Numbers of this moment."""
        found = self._backend.stats()
        gauges = {
            "inside": ("Continuations that run or wait in this server.", self._doors.inside),
            "waiting": ("Requests that wait for a seat.", found.waiting),
            "seats": ("Seats of the engine.", self._backend.facts.seats),
            "seats_used": ("Seats with a request.", found.seats_used),
            "pages_free": ("Pages of the cache that hold nothing.", found.pages_free),
            "pages_used": ("Pages that requests refer to.", found.pages_used),
            "pages_cached": ("Pages that hold prefixes.", found.pages_cached),
            "pages_host": ("Pages whose contents are in host memory.", found.pages_host),
            "host_bytes": ("What those take there.", found.host_bytes),
        }
        counts = {
            "prefix_hit_tokens": ("Tokens of prompts found in the cache.", found.prefix_hit_tokens),
            "pages_out": ("Pages copied to host memory.", found.pages_out),
            "pages_back": ("Pages copied from host memory.", found.pages_back),
            "preemptions": ("Requests that lost their pages to others.", found.preemptions),
            "drafted_tokens": ("Tokens that were guessed and looked at.", found.drafted),
            "accepted_tokens": ("Guessed tokens that were said.", found.accepted),
        }
        for name, (told, value) in gauges.items():
            yield GaugeMetricFamily(f"colossax_{name}", told, value=value)
            if name in _OF_REPLICAS and found.replicas:
                yield _by_replica(GaugeMetricFamily, name, told, found.replicas)
        for name, (told, value) in counts.items():
            yield CounterMetricFamily(f"colossax_{name}", told, value=value)
            if found.replicas:
                yield _by_replica(CounterMetricFamily, name, told, found.replicas)


_GUESSES = ("drafted_tokens", "accepted_tokens")


def _by_replica(
    family: Callable[..., Any], name: str, told: str, replicas: Sequence[Mapping[str, int]]
) -> Metric:
    """One of the numbers, of each replica."""
    found = family(f"colossax_replica_{name}", told, labels=("replica",))
    for number, counts in enumerate(replicas):
        found.add_metric(
            (str(number),), counts[name.removesuffix("_tokens") if name in _GUESSES else name]
        )
    return found


class Counted:
    """An application whose requests are counted by endpoint and status.

    Args:
        app: The application.
        metrics: Counts.
        endpoints: Paths that have a count of their own; all others are `other`.
    """

    def __init__(self, app: App, metrics: Metrics, endpoints: frozenset[str]) -> None:
        self._app, self._metrics, self._endpoints = app, metrics, endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path = scope["path"]
        endpoint = path if path in self._endpoints else "other"

        async def counting(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests.labels(endpoint, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counting)
