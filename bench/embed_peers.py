"""Texts a second that become vectors on a CPU: our embedder beside `transformers`, in one run.

The same BERT (6 layers, 384 wide, random weights), the same texts of mixed lengths, the mean of
their hidden states. `padded` fills batches up to their longest text, in the order in which texts
came; `sorted` has sorted all of them by length before, which needs them to be known. The best size
of batch counts for each. All get what they compile or warm up beforehand. Time is that of the
clock; CPU-seconds stand beside.

    python bench/embed_peers.py --torch-python PATH [--rounds 3] [--out FILE]

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
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
}
TEXTS, TOLERANCE = 128, 1e-4
PEERS = ("padded", "sorted")


def texts():
    """Token ids: lengths spread as those of sentences and paragraphs are."""
    import numpy as np

    noise = np.random.default_rng(0)
    lengths = np.clip(noise.lognormal(3.5, 0.9, TEXTS), 4, 400).astype(int)
    return [noise.integers(3, MODEL["vocab_size"], n).tolist() for n in lengths]


def main() -> None:
    arguments = _arguments()
    if arguments.worker:
        print(json.dumps(_ours(Path(arguments.worker), arguments.tokens)))
        return
    with tempfile.TemporaryDirectory() as folder:
        peer = common.HERE / "peers" / "torch_embedding.py"
        quiet, python = {"OMP_WAIT_POLICY": "PASSIVE"}, arguments.torch_python
        common.run_worker(peer, ["make", folder], python=python, **quiet)
        runs = {name: [] for name in ("colossax", *PEERS)}
        for _ in range(arguments.rounds):
            words = ["--worker", folder, "--tokens", str(arguments.tokens)]
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
    parser.add_argument("--tokens", type=int, default=512, help="of a row where many texts wait")
    parser.add_argument("--out", type=Path, default=common.HERE / "results" / "embed_peers.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def _report(runs, arguments) -> None:
    import numpy as np

    rows = []
    for name, each in runs.items():
        middle = [statistics.median(run[key] for run in each) for key in ("texts_per_s", "cpu_s")]
        rows.append([name, *middle, each[0]["how"]])
    print(common.table(["", "texts/s", "CPU-s", "how"], rows))
    ours, theirs = (np.asarray(runs[name][0]["vectors"]) for name in ("colossax", "sorted"))
    apart = float(np.abs(ours - theirs).max())
    print(f"vectors are {apart:.1e} apart at most: {'the same' if apart < TOLERANCE else 'OTHERS'}")
    ratios = {row[0]: rows[0][1] / row[1] for row in rows[1:]}
    print(", ".join(f"{ratio:.2f} times {name}" for name, ratio in ratios.items()))
    kept = {
        name: [{k: v for k, v in run.items() if k != "vectors"} for run in each]
        for name, each in runs.items()
    }
    common.write_json(
        arguments.out,
        {
            "benchmark": "embed_peers",
            "hardware": common.hardware(),
            "versions": {**common.versions(), **runs["padded"][0]["versions"]},
            "model": MODEL,
            "texts": [len(text) for text in texts()],
            "tokens_of_a_row": arguments.tokens,
            "ratios": ratios,
            "largest_difference": apart,
            "runs": kept,
        },
    )


def _ours(folder: Path, tokens: int):
    import jax

    from colossax.inference import open_checkpoint
    from colossax.models.hf import import_checkpoint

    import_checkpoint(folder, folder / f"checkpoint-{os.getpid()}")
    stored = open_checkpoint(folder / f"checkpoint-{os.getpid()}")
    stored = stored.embedding(pool="mean", normalise=True)
    loaded = stored.load(devices=jax.devices()[:1], unroll=True)
    embedder, asked = loaded.embedder(tokens=tokens), texts()
    embedder.warm()
    clock, cpu = time.perf_counter(), os.times()
    vectors = embedder.embed(asked)
    wall, after = time.perf_counter() - clock, os.times()
    stats = embedder.stats
    return {
        "texts_per_s": len(asked) / wall,
        "cpu_s": after.user + after.system - cpu.user - cpu.system,
        "how": f"{sum(stats.steps.values())} steps, {stats.tokens / stats.places:.2f} full",
        "vectors": vectors.tolist(),
    }


if __name__ == "__main__":
    main()
