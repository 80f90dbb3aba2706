"""A mixture of experts beside a dense model: validation loss over equal tokens, seed by seed.

`moe_tiny` and a Llama that differs in one thing: in place of the experts it has an MLP as wide as
those that a token takes, and wider by the router's weights, so that a token costs it at least as
many FLOPs. Both see the same tokens in the same order with the same optimizer. The mixture wins
where its last validation loss is lower with every seed.

    python bench/moe_main_job.py [--seeds 3] [--steps N] [--out FILE]

Minutes of CPU time for each of the runs, which go one after another.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import common
import jobs

from colossax.models import LlamaConfig
from colossax.recipes import recipe
from colossax.tasks import TrainConfig

MODELS = ("experts", "dense")

VALIDATIONS = 10
"""Points of a curve."""


def main() -> None:
    arguments = _arguments()
    if arguments.worker:
        _work(arguments)
        return
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in MODELS}
    for seed in range(arguments.seeds):
        for name in MODELS:
            runs[name].append(_run(name, seed, arguments))
            common.write_json(arguments.out, _result(runs, arguments))
            print(f"seed {seed}, {name}: {runs[name][-1]['final']:.4f}", file=sys.stderr)
    print(_report(runs))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=recipe("moe_tiny").steps)
    parser.add_argument("--out", type=Path, default=common.HERE / "results" / "moe_main_job.json")
    parser.add_argument("--worker", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def made(name: str) -> TrainConfig:
    """The recipe, with experts or with an MLP of as many FLOPs in their place."""
    config = recipe("moe_tiny")
    if name == "experts":
        return config
    sizes = dataclasses.asdict(config.model)
    experts, choices = sizes.pop("experts"), sizes.pop("choices")
    kept = {field.name for field in dataclasses.fields(LlamaConfig)} & sizes.keys()
    router = -(-experts // 3)  # of three matrices, columns that weigh as much
    dense = LlamaConfig(
        **{field: sizes[field] for field in kept - {"mlp"}}, mlp=choices * sizes["mlp"] + router
    )
    return dataclasses.replace(config, model=dense)


def flops(config: TrainConfig) -> int:
    """Of a token, forward and backward."""
    return config.model.decoder().train_flops_per_token(config.data.seq_len)


def _run(name: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    words = ["--worker", name, "--seed", str(seed), "--steps", str(arguments.steps)]
    return common.run_worker(Path(__file__).resolve(), words, JAX_PLATFORMS="cpu", XLA_FLAGS="")


def _work(arguments: argparse.Namespace) -> None:
    config = made(arguments.worker).replace(steps=arguments.steps, seed=arguments.seed)
    ended, told = jobs.validated(config, points=VALIDATIONS)
    more = {
        "parameters": ended["parameters"],
        "flops_per_token": flops(config),
        "tokens": config.steps * config.data.global_batch * config.data.seq_len,
    }
    print(json.dumps({**told, **more}))


def _result(runs: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace) -> dict[str, Any]:
    pairs = list(zip(runs["experts"], runs["dense"], strict=False))
    return {
        "benchmark": "moe_main_job",
        "hardware": common.hardware(),
        "versions": common.versions(),
        "bar": "the mixture's last validation loss is lower, seed by seed",
        "steps": arguments.steps,
        "recipe_steps": recipe("moe_tiny").steps,
        "lower_by": [dense["final"] - experts["final"] for experts, dense in pairs],
        "runs": runs,
    }


def _report(runs: dict[str, list[dict[str, Any]]]) -> str:
    steps = [step for step, _ in runs["experts"][0]["curve"]]
    rows = []
    for at, step in enumerate(steps):
        means = [statistics.mean(one["curve"][at][1] for one in runs[name]) for name in MODELS]
        rows.append([step, *means, means[1] - means[0]])
    curve = common.table(["step", *MODELS, "lower by"], rows)
    finals = [
        [one["seed"], one["final"], other["final"], other["final"] - one["final"]]
        for one, other in zip(runs["experts"], runs["dense"], strict=True)
    ]
    sizes = [
        [name, runs[name][0]["parameters"], runs[name][0]["flops_per_token"]] for name in MODELS
    ]
    return "\n\n".join(
        [
            common.table(["", "parameters", "FLOPs a token"], sizes),
            f"validation loss, mean of {len(finals)} seeds:\n{curve}",
            common.table(["seed", *MODELS, "lower by"], finals),
        ]
    )


if __name__ == "__main__":
    main()
