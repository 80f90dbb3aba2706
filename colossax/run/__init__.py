"""The life of a run: from its folder to its last checkpoint."""

from .initial import with_initial_model as with_initial_model
from .progress import Stream as Stream
from .run import RunOptions as RunOptions
from .run import Trained as Trained
from .run import train as train
from .run_dir import RunFolder as RunFolder
