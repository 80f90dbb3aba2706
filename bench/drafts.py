"""What guessing ahead is worth: one small model, and everybody who can draft for it, on a CPU.

A target learns from most of Python's standard library; a smaller model from the same, and a
drafter beside the target. Prompts are of files that none has read: pieces as they stand, and
pieces that are followed by their own beginning, so that to go on is to quote. All are continued
at temperature 0 and 0.8, in an engine of 8 seats.

`said a step` is what a seat says in a step that looks at its guesses; `right` the share of all
guesses that are said; CPU-seconds are of the whole engine, programs compiled before. `same` says
whether every token is what the engine says without guesses.

A guess here is drawn with the key of its position, as the model draws, and is right where both
are the same token; so no guess changes a token. The published rule takes a guess x, drawn from q,
with probability min(1, p(x) / q(x)), which is `sum min(p, q)` on average: the most that any rule
can. Ours takes `sum over x of 1 / sum over y of max(p(y) / p(x), q(y) / q(x))`. Both are computed
for the first guess behind each token that the target has said at 0.8, from the models' own
probabilities.

    python bench/drafts.py [--steps 200] [--runs FOLDER] [--out FILE]

Runs that FOLDER has already are not made again.
"""

import argparse
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import common
import numpy as np

SIZES = "--data.seq_len=96 --data.global_batch=16 --data.tokenizer_vocab=512".split()
COMMON = [*SIZES, "--data.validation_batches=1", "--sample.prompt=", "--trackers=json", "--json"]
SMALL = "--model.layers=1 --model.embed=64 --model.heads=4 --model.kv_heads=2".split()
SMALL += ["--model.mlp=128"]
TARGET = "--model.layers=4 --model.embed=128 --model.heads=8 --model.kv_heads=4".split()
TARGET += ["--model.mlp=384", "--model.vocab=512", "--model.max_seq=256"]
FILES, LARGEST, HELD_OUT = 120, 60_000, 12
PROMPTS, PIECE, AGAIN, SAID = 16, 48, 16, 48
SEATS, TOKENS, NODES = 8, 4, 12
ENGINE = {"seats": SEATS, "slots": 192, "pages": 96, "page_tokens": 16, "mixed_tokens": 128}
TEMPERATURES = (0.0, 0.8)


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        runs = arguments.runs or Path(folder)
        held_out = _texts(runs)
        train_s = _train(runs, arguments.steps)
        result = _measured(runs, held_out)
    _report(result)
    common.write_json(
        arguments.out,
        {
            "benchmark": "drafts",
            "hardware": common.hardware(),
            "versions": common.versions(),
            "steps": arguments.steps,
            "train_wall_s": train_s,
            "engine": {**ENGINE, "tokens": TOKENS, "nodes": NODES},
            "prompts": {"count": PROMPTS, "tokens": PIECE, "again": AGAIN, "said": SAID},
            **result,
        },
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="that each of the three learns")
    parser.add_argument("--runs", type=Path, help="keep runs here; default a temporary folder")
    parser.add_argument("--out", type=Path, default=common.HERE / "results" / "drafts.json")
    return parser.parse_args()


