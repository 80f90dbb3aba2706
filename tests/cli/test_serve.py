"""`colossax serve` on a checkpoint, asked by OpenAI's own client."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import jax
import pytest

from colossax.cli import main
from colossax.config import Plan
from tests.launching import write_text

BASE = (
    "llama_tiny --model.layers=2 --model.embed=64 --model.mlp=128 --model.heads=4"
    " --model.kv_heads=2 --model.vocab=300 --data.tokenizer_vocab=300 --data.seq_len=64"
    " --data.global_batch=8 --data.validation_batches=1 --sample.prompt= --trackers=json --json"
    " --steps=2 --plan.mesh=fsdp=2"
).split()
READY_S = 120


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    assert len(jax.devices()) == 8  # before --devices asks for fewer
    folder = tmp_path_factory.mktemp("serve")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLOSSAX_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        text = f"--data={write_text(folder / 'text')}"
        assert main(["train", *BASE, "--out=mine", "--devices=2", text]) == 0
        yield folder


class Server:
    """One of a port that is free, until the block ends."""

    def __init__(self, *words, checkpoint="mine"):
        self.words, self.checkpoint = words, checkpoint

    def __enter__(self):
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        command = [sys.executable, "-m", "colossax", "serve", self.checkpoint]
        command += [f"--port={self.port}"]
        self.process = subprocess.Popen([*command, *self.words], stderr=subprocess.PIPE, text=True)
        until = time.monotonic() + READY_S
        while self.get("ready") != 200:
            assert self.process.poll() is None, self.process.stderr.read()
            assert time.monotonic() < until
            time.sleep(0.2)
        return self

    def get(self, path):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{path}", timeout=5) as found:
                return found.status
        except urllib.error.HTTPError as problem:
            return problem.code
        except OSError:
            return None

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process.stderr.close()

    @property
    def engine(self):
        found = subprocess.run(
            ["pgrep", "-f", f"port={self.port}.*--engine-fd"], capture_output=True, text=True
        )
        return int(found.stdout.split()[0])


@pytest.mark.slow
def test_what_a_client_is_told(folder, capsys):
    """The text of `generate`, whole and as a stream, also over the death of the engine; then 0."""
    import openai

    capsys.readouterr()
    words = ["--prompt=the d", "--max-tokens=24", "--json", "--temperature=1", "--seed=5"]
    assert main(["generate", "mine", *words, "--devices=2"]) == 0
    expected = json.loads(capsys.readouterr().out)["text"]
    with Server(
        "--devices=2", "--plan.mesh=tensor=2", "--seats=4", "--slots=64", "--deterministic"
    ) as server:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any")
        assert [model.id for model in client.models.list()] == ["mine"]
        asked = {"model": "mine", "prompt": "the d", "max_tokens": 24, "temperature": 1, "seed": 5}
        assert client.completions.create(**asked).choices[0].text == expected
        pieces = [one.choices[0].text for one in client.completions.create(**asked, stream=True)]
        assert "".join(pieces) == expected
        with pytest.raises(openai.BadRequestError, match="template"):
            client.chat.completions.create(
                model="mine", messages=[{"role": "user", "content": "a"}]
            )
        # In the midst of three streams, each of which goes on where it was.
        others = [{**asked, "seed": i, "max_tokens": 40} for i in range(2)]
        alone = [client.completions.create(**one).choices[0].text for one in others]
        streams = [client.completions.create(**one, stream=True) for one in (asked, *others)]
        heard = [[next(stream).choices[0].text] for stream in streams]
        os.kill(server.engine, signal.SIGKILL)
        for found, stream in zip(heard, streams, strict=True):
            found += [one.choices[0].text for one in stream]
        assert ["".join(found) for found in heard] == [expected, *alone]
        journals = list((folder / "cache" / "serve").iterdir())
        assert [path.stat().st_mode & 0o777 for path in journals] == [0o600]
        assert server.end() == 0
        told = server.process.stderr.read()
    assert "SIGKILL" in told and "Traceback" not in told
    assert not list((folder / "cache" / "serve").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=2,tensor=2", "stage=2,tensor=2"])
def test_engines_that_share_requests(mesh, folder, capsys):
    """Two of two devices each, by a mesh and by a plan in a file: the text of `generate`, and
    counts of both."""
    import openai

    capsys.readouterr()
    words = ["--prompt=the d", "--max-tokens=24", "--json", "--temperature=1", "--seed=5"]
    assert main(["generate", "mine", *words, "--devices=2"]) == 0
    expected = json.loads(capsys.readouterr().out)["text"]
    seats = 2 if mesh.startswith("data") else 4
    plan = ["--devices=4", f"--plan.mesh={mesh}"]
    if mesh.startswith("data"):
        (folder / "plan.json").write_text(Plan(mesh={"data": 2, "tensor": 2}).to_json(), "utf-8")
        plan = ["--devices=4", "--plan=plan.json"]
    with Server(*plan, f"--seats={seats}", "--slots=64", "--deterministic") as server:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any")
        asked = {"model": "mine", "prompt": "the d", "max_tokens": 24, "temperature": 1, "seed": 5}
        streams = [client.completions.create(**asked, stream=True) for _ in range(4)]
        for stream in streams:
            assert "".join(one.choices[0].text for one in stream) == expected
        told = urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics").read().decode()
        assert "colossax_seats 4.0" in told
        for replica in range(2):
            assert f'colossax_replica_pages_cached{{replica="{replica}"}} 1.0' in told
        assert server.end() == 0


@pytest.mark.slow
@pytest.mark.sweep
def test_prompts_come_back_from_host_memory(folder):
    """Four pages for one seat: each prompt drives out the other's, and the text is the same."""
    import openai

    sizes = "--seats=1", "--slots=64", "--pages=4", "--host-pages=8"
    with Server(*sizes, "--deterministic") as server:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any")
        asked = {"model": "mine", "max_tokens": 8, "temperature": 0}
        prompts = ("the dog and the cat ran " * 2, "a bird sang on a green tree " * 2)
        said = [
            client.completions.create(**asked, prompt=prompts[i % 2]).choices[0].text
            for i in range(4)
        ]
        assert said[:2] == said[2:]
        told = urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics").read().decode()
        counts = dict(one.split() for one in told.splitlines() if " " in one and one[0] != "#")
        assert server.end() == 0
    assert float(counts["colossax_pages_back_total"]) >= 2
    assert float(counts["colossax_host_bytes"]) > 0 < float(counts["colossax_pages_host"])


