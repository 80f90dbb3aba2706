"""How many guessed tokens are right, and what a step with guesses costs, on text nobody learned.

    python bench/drafts.py CHECKPOINT [--drafter RUN ...] [--text FILE ...] [--out FILE]

Prompts are cut at even places from FILE, by default NumPy's own modules, and continued with and
without guesses: of n-grams, and of each RUN, a drafter that learned beside CHECKPOINT or a model
of its vocabulary (`RUN@STEP` takes an earlier checkpoint). `right` is the share of looked-at
guesses that were said, `said` how many tokens a seat says in a step that looks at its guesses,
`cost` the CPU time of all beside that of the same engine without guesses, run before and after.
The tokens of all must be the same. On a CPU a step costs by its tokens: `cost` says nothing of a
GPU, whose steps with few tokens take as long as the weights are read.
"""

import argparse
import sys
from pathlib import Path

import common

sys.path.insert(0, str(common.REPOSITORY))

import jax
import numpy

from colossax.errors import InputError
from colossax.inference import open_checkpoint, open_drafter
from colossax.inference.engine.drafting import NgramDrafter
from colossax.inference.engine.drafting.stored import holds_drafter
from colossax.scheduling import EngineRequest, SamplingConfig

TEMPERATURES = (0.0, 0.8)
LENGTHS = (2, 4)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("--drafter", action="append", default=[], metavar="RUN[@STEP]")
    parser.add_argument("--text", action="append", type=Path)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=96, help="told of each")
    parser.add_argument("--seats", type=int, default=4)
    parser.add_argument("--out", type=Path, default=common.HERE / "results" / "drafts.json")
    arguments = parser.parse_args()
    stored = open_checkpoint(arguments.checkpoint)
    model = stored.load(devices=jax.devices()[:1], unroll=True)
    prompts = cut(arguments, stored.tokenizer)
    cases = [
        case for temperature in TEMPERATURES for case in at(temperature, model, prompts, arguments)
    ]
    header = ["guesses of", "how many", "nodes", "temperature", "right", "said", "cost"]
    rows = [[case[key] for key in ("name", "draft", "nodes", "temperature")] for case in cases]
    for row, case in zip(rows, cases, strict=True):
        row += [case["right"], case["said"], case["cost"]]
    print(common.table(header, rows))
    result = {
        "benchmark": "drafts",
        "hardware": common.hardware(),
        "versions": common.versions(),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(model.params)),
        "prompts": [len(prompts), arguments.prompt_tokens],
        "tokens": arguments.tokens,
        "seats": arguments.seats,
        "cases": cases,
    }
    common.write_json(arguments.out, result)


def cut(arguments: argparse.Namespace, tokenizer) -> list[list[int]]:
    """Prompts at even places of the text."""
    files = arguments.text or sorted(Path(numpy.__file__).parent.glob("lib/_*_impl.py"))
    ids = tokenizer.encode("\n".join(file.read_text(encoding="utf-8") for file in files))
    size, count = arguments.prompt_tokens, arguments.prompts
    if len(ids) < size * count:
        sys.exit(f"{len(ids)} tokens of text are too few for {count} prompts of {size}")
    return [ids[n : n + size] for n in range(0, len(ids) - size, len(ids) // count)][:count]


def drafters(model, runs: list[str]):
    """(name, tokens, nodes, drafter) of each case."""
    for draft in LENGTHS:
        yield "n-grams", draft, None, NgramDrafter(draft)
        for run in runs:
            path, _, step = run.partition("@")
            number, name = int(step) if step else None, run
            if holds_drafter(path):
                one = open_drafter(path, step=number).beside(model)
            else:
                stored = open_checkpoint(path, step=number)
                one = stored.load(devices=jax.devices()[:1], unroll=True)
            for nodes in (None, 3 * draft):
                yield Path(name).name, draft, nodes, one.drafter(draft, nodes=nodes)


def at(temperature: float, model, prompts, arguments):
    """Cases of one temperature; without guesses first, and again last."""
    plain, plain_cpu = told(None, temperature, model, prompts, arguments)[:2]
    cases = []
    for name, draft, nodes, drafter in drafters(model, arguments.drafter):
        said, cpu, stats = told(drafter, temperature, model, prompts, arguments)
        if said != plain:
            sys.exit(f"{name}, {draft} at temperature {temperature}: tokens differ; a fault")
        looked = sum(map(len, said)) - len(said) - stats.accepted
        case = {"name": name, "draft": draft, "nodes": nodes, "temperature": temperature}
        case["right"] = stats.accepted / stats.drafted if stats.drafted else None
        case["said"] = 1 + stats.accepted / looked
        cases.append(case | {"cpu_s": cpu})
    again = told(None, temperature, model, prompts, arguments)[1]
    base = (plain_cpu + again) / 2
    return [
        case | {"cost": case["cpu_s"] / base, "plain_cpu_s": [plain_cpu, again]} for case in cases
    ]


def told(drafter, temperature: float, model, prompts, arguments):
    """Tokens of each prompt, CPU-seconds of all once compiled, and the scheduler's numbers."""
    engine = model.engine(
        drafter=drafter,
        seats=arguments.seats,
        slots=arguments.prompt_tokens + arguments.tokens,
        mixed_tokens=arguments.prompt_tokens,
    )
    engine.warm()
    requests = [
        EngineRequest(
            prompt=tuple(prompt),
            max_tokens=arguments.tokens,
            sampling=SamplingConfig(temperature=temperature, seed=number),
        )
        for number, prompt in enumerate(prompts)
    ]
    clock = common.Clock()
    found = engine.generate_all(requests)
    cpu = clock.read()["cpu_s"]
    said = [[one.token for one in each if one.token is not None] for each in found]
    return said, cpu, engine.stats.scheduler


if __name__ == "__main__":
    try:
        main()
    except InputError as problem:
        sys.exit(str(problem))
