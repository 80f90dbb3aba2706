"""SIGKILL at random moments of four kinds of runs, each resumed to its end: no loss may differ.

    python bench/kills.py --kills 300 --json bench/results/kills.json

A round starts a run, kills it some times, each time at another moment, resumes it after each, and
lets it end; its losses are compared with those of a run that nobody touched, to the bit. Moments
are drawn over the whole life of a process: starting, training, saving, ending. With `--json` it
goes on with the round after the last one and adds to the counts.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import common

STEPS = 60
SMALL = (
    "llama_tiny",
    "--model.layers=2",
    "--model.embed=16",
    "--model.heads=2",
    "--model.kv_heads=2",
    "--model.mlp=32",
    "--model.vocab=300",
    "--model.max_seq=32",
    "--data.tokenizer_vocab=300",
    "--data.seq_len=16",
    "--data.global_batch=8",
    "--data.validation_batches=1",
    "--sample.prompt=",
    "--trackers=json",
    "--json",
    f"--steps={STEPS}",
    "--checkpoint-every=3",
    "--validate-every=7",
    "--resume=auto",
)
KINDS = {
    "plain": ("--devices=1",),
    "8 devices": ("--devices=8", "--plan.mesh=data=2,fsdp=2,tensor=2"),
    "disk tier": ("--devices=1", "--plan.offload=parameters=1,optimizer=1,disk=1"),
    "two processes": ("--devices=1", "--plan.mesh=fsdp=2", "--timeout-s=30"),
}
"""Options of each kind of run."""

KILLS = 6
"""Of each round, before it ends."""

_LONGEST_S = 300


class Run:
    """One start of `colossax train`: a process, or two that are one run."""

    def __init__(self, folder: Path, kind: str, out: Path):
        self._log = folder / "log"
        given: list[tuple[str, ...]] = [()]
        if kind == "two processes":
            where = ("--processes=2", f"--coordinator=127.0.0.1:{_free_port()}")
            given = [(*where, f"--process-id={i}") for i in range(2)]
        options = (*SMALL, *KINDS[kind], f"--data={folder / 'text'}", f"--out={out}")
        with self._log.open("w") as log:
            self.processes = [
                subprocess.Popen(
                    [sys.executable, "-m", "colossax", "train", *options, *more],
                    stdout=subprocess.PIPE if not number else subprocess.DEVNULL,
                    stderr=log,
                    env=_environment(folder),
                    text=True,
                )
                for number, more in enumerate(given)
            ]

    def until(self, step: int) -> None:
        """Wait for a step's line, or for the end."""
        output = self.processes[0].stdout
        assert output is not None
        for line in output:
            with contextlib.suppress(ValueError):
                if json.loads(line).get("step", -1) >= step:
                    return

    def kill(self, generator: random.Random) -> None:
        """SIGKILL to all of it, or of two processes to one, upon which the other has to end."""
        chosen = list(self.processes)
        if generator.random() < 0.5:
            chosen = [generator.choice(chosen)]
        for process in chosen:
            process.send_signal(signal.SIGKILL)
        self.end()

    def end(self) -> list[int]:
        """Wait for all; exit codes.

        Raises:
            subprocess.TimeoutExpired: One goes on for ever.
        """
        output = self.processes[0].stdout
        assert output is not None
        try:
            for process in self.processes[1:]:
                process.wait(_LONGEST_S)
            output.read()
            return [process.wait(_LONGEST_S) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
                process.wait()
            output.close()

    @property
    def said(self) -> str:
        """Standard error."""
        return self._log.read_text()


def _environment(folder: Path) -> dict[str, str]:
    flags = "--xla_backend_optimization_level=1 --xla_llvm_disable_expensive_passes=true"
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "NPROC": "64",  # threads of XLA's pool: with as few as devices, collectives may starve
        "XLA_FLAGS": flags,
        "PYTHONPATH": str(common.REPOSITORY),
        "COLOSSAX_CACHE": str(folder / "cache"),
    }


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def write_text(folder: Path) -> None:
    """What is trained on."""
    source = random.Random(0)
    words = ["".join(source.choices("abcdefgh", k=source.randint(2, 7))) for _ in range(300)]
    (folder / "text").mkdir(parents=True)
    for number in range(20):
        text = " ".join(words[int(300 * source.random() ** 2)] for _ in range(200))
        (folder / "text" / f"{number}.txt").write_text(text)


