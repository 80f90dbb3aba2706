"""What a run's model is examined by, as a part of its configuration."""

import dataclasses

from colossax.config import Count, MeshAxis, Natural, Plan, check_types
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

    def check(self, plan: Plan) -> None:
        """Refuse a plan under which no prompt is scored.

        Raises:
            InputError: It has stages.
        """
        if self and plan.mesh.get(MeshAxis.STAGE, 1) > 1:
            raise InputError(
                "evaluation.tasks: with stages no prompt is scored; leave it out and examine the"
                " checkpoints by colossax eval, or give the devices of 'stage' to 'tensor' or"
                " 'fsdp'"
            )