@pytest.mark.parametrize(
    "words, message",
    [
        (["mine", "--adapter=mine"], "--adapter: 'mine' holds a whole model; give it as CHECK"),
        (["nowhere"], "checkpoint directory 'nowhere' does not exist"),
        (["mine", "--cache=int4"], "--cache: found 'int4'; give own, int8 or fp8"),
        (["mine", "--slots=9999"], "--slots: found 9999, but the model's longest sequence is"),
        (["mine", "--plan.mesh=stage=4", "--devices=4"], "'stage': 2 layers cannot be shared by 4"),
        (["mine", "--chat-template=none.jinja"], "--chat-template: .*none.jinja cannot be read"),
        (["mine", "--api-key-file=none"], "none"),
        (["mine", "--port=70000"], "--port"),
        (["mine", "--host-pages=-1"], "--host-pages"),
        (["mine", "--host-pages=9", "--no-prefix-reuse"], "host_pages: found 9, and prompts that"),
    ],
)
@pytest.mark.slow
def test_refusals(words, message, capfd):
    assert main(["serve", "--port=0", *words]) == 2
    err = capfd.readouterr().err
    assert re.search(message, err) and "Traceback" not in err


@pytest.mark.slow
def test_what_the_page_does_from_python(capsys):
    page = Path(__file__).parents[2].joinpath("docs", "serving.md").read_text(encoding="utf-8")
    scripts = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (script,) = (one for one in scripts if "EngineRequest" in one)
    capsys.readouterr()
    exec(script.replace("runs/mine", "mine"), {})
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(said) == 64 and len({tuple(one) for one in said}) > 1


def test_a_port_in_use(capsys):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        assert main(["serve", "mine", f"--port={port}"]) == 2
    assert f"--port: 127.0.0.1:{port} is in use" in capsys.readouterr().err
