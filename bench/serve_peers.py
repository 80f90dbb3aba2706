"""Tokens a second of 64 mixed requests on a CPU: our engine beside `transformers`, in one run.

The same checkpoint, the same prompts, greedy, each with a limit of its own and no end-of-text.
`padded` is `generate` on batches of prompts filled up on the left, each batch as long as its
longest request; the best size of batch counts, prompts sorted by how long they will become.
`continuous` is its continuous batching with paged attention. All get what they compile or warm up
beforehand. Tokens count that were asked for; time is that of the clock, CPU-seconds stand beside,
as processes take turns and each may use all cores.

    python bench/serve_peers.py --torch-python PATH [--rounds 3] [--out FILE]

PATH is an interpreter that has torch and transformers.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import common

MODEL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 704,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
REQUESTS, BAR = 64, 1.5
PEERS = ("padded", "continuous")


def requests():
    """(prompt, how many tokens to add) of each: lengths spread as those of conversations are."""
    import numpy as np

    noise = np.random.default_rng(0)
    lengths = np.clip(noise.lognormal(4.2, 0.8, REQUESTS), 8, 512).astype(int)
    added = np.clip(noise.lognormal(4.0, 0.7, REQUESTS), 8, 256).astype(int)
    return [
        (noise.integers(3, MODEL["vocab_size"], n).tolist(), int(more))
        for n, more in zip(lengths, added, strict=True)
    ]


def main() -> None:
    arguments = _arguments()
    if arguments.worker:
        print(json.dumps(_ours(Path(arguments.worker), arguments.seats, arguments.mixed)))
        return
    with tempfile.TemporaryDirectory() as folder:
        peer = common.HERE / "peers" / "torch_serving.py"
        quiet = {"OMP_WAIT_POLICY": "PASSIVE"}
        python = arguments.torch_python
        common.run_worker(peer, ["make", folder], python=python, **quiet)
        runs = {name: [] for name in ("colossax", *PEERS)}
        for _ in range(arguments.rounds):
            words = ["--worker", folder, "--seats", str(arguments.seats)]
            words += ["--mixed", str(arguments.mixed)]
            here = Path(__file__).resolve()
            runs["colossax"].append(common.run_worker(here, words, JAX_PLATFORMS="cpu"))
            for name in PEERS:
                runs[name].append(common.run_worker(peer, [name, folder], python=python, **quiet))
    _report(runs, arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--torch-python", help="an interpreter that has torch and transformers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seats", type=int, default=32)
    parser.add_argument("--mixed", type=int, default=256, help="tokens of a step with prompts")
    parser.add_argument("--out", type=Path, default=common.HERE / "results" / "serve_peers.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def _report(runs, arguments) -> None:
    rows = []
    for name, each in runs.items():
        middle = {
            key: statistics.median(run[key] for run in each)
            for key in ("tokens_per_s", "cpu_s", "first_token_s", "last_token_s")
        }
        rows.append([name, *middle.values(), each[0].get("how", "")])
    faster = max(row[1] for row in rows[1:])
    same = {name: each[0]["tokens"] == runs["padded"][0]["tokens"] for name, each in runs.items()}
    header = ["", "tokens/s", "CPU-s", "first token s", "request s", "how"]
    print(common.table(header, rows))
    print("(first token and request: the median request's seconds since all were asked)")
    print(
        "the same tokens as padded:",
        ", ".join(f"{n} {'yes' if s else 'NO'}" for n, s in same.items()),
    )
    ratio = rows[0][1] / faster
    print(f"{ratio:.2f} times the faster peer; bar {BAR}: {'met' if ratio >= BAR else 'NOT met'}")
    kept = {
        name: [{k: v for k, v in run.items() if k != "tokens"} for run in each]
        for name, each in runs.items()
    }
    common.write_json(
        arguments.out,
        {
            "benchmark": "serve_peers",
            "hardware": common.hardware(),
            "versions": {**common.versions(), **runs["padded"][0]["versions"]},
            "model": MODEL,
            "requests": [[len(prompt), added] for prompt, added in requests()],
            "engine": {"seats": arguments.seats, "mixed_tokens": arguments.mixed},
            "ratio_to_faster_peer": ratio,
            "bar": BAR,
            "same_tokens": same,
            "runs": kept,
        },
    )


def _ours(folder: Path, seats: int, mixed: int):
    import jax

    from colossax.config import Plan
    from colossax.inference.engine import Engine
    from colossax.inference.plan import unrolled
    from colossax.models.hf_folder import read_params
    from colossax.models.registry import maker
    from colossax.nn import describe
    from colossax.scheduling import EngineRequest
    from colossax.sharding import use

    config, stacks = read_params(folder)
    bound = Plan().bind(jax.devices()[:1])
    with use(bound):
        stacked = describe(maker(config))
    bound = unrolled(Plan(), stacked).bind(jax.devices()[:1])
    with use(bound):
        spec = describe(maker(config))
    pairs = zip(jax.tree.leaves(stacked.infos), jax.tree.leaves(stacks), strict=True)
    held = {info.path: array for info, array in pairs}

    def placed(info):
        whole = held[info.path]
        return jax.device_put(whole if info.first_layer is None else whole[info.first_layer])

    params = jax.tree.map(placed, spec.infos)
    engine = Engine(spec, bound, params, seats=seats, slots=1024, mixed_tokens=mixed)
    engine.warm()
    asked = requests()
    clock, cpu = time.perf_counter(), os.times()
    numbers = [
        engine.add(EngineRequest(prompt=tuple(prompt), max_tokens=added)) for prompt, added in asked
    ]
    found, first, last = {n: [] for n in numbers}, {}, {}
    while engine.busy:
        for one in engine.step():
            now = time.perf_counter() - clock
            found[one.request].append(one.token)
            first.setdefault(one.request, now)
            last[one.request] = now
    wall, after = time.perf_counter() - clock, os.times()
    return {
        "tokens_per_s": sum(added for _, added in asked) / wall,
        "cpu_s": after.user + after.system - cpu.user - cpu.system,
        "first_token_s": statistics.median(first.values()),
        "last_token_s": statistics.median(last.values()),
        "steps": dict(engine.stats.steps),
        "tokens": [found[n] for n in numbers],
    }


if __name__ == "__main__":
    main()