def rows(out: Path) -> list[tuple]:
    """(step, loss, validation loss) of each line of a run's metrics."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row.get("loss"), row.get("validation_loss")) for row in lines]


class Lives:
    """Runs that nobody touched: what they recorded, and how long they lived."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._known: dict[str, tuple[list[tuple], float]] = {}
        write_text(folder)

    def of(self, kind: str) -> tuple[list[tuple], float]:
        """Rows and seconds of a kind; the second of two runs, whose programs are kept."""
        if kind not in self._known:
            for name in ("first", "second"):
                out, began = self.folder / f"{name} {kind}", time.monotonic()
                run = Run(self.folder, kind, out)
                assert set(run.end()) == {0}, run.said
                found = rows(out), time.monotonic() - began
                assert self._known.setdefault(kind, found)[0] == found[0], "losses are not repeated"
            self._known[kind] = found
        return self._known[kind]


def a_round(lives: Lives, kind: str, seed: str, kills: int = KILLS) -> tuple[int, str | None]:
    """Kill a run so many times, let it end; how many kills met it alive, and what is wrong."""
    generator, met = random.Random(seed), 0
    expected, seconds = lives.of(kind)
    out = lives.folder / f"killed {seed}"
    for kill in range(kills):
        run = Run(lives.folder, kind, out)
        if generator.random() < 0.3:
            time.sleep(generator.uniform(0, seconds))
        else:
            run.until(int((kill + generator.random()) * (STEPS - 2) / kills))
            time.sleep(generator.uniform(0, 0.2))
        met += run.processes[0].poll() is None
        run.kill(generator)
    run = Run(lives.folder, kind, out)
    codes = run.end()
    if set(codes) != {0}:
        return met, f"exit codes {codes}: {run.said[-800:]}"
    return met, _difference(expected, rows(out)) or _left_over(out)


def _difference(expected: Sequence[tuple], found: Sequence[tuple]) -> str | None:
    if list(expected) == list(found):
        return None
    lost = [row for row in expected if row not in found]
    forked = [row for row in found if row not in expected]
    return f"lost {lost[:3]}, forked {forked[:3]}, {len(expected)} rows and {len(found)}"


def _left_over(out: Path) -> str | None:
    found = sorted(path.name for path in (out / "checkpoints").glob("*tmp*"))
    return f"left behind {found}" if found else None


def main() -> int:
    """Run rounds as asked; 1 where a loss was lost or forked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=24, help="of this call, at least")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=list(KINDS), help="of this kind alone")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    known = {"round": 0, "kills": dict.fromkeys(KINDS, 0), "rounds": 0, "findings": []}
    if asked.json is not None and asked.json.exists():
        known = json.loads(asked.json.read_text())
    began, met = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="kills-", ignore_cleanup_errors=True) as folder:
        lives = Lives(Path(folder) / "lives")
        while met < asked.kills and time.monotonic() - began < asked.seconds:
            kind = asked.kind or list(KINDS)[known["round"] % len(KINDS)]
            seed = f"{asked.seed} {known['round']}"
            more, problem = a_round(lives, kind, seed)
            met += more
            known["kills"][kind] += more
            known["round"] += 1
            known["rounds"] += 1
            if problem is not None:
                known["findings"].append({"kind": kind, "seed": seed, "what": problem})
            print(f"{seed} {kind}: {more} kills, {problem or 'as if nothing had been'}", flush=True)
            if asked.json is not None:
                common.write_json(asked.json, {**known, "versions": common.versions()})
    print(common.table(["kind", "kills"], list(known["kills"].items())))
    print(f"{met} kills in {time.monotonic() - began:.0f} s, {len(known['findings'])} findings")
    return int(bool(known["findings"]))


if __name__ == "__main__":
    sys.exit(main())
