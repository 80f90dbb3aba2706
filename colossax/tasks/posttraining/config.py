"""An objective on answers, as data."""

import dataclasses
from typing import Annotated, Any

from colossax.config import (
    Bound,
    Count,
    MeshAxis,
    NotNegative,
    Positive,
    Share,
    at_least,
    check_text,
    check_types,
    nearest,
    to_json,
)
from colossax.errors import InputError, PlanError

LEARNER, CRITIC, REFERENCE, TEACHER = "model", "critic", "reference", "teacher"
"""Names of a run's models, where there are several: the one that learns, which checkpoints have as
if it were alone; the one that learns what its answers are worth; and the frozen ones that it is
held against or learns from."""

BETAS = {
    "sft": 1.0,
    "reward": 1.0,
    "distill": 1.0,
    "dpo": 0.1,
    "ipo": 0.1,
    "simpo": 2.0,
    "orpo": 0.1,
    "kto": 0.1,
}
"""Objectives on answers that are given, and the coefficient of each where none is said."""

_MARGINS = {"reward": 0.0}

ON_ROLLOUTS = ("grpo", "ppo")
"""Objectives on answers that the model gives itself."""

_WITH_REFERENCE = ("dpo", "ipo", "kto")
_ON_PAIRS = ("reward", "dpo", "ipo", "simpo", "orpo")

_OF_DISTILL = ("teacher", "temperature", "text")
_OF_PPO = ("critic", "value", "value_clip", "discount", "decay", "whitened")
"""Settings of one objective alone."""

NORMALISERS = ("token", "sequence", "longest")
ESTIMATORS = ("k1", "k2", "k3")

