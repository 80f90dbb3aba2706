"""How long others wait while a long prompt is read, and how soon a server answers.

`gaps`: seats decode when a prompt of 8,192 tokens comes. The longest time between two steps that
gave them tokens is measured with the prompt cut into steps of `--mixed` tokens, and beside it with
a step that takes the prompt whole, as schedulers without chunks do. `step_s` is what a full step
takes behind most of the prompt (the median of its last eighth), which no cut can be below: the bar
is 1.3 times that.
`ready`: seconds from the start of `colossax serve` to its first 200 of `/ready`, for a tiny model,
with nothing compiled before, for which the bar is, and with the programs of the run before.

    python bench/serve_gaps.py [--prompt 8192] [--mixed 512] [--out FILE]
"""

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import common
import random_llama

MODEL = {"vocab": 512, "embed": 256, "mlp": 704, "layers": 2, "heads": 4, "kv_heads": 1}
DECODING, BAR, BAR_READY_S = 7, 1.3, 15.0
TRAINED = (
    "train llama_tiny --steps=1 --sample.prompt= --trackers=json --json --data.validation_batches=1"
).split()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of the long one")
    parser.add_argument("--mixed", type=int, default=512, help="tokens of a step with prompts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=common.HERE / "results" / "serve_gaps.json")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        print(json.dumps(gaps(given.prompt, given.worker, given.rounds)))
        return
    here, words = Path(__file__).resolve(), [f"--prompt={given.prompt}"]
    cut = common.run_worker(
        here, [*words, f"--worker={given.mixed}", f"--rounds={given.rounds}"], JAX_PLATFORMS="cpu"
    )
    whole = common.run_worker(
        here, [*words, f"--worker={given.prompt + DECODING}", "--rounds=1"], JAX_PLATFORMS="cpu"
    )
    answers = ready()
    ratio = cut["gap_s"] / cut["step_s"]
    rows = [
        [name, one["mixed"], one["step_s"], one["gap_s"], one["gap_s"] / cut["step_s"]]
        for name, one in (("cut", cut), ("whole", whole))
    ]
    print(common.table(["prompt", "tokens a step", "step s", "longest gap s", "of a step"], rows))
    print(f"{ratio:.2f} of a full step; bar {BAR}: {'met' if ratio <= BAR else 'NOT met'}")
    print(", ".join(f"ready, {how}: {s:.1f} s" for how, s in answers.items()), end="")
    print(f"; bar {BAR_READY_S:.0f} s: {'met' if answers['new'] <= BAR_READY_S else 'NOT met'}")
    result = {
        "benchmark": "serve_gaps",
        "hardware": common.hardware(),
        "versions": common.versions(),
        "model": MODEL,
        "decoding": DECODING,
        "prompt": given.prompt,
        "bar": BAR,
        "cut": cut,
        "whole": whole,
        "ready_s": answers,
        "bar_ready_s": BAR_READY_S,
    }
    common.write_json(given.out, result)


def gaps(prompt: int, mixed: int, rounds: int) -> dict[str, Any]:
    """The median round's longest gap, and the step that it is compared with."""
    model = {"max_seq": prompt + 1024, **MODEL}
    sizes = {"seats": DECODING + 1, "slots": prompt + 1024, "mixed_tokens": mixed, "reuse": False}
    engine, _ = random_llama.engine(model, **sizes)
    found = [_round(engine, prompt, random.Random(i)) for i in range(rounds)]
    return {
        "mixed": mixed,
        "rounds": found,
        "gap_s": statistics.median(one["gap_s"] for one in found),
        "step_s": statistics.median(one["step_s"] for one in found),
    }


def _round(engine: Any, prompt: int, rng: random.Random) -> dict[str, Any]:
    from colossax.scheduling import EngineRequest

    def asked(tokens: int, added: int) -> int:
        ids = tuple(rng.choices(range(MODEL["vocab"]), k=tokens))
        return engine.add(EngineRequest(prompt=ids, max_tokens=added))

    others = {asked(16, 1000) for _ in range(DECODING)}
    for _ in range(20):
        engine.step()
    long, came = asked(prompt, 1), time.perf_counter()
    times, ended = [came], False
    while not ended:
        told = engine.step()
        if any(one.request in others for one in told):
            times.append(time.perf_counter())
        ended = any(one.request == long for one in told)
    first = time.perf_counter() - came
    for one in others:
        engine.cancel(one)
    while engine.busy:
        engine.step()
    # The first waits for a step that was on its way before.
    steps = [b - a for a, b in zip(times[1:], times[2:], strict=False)] or [first]
    return {
        "gap_s": max(steps),
        "step_s": statistics.median(steps[-max(1, len(steps) // 8) :]),
        "first_token_s": first,
        "steps": len(steps),
    }


def ready() -> dict[str, float]:
    """Seconds to the first answer of a server."""
    with tempfile.TemporaryDirectory() as place:
        environment = {
            **os.environ,
            "PYTHONPATH": str(common.REPOSITORY),
            "COLOSSAX_CACHE": str(Path(place, "cache")),
            "JAX_PLATFORMS": "cpu",
        }
        colossax = [sys.executable, "-m", "colossax"]
        quiet = {"env": environment, "cwd": place, "stdout": subprocess.DEVNULL}
        subprocess.run(
            [*colossax, *TRAINED, "--out=mine"], check=True, stderr=subprocess.DEVNULL, **quiet
        )
        return {how: _until_ready([*colossax, "serve", "mine"], quiet) for how in ("new", "kept")}


def _until_ready(command: list[str], quiet: dict[str, Any]) -> float:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    began = time.perf_counter()
    server = subprocess.Popen([*command, f"--port={port}"], stderr=subprocess.DEVNULL, **quiet)
    try:
        while True:
            if server.poll() is not None:
                raise RuntimeError(f"`{' '.join(command)}` ended with {server.returncode}")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5).close()
                return time.perf_counter() - began
            except OSError:
                time.sleep(0.05)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


if __name__ == "__main__":
    main()
