"""A real server at a port: official clients, clients that leave or do not read, and its end."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import httpx
import openai
import pytest

from colossax.errors import InputError
from colossax.serve import ServeOptions, bound, serve
from colossax.serve.backend import Stats
from colossax.serve.options import Limits
from tests.serve.fake import TOKENIZER, FakeEngine
from tests.serve.site import error_of, events, running, until

COMPLETION = {"model": "toy", "prompt": "hello", "seed": 3, "max_tokens": 20}
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "seed": 3}


def options(**given):
    limits = Limits(**{name: given.pop(name) for name in [*given] if hasattr(Limits, name)})
    return ServeOptions(**({"port": 0, "drain_s": 5.0} | given), limits=limits)


def client_of(server, key="any"):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def saying():
    with running(FakeEngine(TOKENIZER.encode('say \N{GRINNING FACE} "well"'), embeds=True)) as one:
        yield one


def test_the_official_client_reads_whole_answers(saying):
    with client_of(saying) as client:
        text = 'say \N{GRINNING FACE} "well"'
        told = client.completions.create(**COMPLETION, logprobs=2)
        assert told.choices[0].text == text and told.choices[0].finish_reason == "stop"
        assert told.choices[0].logprobs.tokens[0] == "s"
        assert told.usage.completion_tokens == len(TOKENIZER.encode(text)) + 1
        told = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=1, n=2)
        assert [choice.message.content for choice in told.choices] == [text, text]
        assert told.choices[1].message.role == "assistant"
        assert bytes(told.choices[0].logprobs.content[0].bytes) == b"s"
        assert [model.id for model in client.models.list()] == ["toy", "tuned"]
        assert client.models.retrieve("tuned").id == "tuned"
        told = client.embeddings.create(model="toy", input=["a", "b"])
        assert len(told.data) == 2 and len(told.data[1].embedding) == 4


def test_the_official_client_reads_streams(saying):
    with client_of(saying) as client:
        text = 'say \N{GRINNING FACE} "well"'
        stream = client.completions.create(**COMPLETION, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == text
        stream = client.chat.completions.create(
            **CHAT, stream=True, stream_options={"include_usage": True}
        )
        *chunks, last = stream
        said = [chunk.choices[0].delta.content or "" for chunk in chunks]
        assert "".join(said) == text and chunks[-1].choices[0].finish_reason == "stop"
        assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


def test_the_official_client_raises_what_it_documents(saying):
    with client_of(saying) as client:
        with pytest.raises(openai.BadRequestError) as problem:
            client.completions.create(**(COMPLETION | {"temperature": 9}))
        assert problem.value.param == "temperature" and problem.value.status_code == 400
        with pytest.raises(openai.NotFoundError) as problem:
            client.completions.create(**(COMPLETION | {"model": "gpt-4"}))
        assert problem.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError, match="does not tell the model of tools"):
            client.chat.completions.create(
                **CHAT, tools=[{"type": "function", "function": {"name": "f"}}]
            )


def test_the_official_client_hears_of_keys_and_rates(tmp_path):
    file = tmp_path / "keys"
    file.write_text("right\n")
    with running(FakeEngine(), options(api_key_file=str(file), rate=0.001, burst=1)) as server:
        with client_of(server, "wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with client_of(server, "right") as client:
            client.models.list()
            with pytest.raises(openai.RateLimitError) as problem:
                client.models.list()
            assert int(problem.value.response.headers["retry-after"]) > 900


def test_the_official_client_hears_of_an_engine_that_breaks():
    with running(FakeEngine(ends_with="error")) as server, client_of(server) as client:
        with pytest.raises(openai.InternalServerError, match="it broke"):
            client.completions.create(**COMPLETION)
        with pytest.raises(openai.APIError, match="it broke"):
            list(client.completions.create(**COMPLETION, stream=True))


def unchunked(answer):
    """The body of an answer in chunks."""
    rest, body = answer.partition(b"\r\n\r\n")[2], b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body


class Raw:
    """A connection, by hand."""

    def __init__(self, server, receive_bytes=None):
        self.socket = socket.socket()
        if receive_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.settimeout(10)
        self.socket.connect(("127.0.0.1", server.port))

    def post(self, path, body, more=b""):
        content = json.dumps(body).encode()
        self.socket.sendall(
            b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n%s\r\n" % (path.encode(), len(content), more) + content
        )
        return self

    def answer(self):
        """All that comes until the server closes, as status and body."""
        found = b""
        while piece := self.socket.recv(65536):
            found += piece
        head, _, body = found.partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(body)

    def __enter__(self):
        return self

    def __exit__(self, *problem):
        self.socket.close()


@pytest.mark.catches("gone-goes-on")
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(stream):
    engine = FakeEngine(step_s=0.02, slots=4096)
    with running(engine) as server:
        with Raw(server) as raw:
            raw.post("/v1/completions", COMPLETION | {"stream": stream, "max_tokens": 4000})
            until(lambda: engine.running)
            if stream:
                assert raw.socket.recv(100)
        until(lambda: engine.cancelled == [1])
        until(lambda: server.api.doors.inside == 0 and engine.running == 0)


@pytest.mark.catches("slow-reader-stays")
@pytest.mark.parametrize(
    "limits",
    [{"stall_s": 0.3, "buffer_bytes": 1 << 30}, {"buffer_bytes": 1 << 15, "stall_s": 60.0}],
)
def test_a_client_that_does_not_read_is_dropped_and_holds_up_nobody(limits):
    long = TOKENIZER.encode("x" * 3000)
    engine = FakeEngine(long, slots=100_000)
    with running(engine, options(**limits)) as server:
        server._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with Raw(server, receive_bytes=4096) as raw:
            body = COMPLETION | {"max_tokens": 3000, "n": 2, "stream": True}
            raw.post("/v1/completions", body)
            until(lambda: engine.asked)  # it may be dropped before anybody has looked
            answer = httpx.post(f"{server.url}/v1/completions", json=COMPLETION, timeout=10)
            assert answer.json()["choices"][0]["text"] == "x" * 20
            until(lambda: server.api.doors.inside == 0)
            until(lambda: not server.server.server_state.connections)
            lines = httpx.get(f"{server.url}/metrics").text
            assert 'colossax_dropped_streams_total{why="slow"} 1.0' in lines
            assert engine.running == 0


def test_a_client_that_reads_late_gets_all():
    engine = FakeEngine(TOKENIZER.encode("y" * 3000), slots=100_000)
    with running(engine, options(stall_s=20.0, buffer_bytes=1 << 30)) as server:
        server._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with Raw(server, receive_bytes=4096) as raw:
            body = COMPLETION | {"max_tokens": 3000, "stream": True}
            raw.post("/v1/completions", body, b"Connection: close\r\n")
            until(lambda: engine.finished)
            time.sleep(0.2)
            found = b""
            while piece := raw.socket.recv(65536):
                found += piece
        pieces = [chunk["choices"][0]["text"] for chunk in events(unchunked(found).decode())]
        assert "".join(pieces) == "y" * 3000


@pytest.mark.catches("head-without-end")
def test_heads_that_are_too_large_or_no_http_are_refused():
    with running(FakeEngine(), options(header_bytes=2048)) as server:
        answer = httpx.get(f"{server.url}/v1/models", headers={"X": "a" * 1000})
        assert answer.status_code == 200
        with Raw(server) as raw:
            raw.socket.sendall(b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 5000)
            status, body = raw.answer()
            assert status == 431 and body["error"]["code"] == "headers_too_large"
        for junk in (b"hello\r\n\r\n", b"GET / HTTP/1.1\r\nHost a\r\n\r\n", b"\x16\x03\x01\x00"):
            with Raw(server) as raw:
                raw.socket.sendall(junk + b"\r\n\r\n")
                status, body = raw.answer()
                assert status == 400 and body["error"]["code"] == "invalid_http"


@pytest.mark.catches("half-a-body-waits")
def test_what_arrives_by_halves_is_given_up():
    with running(FakeEngine(), options(body_s=0.7)) as server:
        with Raw(server) as raw:
            raw.socket.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{"
            )
            status, body = raw.answer()
            assert status == 408 and "within 0.7 s" in body["error"]["message"]
        with Raw(server) as raw:
            raw.socket.sendall(b"GET /v1/models HTTP/1.1\r\nHost")
            assert raw.socket.recv(10) == b""
        with Raw(server) as raw:
            assert raw.socket.recv(10) == b""
        with Raw(server) as raw:
            head = b"POST /nowhere HTTP/1.1\r\nHost: a\r\nContent-Length: 999\r\n\r\n"
            raw.socket.sendall(head)
            assert b"404" in raw.socket.recv(4096)
            start = time.monotonic()
            with pytest.raises(OSError):  # noqa: PT011 (whichever says that it is closed)
                while time.monotonic() < start + 10:
                    raw.socket.sendall(b"a")
                    time.sleep(0.05)
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_body_of_ten_megabytes_hears_why():
    with running(FakeEngine()) as server, httpx.Client(base_url=server.url) as client:
        body = b" " * 10_000_000
        for content in (body, iter([body])):
            answer = client.post("/v1/completions", content=content)
            assert error_of(answer, 413)["code"] == "request_too_large"
        assert client.post("/v1/completions", json=COMPLETION).status_code == 200


@pytest.mark.catches("drain-does-not-wait")
def test_those_inside_finish_when_it_ends():
    engine = FakeEngine(hold=True)
    with running(engine, options(drain_s=30.0)) as server:
        answers = []

        def ask(stream):
            body = COMPLETION | {"stream": stream}
            answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=20))

        askers = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
        for one in askers:
            one.start()
        until(lambda: engine.running == 2)
        server.server.drain()
        time.sleep(0.3)  # three times as long as a server needs to see that it may end
        answer = httpx.post(f"{server.url}/v1/completions", json=COMPLETION)
        assert error_of(answer, 503)["code"] == "draining"
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert server.thread.is_alive()
        engine.loop.call_soon_threadsafe(engine.go.set)
        for one in askers:
            one.join(10)
        server.thread.join(10)
        assert not server.thread.is_alive()
        assert [answer.status_code for answer in answers] == [200, 200]
        assert any(answer.text.endswith("data: [DONE]\n\n") for answer in answers)
        assert engine.life == ["start", "close"] and not engine.cancelled


def test_those_who_do_not_finish_are_ended():
    engine = FakeEngine(hold=True)
    with running(engine, options(drain_s=0.2)) as server:
        answers = []
        asker = threading.Thread(
            target=lambda: answers.append(
                httpx.post(f"{server.url}/v1/completions", json=COMPLETION, timeout=20)
            )
        )
        asker.start()
        until(lambda: engine.running)
        server.server.drain()
        asker.join(10)
        server.thread.join(10)
        assert error_of(answers[0], 503)["code"] == "draining" and engine.cancelled == [1]


SERVER = """
    import sys
    from tests.serve.fake import FakeEngine
    from colossax.serve import ServeOptions, bound, serve
    assert "jax" not in sys.modules
    options = ServeOptions(port=0, drain_s=20.0)
    sock = bound(options)
    print(sock.getsockname()[1], flush=True)
    code = serve(FakeEngine(step_s=0.05, script=[70] * 40), options, sock)
    assert "jax" not in sys.modules and "numpy" in sys.modules
    sys.exit(code)
