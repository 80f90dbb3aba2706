"""`colossax train` as real processes: a run small enough that starting takes longest."""

import dataclasses
import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

SMALL = (
    "llama_tiny",
    "--model.layers=2",
    "--model.embed=64",
    "--data.seq_len=64",
    "--data.global_batch=8",
    "--data.validation_batches=1",
    "--sample.prompt=",
    "--json",
)
"""`llama_tiny` with a quarter of the work, printing no completion."""

EXPERTS = ("moe_tiny", *SMALL[1:], "--model.mlp=32")
"""The same of a mixture of 8 experts."""


def write_text(folder: Path, *, documents: int = 40) -> Path:
    """Documents of made-up words, some often and some seldom."""
    source = random.Random(0)
    words = ["".join(source.choices("abcdefgh", k=source.randint(2, 7))) for _ in range(300)]
    folder.mkdir()
    for number in range(documents):
        text = " ".join(words[int(300 * source.random() ** 2)] for _ in range(300))
        (folder / f"{number}.txt").write_text(text)
    return folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    """What a process left: exit code, JSON lines, standard error."""

    code: int
    lines: list[dict]
    errors: str

    @property
    def losses(self) -> dict[int, float]:
        """Loss by step."""
        return {line["step"]: line["loss"] for line in self.lines if "step" in line}

    @property
    def final(self) -> dict:
        """The last object's content."""
        return self.lines[-1]["final"]


class Started:
    """A process under way; its standard error goes to a file, so that nothing can fill up."""

    def __init__(
        self,
        *arguments: str,
        text: Path,
        log: Path,
        before: str = "",
        small: tuple[str, ...] = SMALL,
    ):
        """Start it; `before` is Python that it runs first."""
        flags = "--xla_backend_optimization_level=1 --xla_llvm_disable_expensive_passes=true"
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags,
            "PYTHONPATH": str(ROOT),
            "COLOSSAX_CACHE": str(text.parent / "cache"),
        }
        main = "import sys, colossax.cli; sys.exit(colossax.cli.main())"
        entry = ("-c", f"{before}; {main}") if before else ("-m", "colossax")
        self._log = log
        self._seen: list[str] = []
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    *entry,
                    "train",
                    *small,
                    "--data",
                    str(text),
                    *arguments,
                ],
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
                cwd=text.parent,
            )

    def until(self, step: int) -> "Started":
        """Wait for the step's line, or for the end."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._seen.append(line)
            if json.loads(line).get("step") == step:
                break
        return self

    def send(self, number: signal.Signals) -> "Started":
        """Send a signal."""
        self.process.send_signal(number)
        return self

    def finish(self) -> Finished:
        """Wait for the end; a last line that was cut short is left out."""
        assert self.process.stdout is not None
        with self.process.stdout as rest:
            lines = [*self._seen, *rest]
        code = self.process.wait(timeout=120)
        whole = [json.loads(line) for line in lines if line.endswith("\n")]
        return Finished(code=code, lines=whole, errors=self._log.read_text())


def run(*arguments: str, text: Path, log: Path, small: tuple[str, ...] = SMALL) -> Finished:
    """Run to the end."""
    return Started(*arguments, text=text, log=log, small=small).finish()


def pair(
    *arguments: str,
    text: Path,
    folder: Path,
    before: str = "",
    small: tuple[str, ...] = SMALL,
) -> list[Started]:
    """Two processes of a run, started together; they log to `0.log` and `1.log` in a folder."""
    address = ("--processes=2", f"--coordinator=127.0.0.1:{free_port()}", "--timeout-s=60")
    return [
        Started(
            *arguments,
            *address,
            f"--process-id={number}",
            text=text,
            log=folder / f"{number}.log",
            before=before,
            small=small,
        )
        for number in range(2)
    ]


def metrics(folder: Path) -> list[tuple]:
    """(step, loss, validation loss) of each line of a run's `metrics.jsonl`."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [(row["step"], row.get("loss"), row.get("validation_loss")) for row in rows]


def free_port() -> int:
    """A port nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
