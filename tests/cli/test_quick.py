"""What is refused or explained is so at once: without JAX, which takes longer than all else."""

import json
import os
import subprocess
import sys

import pytest

HEAVY = ("jax", "flax", "numpy", "optax", "orbax", "matplotlib")

ASK = f"""
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
answers = []
for words in json.loads(sys.argv[1]):
    out = io.StringIO()
    with redirect_stderr(out), redirect_stdout(out):
        try:
            from colossax.cli import main
            code = main(words)
        except SystemExit as end:
            code = end.code
    answers.append([code, out.getvalue(), [m for m in {HEAVY} if m in sys.modules]])
print(json.dumps(answers))
"""

HELP = [
    ["--help"],
    ["--version"],
    *([verb, "--help"] for verb in ("train", "inspect", "generate", "import", "export", "bench")),
    ["check", "--help"],
]

TYPOS = {
    "trian": "'train'",
    "train lama_tiny": "'llama_tiny'",
    "train --stpes 3": "'--steps'",
    "train --lr 3": "'--optimizer.peak_lr'",
    "train llama_tiny --optimizer.peak 3": "'--optimizer.peak_lr'",
    "train llama_tiny --plan.preset fsdp": "'zero3'",
    "train llama_tiny --plan.mesh dp=2": "'data'",
    "train llama_tiny --plan.mesh tp=2": "'tensor'",
    "inspect lama_tiny": "'llama_tiny'",
    "inspect llama_tiny --plan.preset zero3,fsdp": "'zero3'",
    "inspect llama_tiny --tragets h100:1x8": "'--target'",
    "generate --pormpt x": "'--prompt'",
    "bench --onyl x": "'--only'",
    "check --devcies 2": "'--devices'",
}


def child(*arguments, **env):
    """Standard output of a new Python."""
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def answers():
    """(Exit code, output, heavy modules that are loaded) after each of these commands in a row."""
    commands = [*HELP, *(typo.split() for typo in TYPOS)]
    told = json.loads(child("-c", ASK, json.dumps(commands)))
    return {" ".join(words): answer for words, answer in zip(commands, told, strict=True)}


@pytest.mark.catches("help-loads-jax")
@pytest.mark.parametrize("command", [" ".join(words) for words in HELP])
def test_help_is_there_at_once(command, answers):
    code, _, loaded = answers[command]
    assert (code, loaded) == (0, [])


@pytest.mark.catches("help-loads-jax")
@pytest.mark.parametrize("command", TYPOS)
def test_a_typo_is_refused_at_once(command, answers):
    code, told, loaded = answers[command]
    assert (code, loaded) == (2, [])
    assert f"did you mean {TYPOS[command]}?" in told


FIRST_LINE = """
import sys

class Stream:
    def write(self, text):
        sys.stdout.write(f"{text.strip()}|{'jax' in sys.modules}")
        raise SystemExit(0)
    def flush(self): pass

sys.stderr = Stream()
from colossax.cli import main
main(["train", "llama_tiny", "--steps=2"])
"""


@pytest.mark.catches("silent-start")
def test_training_says_what_it_does_before_it_loads_jax():
    assert child("-c", FIRST_LINE) == "llama_tiny: 2 steps; starting JAX|False"


BEGIN = """
import argparse
from colossax.cli import train
from colossax.recipes import recipe
train._begin(recipe("llama_tiny"), argparse.Namespace(process_id=None))
print("began")
"""


@pytest.mark.catches("all-begin")
def test_of_several_processes_the_first_says_so():
    assert child("-c", "import sys; sys.stderr = sys.stdout" + BEGIN, SLURM_PROCID="1") == "began\n"
