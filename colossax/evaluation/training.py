"""A model examined while it trains."""

import re
from collections.abc import Mapping
from typing import Any

import jax

from colossax.data import Tokenizer
from colossax.errors import InputError
from colossax.evaluation.benchmark import Benchmark, Examination
from colossax.evaluation.config import EvaluationConfig
from colossax.evaluation.formats.named import read_benchmark
from colossax.evaluation.reading import Reader
from colossax.offload import held_bytes
from colossax.step.saving.records import MODEL
from colossax.step.step import Step
from colossax.typing import TrainState


def benchmarks_of(config: EvaluationConfig) -> list[Benchmark]:
    """Those that are named.

    Raises:
        InputError: One is not there, or not as it should be.
    """
    words = [one.strip() for one in config.tasks.split(",")]
    sizes = {"shots": config.shots, "limit": config.limit, "option": "evaluation.tasks"}
    found = [read_benchmark(one, **sizes) for one in words]
    names = [metric_of(one) for one in found]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"evaluation.tasks: {name} comes twice; give it once")
    return found


def metric_of(benchmark: Benchmark) -> str:
    """What a run records of a benchmark: `mmlu_accuracy`."""
    return re.sub(r"\W+", "_", f"{benchmark.name}_{benchmark.metric}")


class Examiner:
    """Tells a model's score of each benchmark: an evaluator of a run's task.

    Attributes:
        description: What it is examined by, for people.
    """

    def __init__(
        self, config: EvaluationConfig, tokenizer: Tokenizer, slots: int, *, averages: bool = False
    ):
        """Read the benchmarks and make tokens of them.

        Args:
            config: Which.
            tokenizer: Of the model.
            slots: Its longest sequence.
            averages: Whether what is examined are averages, which are beside what learns.

        Raises:
            InputError: One is not there, or has an item that does not fit.
        """
        self._benchmarks = benchmarks_of(config)
        reader = Reader(tokenizer=tokenizer, slots=slots)
        self._exam, self._eos = Examination(self._benchmarks, reader), tokenizer.eos
        self._averages = averages
        self._asking: tuple[Step, Any] | None = None
        sizes = ", ".join(f"{one.name} ({len(one.items):,})" for one in self._benchmarks)
        self.description = f"examined by {sizes}"

    def __call__(self, step: Step, state: TrainState) -> Mapping[str, float]:
        """The score that stands for each benchmark, by `metric_of`.

        Cost: a compilation or two the first time; then what an engine needs for all items, which
        has beside the state what of the devices' memory is left.
        """
        params, several_models = state["params"], bool(step.spec.model_names)
        own = params[MODEL] if several_models else params
        if self._asking is None or self._asking[0] is not step:
            from colossax.inference import several  # what generates is loaded where it does

            rest = {name: x for name, x in state.items() if name != "params"}
            if several_models:
                rest["params"] = {name: x for name, x in params.items() if name != MODEL}
            if self._averages:
                rest["learning"] = own
            spec = step.spec_of(MODEL) if several_models else step.spec
            how = {"eos": self._eos, "beside": held_bytes(rest)}
            first = several(spec, step.bound, own, requests=self._exam.requests, **how)
            # Kept without these parameters, which may be nobody else's.
            self._asking = step, first.with_params(jax.tree.map(_shape_of, own))
        asking = self._asking[1].with_params(own)
        results = self._exam.results(asking.run(over=self._exam.over))
        return {
            metric_of(one): results[one.name].scores[one.metric].value for one in self._benchmarks
        }


def _shape_of(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