_Factor = Annotated[float, Bound(low=1, above=True, told="a number above 1, as 3")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """A policy gradient, as data. The defaults are GRPO's, without a term of the divergence.

    Attributes:
        clip_low: By how much the ratio may fall below 1 before it stops to count.
        clip_high: By how much it may rise above 1; DAPO has 0.28 beside a `clip_low` of 0.2.
        dual_clip: Of negative advantages, the largest ratio that counts; none: any does.
        divergence: Coefficient of the divergence from the reference; 0: none is asked for. Of ppo
            it is taken off what each token earns, of grpo it is a term of the loss.
        estimator: Of the divergence, with `d = log policy - log reference`: `k1` is d, `k2` d^2/2,
            `k3` `e^-d - 1 + d`.
        normaliser: What the sum over tokens is divided by. `token`: the tokens of all answers of
            the global batch (DAPO); `sequence`: each answer's own tokens, and then the answers
            (GRPO); `longest`: the answers times `longest` (Dr. GRPO).
        longest: Tokens that an answer may have, for the last of these.
        temperature: That answers were drawn at.
        critic: Of ppo, as all that follows: the checkpoint that its critic starts from, of a model
            that rewards or of a critic; none: from the policy's, with a new head.
        value: Coefficient of the critic's loss.
        value_clip: By how much a value may move from what it was before it stops to count.
        discount: Of what a later token earns, for each token in between.
        decay: Of what is known of later tokens (lambda of generalised advantages).
        whitened: Whether advantages are centred and scaled over the global batch.
    """

    clip_low: NotNegative = 0.2
    clip_high: NotNegative = 0.2
    dual_clip: _Factor | None = None
    divergence: NotNegative = 0.0
    estimator: str = "k3"
    normaliser: str = "sequence"
    longest: Count | None = None
    temperature: Positive = 1.0
    critic: str | None = None
    value: NotNegative = 0.5
    value_clip: Positive = 0.2
    discount: Share = 1.0
    decay: Share = 0.95
    whitened: bool = True

    def __post_init__(self):
        check_types(self, "policy")
        check_text(self.critic or "", "policy.critic")
        for name, known in (("normaliser", NORMALISERS), ("estimator", ESTIMATORS)):
            if getattr(self, name) not in known:
                found = getattr(self, name)
                raise InputError(f"policy.{name}: unknown '{found}'{nearest(found, known)}")
        if (self.normaliser == "longest") != (self.longest is not None):
            raise InputError(
                f"policy.longest: found {self.longest} beside the normaliser {self.normaliser};"
                " give it with longest alone, as the most tokens of an answer"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What a model learns from conversations, in place of the next token of all text.

    Attributes:
        name: `sft` (what assistants say), `distill` (what another model would say in their place),
            `reward` (to tell what an answer is worth), `dpo`, `ipo`,
            `simpo`, `orpo` (a chosen answer over a rejected one), `kto` (answers that are good or
            bad), `grpo` and `ppo` (answers of its own that are rewarded; ppo learns beside that
            what they will be worth); empty: text is learned.
        beta: Coefficient of the objective; none: 0.1, of simpo 2. Of grpo and ppo it is
            `policy.divergence`; sft, distill and reward have none.
        margin: Of simpo and reward, by which a chosen answer is to be ahead; none: 1, of reward 0.
        teacher: Of distill, the checkpoint of the model that is learned from.
        temperature: Of distill, by which logits of both are divided.
        text: Of distill, the share of what assistants do say, beside what the teacher would.
        desirable: Of kto, the weight of good answers.
        undesirable: Of kto, the weight of bad answers.
        documents: Prompts with an answer that share a row, at most; even where they are pairs. Of
            grpo and ppo exactly so many, each in as many of a row's tokens.
        template: File of a Jinja template that makes text of messages; none: the checkpoint's, or
            a plain one where it has none.
    """

    name: str = dataclasses.field(default="", metadata={"choices": ("", *BETAS, *ON_ROLLOUTS)})
    beta: Positive | None = None
    margin: NotNegative | None = None
    teacher: str | None = None
    temperature: Positive = 1.0
    text: Share = 0.0
    desirable: NotNegative = 1.0
    undesirable: NotNegative = 1.0
    documents: Count = 16
    template: str | None = None

    def __post_init__(self):
        check_types(self, "objective")
        known = (*BETAS, *ON_ROLLOUTS)
        if self.name and self.name not in known:
            raise InputError(f"objective.name: unknown '{self.name}'{nearest(self.name, known)}")
        if self.beta is not None and self.name in ("sft", "distill", "reward"):
            raise InputError(f"objective.beta: {self.name} has none; leave it out")
        for field in dataclasses.fields(self):
            own = field.name not in _OF_DISTILL or self.name == "distill"
            if not own and getattr(self, field.name) != field.default:
                raise InputError(
                    f"objective.{field.name}: is of distill, which learns from another model; leave"
                    " it out, or train distill"
                )
        check_text(self.teacher or "", "objective.teacher")
        check_text(self.template or "", "objective.template")
        if self.on_pairs and self.documents % 2:
            raise InputError(
                f"objective.documents: found {self.documents}, and {self.name} has pairs, whose two"
                " answers share a row; give an even number"
            )

    def __bool__(self) -> bool:
        return bool(self.name)

    @property
    def with_reference(self) -> bool:
        """Whether the policy is held against a frozen model."""
        return self.name in _WITH_REFERENCE

    @property
    def on_pairs(self) -> bool:
        """Whether it learns from a chosen and a rejected answer."""
        return self.name in _ON_PAIRS

    @property
    def on_rollouts(self) -> bool:
        """Whether it learns from answers that the model gives in the run."""
        return self.name in ON_ROLLOUTS

    @property
    def coefficient(self) -> float:
        """`beta`, or what the objective has without one."""
        return BETAS[self.name] if self.beta is None else self.beta

    @property
    def ahead(self) -> float:
        """`margin`, or what the objective has without one."""
        return _MARGINS.get(self.name, 1.0) if self.margin is None else self.margin


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How a model answers prompts in a run, and who rewards that.

    Attributes:
        rewards: `package.module:function`, a plain function of a list of `Answer` that returns a
            number for each; see `RewardWorkers`.
        judge: Checkpoint of a model that `reward` trained, whose number is the reward; beside a
            function it is told that one, as `Answer.judged`.
        group: Answers to each prompt, which grpo holds against each other.
        max_tokens: Of an answer at most.
        batches: Global batches of answers that are written at once, by the same parameters, and
            learned from one after another.
        epochs: How often each of those is learned from, when all others have been.
        scaled: Of grpo, whether an answer's advantage is divided by the spread of its group; Dr.
            GRPO leaves it out.
        seats: Answers that an engine writes at once, each with a cache of its own.
        workers: Processes that reward.
        seconds: That the function may take for a call.
        memory_gb: That each process may address.
        failed: Reward of an answer that could not be judged.
    """

    rewards: str | None = None
    judge: str | None = None
    group: Count = 8
    max_tokens: Count = 128
    batches: Count = 1
    epochs: Count = 1
    scaled: bool = True
    seats: Count = 64
    workers: Count = 2
    seconds: Positive = 10.0
    memory_gb: Positive = 4.0
    failed: float = 0.0

    def __post_init__(self):
        check_types(self, "rollout")
        check_text(self.rewards or "", "rollout.rewards")
        check_text(self.judge or "", "rollout.judge")

    @property
    def updates(self) -> int:
        """Steps between the answers of one state of the model and those of the next."""
        return self.batches * self.epochs


def longest_prompt(config: Any) -> int:
    """Tokens that a `TrainConfig` has for a prompt beside its answer."""
    return config.data.seq_len // config.objective.documents - config.rollout.max_tokens


def check_objective(config: Any) -> None:
    """Refuse a `TrainConfig` whose objective cannot be trained.

    Raises:
        InputError: The model tells no tokens of its own text, data are none of conversations, a
            critic is asked for by another objective, or more is to be learned.
        PlanError: A model and its critic are to share stages.
    """
    objective, data = config.objective, config.data
    given = {"rollout": config.rollout, "policy": config.policy}
    for name, of in given.items():
        if not objective.on_rollouts and of != type(of)():
            changed = next(k for k, v in vars(of).items() if v != getattr(type(of)(), k))
            raise InputError(
                f"{name}.{changed}: is of answers that the model gives in the run, as grpo and ppo"
                " learn from; leave it out, or train one of them"
            )
    _check_others(config)
    if not objective:
        return
    decoder = config.model.decoder()
    others = {
        "drafter.layers": bool(config.drafter),
        "data.masking": data.masking is not None,
        "data.spans": data.spans is not None,
        "data.images": data.images is not None,
        "data.audio": data.audio is not None,
        "data.tokenizer_vocab": data.tokenizer_vocab is not None,
        "sample.prompt": bool(config.sample.prompt),
        "z_loss": bool(config.z_loss) and objective.name != "sft",
        "optimizer.ema": config.optimizer.averages,
    }
    found = [name for name, given in others.items() if given]
    if found:
        raise InputError(
            f"objective.name: found {objective.name} beside {', '.join(found)}; it is of"
            " conversations, with the tokenizer of the model: leave the others out"
        )
    if getattr(decoder, "longest_source", None) or not getattr(decoder, "causal", True):
        raise InputError(
            f"objective.name: {objective.name} is of decoders, whose text goes on with an answer;"
            " give the checkpoint of one"
        )


def against_reference(config: Any) -> bool:
    """Whether a `TrainConfig`'s model is held against what it was."""
    diverges = config.objective.on_rollouts and config.policy.divergence > 0
    return config.objective.with_reference or diverges


def _check_others(config: Any) -> None:
    """Refuse settings of one policy gradient beside another."""
    policy, name = config.policy, config.objective.name
    for field in dataclasses.fields(policy):
        if field.name in _OF_PPO and name != "ppo" and getattr(policy, field.name) != field.default:
            raise InputError(
                f"policy.{field.name}: is of ppo, which has a critic; leave it out, or train ppo"
            )
    stages = config.plan.mesh.get(MeshAxis.STAGE, 1)
    if name == "ppo" and stages > 1:
        raise PlanError(
            f"plan.mesh: found stage={stages}, and stages share the layers of one model that"
            " learns, while ppo has two; give data, fsdp, tensor or ring, or train grpo"
        )
    if name == "ppo" and not config.rollout.scaled:
        raise InputError(
            "rollout.scaled: is of grpo, which holds the answers to a prompt against each other;"
            " leave it out, or give policy.whitened"
        )


def frozen_beside(config: Any) -> dict[str, str | None]:
    """Frozen models of a `TrainConfig`'s run by name, each with the checkpoint that it is.

    A reference is what the run starts from. With an adapter it is the model without that, and no
    model of its own.
    """
    found: dict[str, str | None] = {}
    if config.objective.name == "distill":
        found[TEACHER] = config.objective.teacher
    if against_reference(config) and not config.adapter:
        found[REFERENCE] = config.init
    return found


def deciding(of: Any, name: str) -> dict[str, Any]:
    """An objective's or a policy's settings that tell its run from others, as JSON.

    Those of other objectives are left out, so that they may come to be without a run being another;
    and so are checkpoints, which are told by what they hold.

    Args:
        of: Configuration.
        name: Of the objective.
    """
    without = {"teacher", "critic", *(() if name == "distill" else _OF_DISTILL)}
    if isinstance(of, PolicyConfig):
        without = {"critic", *(() if name == "ppo" else _OF_PPO)}
    return {field: value for field, value in to_json(of).items() if field not in without}


def started_from(config: Any) -> str | dict[str, Any] | None:
    """What the models of a `TrainConfig`'s run start from, as `RunConfig.init` has it."""
    beside: dict[str, Any] = {**frozen_beside(config)}
    if config.objective.name == "ppo":
        beside[CRITIC] = config.policy.critic or (config.init and (config.init, LEARNER))
    if not beside:
        return config.init
    return {name: path for name, path in {LEARNER: config.init, **beside}.items() if path} or None


def check_rollouts(config: Any) -> None:
    """Refuse answers that cannot be compared, or that rows have no room for.

    Raises:
        InputError: That.
    """
    objective, data, rollout = config.objective, config.data, config.rollout
    name, answers = objective.name, data.global_batch * objective.documents
    if objective.beta is not None:
        raise InputError(
            f"objective.beta: {name} has none; how near it stays to its reference is"
            " policy.divergence"
        )
    if name == "grpo":
        at_least(2).check(rollout.group, "rollout.group")
    if answers % rollout.group:
        raise InputError(
            f"rollout.group: a step has {answers} answers (data.global_batch {data.global_batch}"
            f" rows of objective.documents {objective.documents}), which are no groups of"
            f" {rollout.group}; give a number that divides them"
        )
    if longest_prompt(config) < 1:
        raise InputError(
            f"rollout.max_tokens: an answer has {data.seq_len // objective.documents} tokens of a"
            f" row, its prompt's among them (data.seq_len {data.seq_len} for objective.documents"
            f" {objective.documents}); give fewer than those, or make rows longer"
        )
