"""What is trained: configuration, loss, batches, optimizer."""

from typing import TYPE_CHECKING

from colossax.lazy import lazily

if TYPE_CHECKING:
    from .config import DataConfig as DataConfig
    from .config import OptimizerConfig as OptimizerConfig
    from .config import RunLength as RunLength
    from .config import SampleConfig as SampleConfig
    from .config import TrainConfig as TrainConfig
    from .config import train_config_from_json as train_config_from_json
    from .distillation import distillation_loss as distillation_loss
    from .distillation import distillation_options as distillation_options
    from .distillation import soft_target_loss as soft_target_loss
    from .distillation import soft_target_options as soft_target_options
    from .heads import classification_loss as classification_loss
    from .heads import contrastive_loss as contrastive_loss
    from .heads import masked_token_loss as masked_token_loss
    from .heads import preference_loss as preference_loss
    from .heads import value_loss as value_loss
    from .image_text.loss import image_text_loss as image_text_loss
    from .initial import initial_adapter as initial_adapter
    from .initial import initial_model as initial_model
    from .next_token import next_token_loss as next_token_loss
    from .posttraining.config import ObjectiveConfig as ObjectiveConfig
    from .posttraining.config import PolicyConfig as PolicyConfig
    from .posttraining.config import RolloutConfig as RolloutConfig
    from .posttraining.config import started_from as started_from
    from .posttraining.kto import kto_loss as kto_loss
    from .posttraining.kto import kto_options as kto_options
    from .posttraining.pairs import dpo_loss as dpo_loss
    from .posttraining.pairs import ipo_loss as ipo_loss
    from .posttraining.pairs import orpo_loss as orpo_loss
    from .posttraining.pairs import simpo_loss as simpo_loss
    from .posttraining.policy_gradient.advantages import gae as gae
    from .posttraining.policy_gradient.advantages import group_advantages as group_advantages
    from .posttraining.policy_gradient.advantages import whitened as whitened
    from .posttraining.policy_gradient.critic import actor_critic_loss as actor_critic_loss
    from .posttraining.policy_gradient.critic import critic_options as critic_options
    from .posttraining.policy_gradient.loss import clipped_value_loss as clipped_value_loss
    from .posttraining.policy_gradient.loss import kl_estimate as kl_estimate
    from .posttraining.policy_gradient.loss import policy_loss as policy_loss
    from .posttraining.policy_gradient.loss import policy_options as policy_options
    from .posttraining.reference import reference_options as reference_options
    from .posttraining.rewards.answer import Answer as Answer
    from .posttraining.rewards.pool import Rewarded as Rewarded
    from .posttraining.rewards.pool import RewardWorkers as RewardWorkers
    from .task import TAKEN as TAKEN
    from .task import Callback as Callback
    from .task import Evaluator as Evaluator
    from .task import Task as Task
    from .text_task import task_of as task_of
    from .told import MaskConfig as MaskConfig
    from .told import SpanConfig as SpanConfig
else:
    __getattr__, __dir__ = lazily(__name__)