def _texts(runs: Path) -> list[str]:
    """Copies what is learned from into a folder of its own; the files that nobody reads."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [one for one in sorted(library.glob("*.py")) if 4000 < one.stat().st_size < LARGEST]
    files = files[:FILES]
    held_out = files[:: len(files) // HELD_OUT]
    text = runs / "text"
    if not text.exists():
        text.mkdir(parents=True)
        for one in files:
            if one not in held_out:
                shutil.copy(one, text / f"{one.stem}.txt")
    return [one.read_text(encoding="utf-8") for one in held_out]


def _train(runs: Path, steps: int) -> dict[str, float]:
    """Wall seconds of each run, those that are there already left out."""
    words = {
        "target": ["llama_tiny", *TARGET],
        "small": ["llama_tiny", *TARGET, *SMALL],
        "glide": ["glide_tiny", *TARGET, f"--init={runs / 'target'}"],
    }
    found = {}
    for name, given in words.items():
        out = runs / name
        if out.exists():
            continue
        command = [sys.executable, "-m", "colossax", "train", *given, *COMMON, f"--steps={steps}"]
        command += [f"--data={runs / 'text'}", f"--out={out}", "--validate-every=0"]
        command += [f"--checkpoint-every={steps}", "--devices=1"]
        clock = common.Clock()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found[name] = clock.read()["wall_s"]
    return found


def _measured(runs: Path, held_out: list[str]) -> dict:
    import jax

    from colossax.config import Plan
    from colossax.inference import NgramDrafter, open_checkpoint, open_drafter

    devices, plan = jax.devices()[:1], Plan(mesh={"fsdp": 1})
    target, small = (
        open_checkpoint(runs / name).load(plan, devices, unroll=True)
        for name in ("target", "small")
    )
    glide = open_drafter(runs / "glide").beside(target)
    drafters = {
        "none": None,
        "ngrams": NgramDrafter(TOKENS),
        "small": small.drafter(TOKENS),
        "small, tree": small.drafter(TOKENS, nodes=NODES),
        "glide": glide.drafter(TOKENS),
        "glide, tree": glide.drafter(TOKENS, nodes=NODES),
    }
    prompts = _prompts(target.tokenizer, held_out)
    rows, said = [], {}
    for name, drafter in drafters.items():
        rows += _engine_rows(name, drafter, target, prompts, said)
    texts = {
        kind: [(prompt, said[kind, TEMPERATURES[-1]][i]) for i, prompt in enumerate(each)]
        for kind, each in prompts.items()
    }
    return {"rows": rows, "rules": _rules(target, small, glide, texts)}


def _prompts(tokenizer, texts: list[str]) -> dict[str, list[tuple[int, ...]]]:
    """Of each kind as many: pieces from a third on in files, in turn, and further on."""
    pieces = []
    for number in range(PROMPTS):
        text = texts[number % len(texts)]
        begin = len(text) // 3 + number // len(texts) * 1000
        begin = text.index("\n", begin) + 1
        pieces.append(tuple(tokenizer.encode(text[begin : begin + 8 * PIECE])[:PIECE]))
    return {"held out": pieces, "quoting": [(*one, *one[:AGAIN]) for one in pieces]}


def _engine_rows(name: str, drafter, target, prompts, said) -> list[dict]:
    """A drafter on all prompts, at each temperature; `said` is what the engine says alone."""
    from colossax.inference import Engine
    from colossax.scheduling import EngineRequest, SamplingConfig

    program = target.engine(drafter=drafter, **ENGINE).program
    Engine.of(program, target.params).warm()
    rows = []
    for kind, each in prompts.items():
        for temperature in TEMPERATURES:
            asked = [
                EngineRequest(
                    prompt=prompt,
                    max_tokens=SAID,
                    sampling=SamplingConfig(temperature=temperature, seed=seed),
                )
                for seed, prompt in enumerate(each)
            ]
            engine = Engine.of(program, target.params)
            clock = common.Clock()
            found = engine.generate_all(asked)
            seconds = clock.read()
            tokens = [tuple(one.token for one in told) for told in found]
            expected = said.setdefault((kind, temperature), tokens)
            rows.append(
                {"drafter": name, "prompts": kind, "temperature": temperature}
                | _counts(engine.stats, tokens, seconds)
                | {"same": tokens == expected}
            )
    return rows


def _counts(stats, tokens, seconds) -> dict:
    count, guessed = sum(map(len, tokens)), stats.scheduler
    return {
        "said_a_step": count / (count - guessed.accepted),
        "right": guessed.accepted / guessed.drafted if guessed.drafted else None,
        "steps": sum(stats.steps.values()),
        "cpu_s_a_token": seconds["cpu_s"] / count,
        "tokens": count,
    }


def _rules(target, small, glide, texts) -> list[dict]:
    """How often a first guess is right by each rule, over all tokens said at the temperature."""
    import jax
    import jax.numpy as jnp

    from colossax.sharding import use

    block, temperature = glide.config.block, TEMPERATURES[-1]

    @jax.jit
    def probabilities(params, own, beside, rows):
        with use(target.bound):
            model = target.spec.merge(params)
            hidden, keys = model.hidden_and_keys(rows)
            embedded, logits = model.embedded(rows), {"target": model.logits(hidden)}
        with use(small.bound):
            other = small.spec.merge(own)
            logits["small"] = other.logits(other.hidden_and_keys(rows)[0])
        told = []
        for offset in range(block):
            with use(glide.bound):
                drafter = glide.spec.merge(beside)
                hidden = drafter.hidden(embedded, keys, jnp.full(len(rows), offset, jnp.int32))
            with use(target.bound):
                told.append(model.logits(hidden))
        # The first guess of a block is of the offset that begins one there.
        first = -jnp.arange(rows.shape[1], dtype=jnp.int32) % block
        logits["glide"] = jnp.take_along_axis(jnp.stack(told), first[None, None, :, None], axis=0)[
            0
        ]
        return {name: jax.nn.softmax(x / temperature, axis=-1) for name, x in logits.items()}

    found = []
    for kind, pairs in texts.items():
        rows = np.zeros((len(pairs), PIECE + AGAIN + SAID), np.int32)
        places = []
        for row, (prompt, more) in enumerate(pairs):
            whole = (*prompt, *more)
            rows[row, : len(whole)] = whole
            places += [(row, at) for at in range(len(prompt) - 1, len(whole) - 1)]
        at = tuple(np.array(places).T)
        given = target.params, small.params, glide.params, jnp.asarray(rows)
        each = {name: np.asarray(x, np.float64)[at] for name, x in probabilities(*given).items()}
        p = each.pop("target")
        found += [{"drafter": n, "prompts": kind, **_accepted(p, q)} for n, q in each.items()]
    return found


def _accepted(p: np.ndarray, q: np.ndarray) -> dict:
    """Means over positions; the bound is what Daliri et al. prove of a common key."""
    published = np.minimum(p, q).sum(axis=1)
    common_key = np.array([_common(a, b) for a, b in zip(p, q, strict=True)])
    return {
        "positions": len(p),
        "published_rule": float(published.mean()),
        "common_key": float(common_key.mean()),
        "bound": float((published / (2 - published)).mean()),
        "given_up": float((published - common_key).mean()),
    }


def _common(p: np.ndarray, q: np.ndarray) -> float:
    """How often the highest of `log p + g` and of `log q + g` is one token, g Gumbel's noise."""
    p, q = np.maximum(p, 1e-30), np.maximum(q, 1e-30)
    return float((1 / np.maximum(p[None] / p[:, None], q[None] / q[:, None]).sum(axis=1)).sum())


def _report(result: dict) -> None:
    names = ("drafter", "prompts", "temperature", "said_a_step", "right", "steps")
    names += ("cpu_s_a_token", "same")
    rows = [[row[name] for name in names] for row in result["rows"]]
    print(common.table([name.replace("_", " ") for name in names], rows))
    print(f"\nthe first guess at temperature {TEMPERATURES[-1]}:")
    names = ("drafter", "prompts", "positions", "published_rule", "common_key", "bound")
    names += ("given_up",)
    rows = [[row[name] for name in names] for row in result["rules"]]
    print(common.table([name.replace("_", " ") for name in names], rows))


if __name__ == "__main__":
    main()
