"""What it costs to check the cache of encoded text, beside the run that reads it.

By turns, in CPU-seconds: the corpus of the standard library is opened and the rows of the first
steps of `llama_tiny` are made, once with every file and block compared with its checksum, once from
a plain memory map. Beside them a run of as many steps, its caches warm.

    python bench/data_checks.py [--steps 200] [--out FILE]
"""

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import common

sys.path.insert(0, str(common.REPOSITORY))

import numpy as np

from colossax.config import cache_folder
from colossax.data import Rows, Split, encode_corpus, stdlib_documents, train_tokenizer

VOCAB, SEQ, BATCH = 4096, 256, 8
TURNS = 7
BAR = 0.01


def checked() -> Split:
    """The corpus as a run opens it."""
    documents = stdlib_documents()
    return encode_corpus(documents, train_tokenizer(documents, VOCAB)).whole()


def unchecked(fingerprint: str, like: Split) -> Split:
    """The same tokens, and nothing compared."""
    folder = cache_folder() / "corpora" / fingerprint
    for name in ("offsets", "hashes", "counts"):
        np.load(folder / f"{name}.npy")
    return dataclasses.replace(
        like, tokens=np.memmap(folder / "tokens.bin", like.tokens.dtype, "r")
    )


def rows_of(split: Split, steps: int) -> None:
    """Make the rows of a run, in the order in which it reads them."""
    rows = Rows(split, seq_len=SEQ, seed=0)
    for row in range(steps * BATCH):
        rows[row]


def run_cpu_s(steps: int) -> float:
    """CPU-seconds of a run from the command line."""
    before = os.times()
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", "llama_tiny", f"--steps={steps}", "--devices=1", f"--out={folder}/run"]
        command = [sys.executable, "-m", "colossax", *words]
        subprocess.run(command, capture_output=True, check=True, cwd=common.REPOSITORY)
    after = os.times()
    user = after.children_user - before.children_user
    return user + after.children_system - before.children_system


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=common.HERE / "results" / "data_checks.json")
    arguments = parser.parse_args()
    documents = stdlib_documents()
    corpus = encode_corpus(documents, train_tokenizer(documents, VOCAB))
    whole = corpus.whole()
    ways = {
        "checked": lambda: rows_of(checked(), arguments.steps),
        "unchecked": lambda: rows_of(unchecked(corpus.fingerprint, whole), arguments.steps),
        "opening alone": checked,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, run in ways.items():
            clock = common.Clock()
            run()
            seconds[name].append(clock.read()["cpu_s"])
    run_s = run_cpu_s(arguments.steps)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    # Opening also looks at every file of the text, as it always did: an upper bound.
    share = (medians["checked"] - medians["unchecked"]) / run_s
    rows = [(name, 1e3 * median) for name, median in medians.items()]
    print(common.table(["what", "CPU-ms"], [*rows, ("run", 1e3 * run_s)]))
    print(f"at most {100 * share:.2f} % of the run's CPU-seconds (bar {100 * BAR:.0f} %)")
    common.write_json(
        arguments.out,
        {
            "benchmark": "data_checks",
            "versions": common.versions(),
            "hardware": common.hardware(),
            "steps": arguments.steps,
            "tokens": len(corpus.tokens),
            "cpu_s": seconds,
            "run_cpu_s": run_s,
            "share_of_run": share,
            "bar": BAR,
        },
    )


if __name__ == "__main__":
    main()
