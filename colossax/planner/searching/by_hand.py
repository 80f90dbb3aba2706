"""What a plan as it is needs and takes, by formula alone."""

from colossax.aot import Target
from colossax.config import HOST_KINDS, SAVEABLE, Plan
from colossax.errors import PlanError
from colossax.planner.profiling import LayerKind, ModelProfile
from colossax.planner.searching.hosted import tier_of
from colossax.planner.searching.hosted_stages import StagedTier
from colossax.planner.searching.predicting import OnMesh, Prediction
from colossax.planner.searching.scored import Placed
from colossax.planner.searching.seconds import Rates
from colossax.step.microbatches import PER_STAGE


def predict(
    profile: ModelProfile, plan: Plan, target: Target, rates: Rates | None = None
) -> Prediction:
    """Of a plan as it is.

    Args:
        profile: The model.
        plan: The whole plan; of what is in host memory shares of the layers count.
        target: Where.
        rates: That were measured; default what is assumed of the target.

    Raises:
        PlanError: Its mesh does not divide the model or its batch; its stages have in host memory
            what formulas do not know.
    """
    mesh = OnMesh(profile, plan, target, rates=rates)
    batch = plan.batch
    rows = batch.microbatch or mesh.rows // batch.accumulation
    if mesh.stages.count > 1 and batch.microbatch is None:
        most = min(PER_STAGE * mesh.stages.count, rows)
        of_rows = next(n for n in range(most, 0, -1) if not rows % n)
        rows //= plan.pipeline.microbatches or of_rows
    calls = [kind.calls // mesh.stages.share for kind in profile.kinds]
    policies = [
        [(count, _names_of(plan) & _named(kind))]
        for count, kind in zip(calls, profile.kinds, strict=True)
    ]
    if len(calls) == 1 and len(plan.segments) > 1:
        given = [(one.count, _names_of(plan, at)) for at, one in enumerate(plan.segments)]
        left = calls[0] - sum(count for count, _ in given if count > 0)
        known = _named(profile.kinds[0])
        policies = [[(left if count == -1 else count, names & known) for count, names in given]]
    if not plan.offload.wanted:
        return mesh.predicted(rows, policies, plan.loss.vocab_chunks)
    layers = max((info.total_layers or 0 for info in profile.infos), default=0)
    placed = Placed(
        layers=layers,
        **{kind: plan.offload.layers(kind, layers) for kind in (*HOST_KINDS, "disk")},
        staged=mesh.stages.count > 1,
    )
    tier = tier_of(mesh, placed)
    if isinstance(tier, StagedTier) and placed not in tier.placements():
        raise PlanError(
            f"plan.offload: of stages formulas do not know {placed.shown}; count the plan with"
            " colossax inspect"
        )
    return tier.predicted(rows, policies, plan.loss.vocab_chunks, placed)


def _named(kind: LayerKind) -> frozenset[str]:
    """All names that a layer gives; mixtures give none to their experts' hidden units."""
    return max(kind.traced.again, key=len)


def _names_of(plan: Plan, segment: int = 0) -> frozenset[str]:
    """What a segment keeps on the device; `none` counts as all that has a name."""
    remat = plan.segments[segment].remat
    return frozenset(SAVEABLE if remat in ("none", "dots") else remat.split("+")) - {"full"}
