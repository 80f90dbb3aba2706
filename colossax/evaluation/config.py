"""What a run's model is examined by, as a part of its configuration."""

import dataclasses
from typing import Any

from colossax.config import Count, MeshAxis, Natural, check_types
from colossax.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """By what a run's model is examined whenever it is validated.

    Attributes:
        tasks: Benchmarks as `colossax eval` names them, parted by commas: docstrings,mmlu=FOLDER.
        shots: Examples before each question; None: as many as is usual for each.
        limit: Most questions of each group; None: all.
    """

    tasks: str = ""
    shots: Natural | None = None
    limit: Count | None = None

    def __post_init__(self):
        check_types(self, "evaluation")

    def __bool__(self):
        return bool(self.tasks)

    def check(self, run: Any) -> None:
        """Refuse a run whose model cannot be asked.

        Args:
            run: A `TrainConfig`.

        Raises:
            InputError: It continues no text, a drafter learns in its place, or it has stages.
        """
        if not self:
            return
        data = run.data
        others = (data.images, data.audio, data.masking, data.spans)
        if any(one is not None for one in others) or run.objective.name == "reward":
            raise InputError(
                "evaluation.tasks: the model that the run trains continues no text, which"
                " benchmarks ask for; leave it out"
            )
        if run.drafter:
            raise InputError(
                "evaluation.tasks: a drafter learns beside a model that stays as it is; leave it"
                " out, and examine the model by colossax eval"
            )
        if run.plan.mesh.get(MeshAxis.STAGE, 1) > 1:
            raise InputError(
                "evaluation.tasks: with stages no prompt is scored; leave it out and examine the"
                " checkpoints by colossax eval, or give the devices of 'stage' to 'tensor' or"
                " 'fsdp'"
            )
