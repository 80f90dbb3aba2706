"""What all cases start from: one small run, its caches, its exports, and what is true of them."""

import dataclasses
import functools
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from colossax.checkpoint import RecordReader
from tests.fuzz.judge import Outcome, commanded

STEPS, FURTHER, EARLIER = 4, 5, 2
SIZES = (
    "--model.embed=16",
    "--model.layers=1",
    "--model.heads=2",
    "--model.kv_heads=1",
    "--model.mlp=16",
    "--model.vocab=300",
    "--model.max_seq=32",
    "--data.tokenizer_vocab=300",
    "--data.seq_len=16",
    "--data.global_batch=2",
    "--data.validation_batches=1",
    "--sample.prompt=",
    "--checkpoint-every=2",
    "--validate-every=2",
    "--keep=100",
    "--trackers=json",
    "--devices=1",
)
PROMPT = ("--prompt=the cat", "--max-tokens=4", "--json", "--devices=1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    """A finished run of `STEPS` steps.

    Attributes:
        folder: Of all this: `run`, `cache`, `text`, `hf`; cases make folders of their own in it.
    """

    folder: Path

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.folder / "run"

    @property
    def text(self) -> Path:
        """What it was trained on."""
        return self.folder / "text"

    @property
    def hf(self) -> Path:
        """What it was exported to."""
        return self.folder / "hf"

    @functools.cached_property
    def losses(self) -> list[tuple[int, Any, Any]]:
        """Rows of the run that went on to `FURTHER` unharmed."""
        return rows(self.folder / "further")

    @functools.cached_property
    def seals(self) -> Any:
        """Of the checkpoint at `FURTHER`."""
        return seals(self.folder / "further")

    @functools.cached_property
    def arrays(self) -> dict[int, str]:
        """Digest of all that a step holds."""
        return {step: digest(RecordReader(checkpoints(self.run), step)) for step in _KEPT}

    @functools.cached_property
    def generated(self) -> dict[int, Any]:
        """What each step's model says."""
        return {step: _tokens(said(self.run, step)) for step in _KEPT}

    @functools.cached_property
    def exported(self) -> dict[int, str]:
        """Digest of each step's export."""
        return {step: export_digest(self.folder / f"hf{step}") for step in _KEPT}

    def copy(self, place: Path) -> Path:
        """The run's folder anew; files of checkpoints are links, which `damage` takes apart."""
        shutil.copytree(self.run, place / "run", copy_function=_link_or_copy)
        return place / "run"

    def copy_cache(self, place: Path) -> Path:
        """The caches anew; readers of this process find these from now on."""
        shutil.copytree(self.folder / "cache", place / "cache")
        os.environ["COLOSSAX_CACHE"] = str(place / "cache")
        return place / "cache"

    def use_own_cache(self) -> None:
        """Readers find the caches of the base."""
        os.environ["COLOSSAX_CACHE"] = str(self.folder / "cache")


_KEPT = (EARLIER, STEPS)


def make(folder: Path) -> Base:
    """Train, go on, export; some ten seconds."""
    base = Base(folder=folder)
    base.use_own_cache()
    base.text.mkdir(parents=True)
    for number in range(3):
        words = f"the cat number {number} sat on the mat and was happy. " * 60
        (base.text / f"{number}.txt").write_text(words)
    begin = ("train", "llama_tiny", *SIZES, f"--data={base.text}", f"--steps={STEPS}")
    _done(*begin, f"--out={base.run}")
    shutil.copytree(base.run, folder / "further")
    _done(*resuming(folder / "further"))
    for step in _KEPT:
        _done("export", str(base.run), str(folder / f"hf{step}"), f"--step={step}")
    shutil.copytree(folder / f"hf{STEPS}", base.hf)
    assert base.exported and base.generated and base.arrays and base.seals
    return base


def resuming(run: Path) -> tuple[str, ...]:
    """Words that go on with a run to `FURTHER`."""
    return (
        "train",
        "--resume",
        f"--out={run}",
        f"--steps={FURTHER}",
        "--trackers=json",
        "--devices=1",
    )


def _done(*words: str) -> None:
    done = commanded(*words)
    assert done.value == 0, (words, done)


def checkpoints(run: Path) -> Path:
    """Of a run."""
    return run / "checkpoints"


def rows(run: Path) -> list[tuple[int, Any, Any]]:
    """(step, loss, validation loss) of each line of `metrics.jsonl`."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line.get("loss"), line.get("validation_loss")) for line in lines]


def seals(run: Path) -> Any:
    """What the files of the checkpoint at `FURTHER` are known by: equal if all their bytes are."""
    path = checkpoints(run) / str(FURTHER) / "arrays" / "manifest.json"
    body = json.loads(json.loads(path.read_bytes())["body"])
    return {name: record["seals"] for name, record in body["records"].items()}


def digest(reader: RecordReader) -> str:
    """Of every value and document of a step."""
    found = hashlib.blake2b(json.dumps(reader.documents(), sort_keys=True).encode())
    for name in sorted(reader.records()):
        found.update(name.encode())
        found.update(reader.read(name).tobytes())
    return found.hexdigest()


def export_digest(folder: Path) -> str:
    """Of weights, configuration and tokenizer."""
    names = ("model.safetensors", "config.json", "tokenizer.json")
    return hashlib.blake2b(b"".join((folder / name).read_bytes() for name in names)).hexdigest()


def said(run: Path, step: int | None = None) -> Outcome:
    """A few tokens of the model in a run's folder."""
    which = () if step is None else (f"--step={step}",)
    return commanded("generate", str(run), *PROMPT, *which)


def _tokens(done: Outcome) -> Any:
    assert done.value == 0, done
    return json.loads(done.out)


def _link_or_copy(source: str, target: str) -> None:
    if "/checkpoints/" in source:
        os.link(source, target)
    else:
        shutil.copy2(source, target)