"""


@pytest.mark.catches("sigterm-is-a-failure")
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signals_let_those_inside_finish(sent, code):
    root = pathlib.Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SERVER)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        url = f"http://127.0.0.1:{process.stdout.readline().strip()}"
        until(lambda: answers(f"{url}/ready"), 60)
        body = COMPLETION | {"max_tokens": 40, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(sent)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and len(rest) == 40
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out, err) == (code, "", "")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def answers(url):
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.catches("port-in-use-is-taken")
def test_a_port_in_use_is_refused_in_one_sentence():
    with bound(ServeOptions(port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError) as refusal:
            bound(ServeOptions(port=port))
        assert str(refusal.value) == (
            f"--port: 127.0.0.1:{port} is in use; give another port, or 0 for any"
        )


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(InputError, match="--port: 192.0.2.1:0 cannot be taken"):
        bound(ServeOptions(host="192.0.2.1", port=0))
    with pytest.raises(InputError, match="--host: not a host is no address"):
        bound(ServeOptions(host="not a host", port=0))


def test_what_an_engine_fails_with_when_it_is_started_is_raised():
    engine = FakeEngine()

    async def failing():
        raise InputError("model: is not there; name another")

    engine.start = failing
    with pytest.raises(InputError, match="model: is not there"):
        serve(engine, options())


@pytest.mark.catches("server-without-an-engine-stays")
def test_a_server_whose_engine_failed_for_good_ends():
    """By itself, when those inside have heard of it."""
    engine, again = FakeEngine(), FakeEngine()
    engine.now = again.now = Stats(failed="the engine ended 5 times in a row")
    with running(engine, options()) as server:
        until(lambda: not server.thread.is_alive(), 20)
    assert engine.life == ["start", "close"]
    assert serve(again, options()) == 1
