"""The example of replicas behind Ray Serve: what a client is told, and what is left afterwards."""

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest

from colossax.cli import main
from tests.cli.test_serve import folder as folder

pytestmark = [pytest.mark.outside, pytest.mark.slow]

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_replicas.py"
BODY = {"model": "mine", "prompt": "the d", "max_tokens": 24}
RAY = (
    "--head",
    "--num-cpus=2",
    "--node-ip-address=127.0.0.1",
    "--object-store-memory=80000000",
    "--include-dashboard=false",
)
READY_S = 300


@pytest.fixture(scope="module")
def cluster():
    """A Ray of one machine, and the environment of those who join it."""
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    environment = os.environ | {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    }
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # names of sockets have to be short
        begun = [*ray, "start", *RAY, f"--port={port}", f"--temp-dir={place}"]
        subprocess.run(begun, env=environment, check=True, timeout=READY_S)
        try:
            yield environment | {"RAY_ADDRESS": f"127.0.0.1:{port}"}
        finally:
            subprocess.run([*ray, "stop"], env=environment, timeout=READY_S)


@pytest.fixture
def replicas(folder, cluster):
    """Two of them, as one address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["2", "0", str(port), str(folder / "mine")]
    served = ["--devices=2", "--seats=4", "--slots=64", "--deterministic"]
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLE), *words, *served],
        env=cluster,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        until = time.monotonic() + READY_S
        with contextlib.suppress(StopIteration):
            while next(process.stdout) != f"2 replicas on http://127.0.0.1:{port}/v1\n":
                assert time.monotonic() < until
        assert process.poll() is None
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.terminate()
        process.wait(120)
        process.stdout.close()


def asked(url, **more):
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(BODY | more).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=READY_S) as found:
        return found.read().decode()


def servers(folder):
    """Processes of `colossax serve` that Ray's replicas have begun."""
    words = ["pgrep", "-f", f"colossax serve {folder / 'mine'} "]
    return subprocess.run(words, capture_output=True, text=True).stdout.split()


def test_texts_are_those_of_generate(folder, replicas, capsys):
    """Whole and as streams, many at once; refusals come through; nothing is left at the end."""
    url, process = replicas
    capsys.readouterr()
    words = ["--prompt=the d", "--max-tokens=24", "--json", "--temperature=1", "--devices=2"]
    expected = {}
    for seed in (5, 6):
        assert main(["generate", str(folder / "mine"), *words, f"--seed={seed}"]) == 0
        expected[seed] = json.loads(capsys.readouterr().out)["text"]
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        whole = [pool.submit(asked, url, temperature=1, seed=5 + i % 2) for i in range(8)]
        stream = pool.submit(asked, url, temperature=1, seed=5, stream=True)
        for i, one in enumerate(whole):
            assert json.loads(one.result())["choices"][0]["text"] == expected[5 + i % 2]
    lines = [line[6:] for line in stream.result().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    pieces = [json.loads(line)["choices"][0]["text"] for line in lines[:-1]]
    assert len(pieces) > 1 and "".join(pieces) == expected[5]
    with pytest.raises(urllib.error.HTTPError, match="400") as refused:
        asked(url, temperature=9)
    assert json.loads(refused.value.read())["error"]["param"] == "temperature"
    assert len(servers(folder)) >= 2
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0
    until = time.monotonic() + 60
    while servers(folder) and time.monotonic() < until:
        time.sleep(0.5)
    assert not servers(folder)
