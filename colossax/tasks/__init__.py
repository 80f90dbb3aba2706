"""What is trained: configuration, loss, batches, optimizer."""

from .config import DataConfig as DataConfig
from .config import OptimizerConfig as OptimizerConfig
from .config import SampleConfig as SampleConfig
from .config import TrainConfig as TrainConfig
from .next_token import next_token_loss as next_token_loss
