"""Evaluation: benchmarks read from files, asked of a model by an engine, scored with errors."""

from typing import TYPE_CHECKING

from colossax.lazy import lazily

if TYPE_CHECKING:
    from .answering import AnswerItem as AnswerItem
    from .benchmark import Benchmark as Benchmark
    from .benchmark import Examination as Examination
    from .benchmark import Result as Result
    from .choosing import ChoiceItem as ChoiceItem
    from .config import EvaluationConfig as EvaluationConfig
    from .formats.named import read_benchmark as read_benchmark
    from .items import Asked as Asked
    from .items import Item as Item
    from .items import Prompt as Prompt
    from .items import Rated as Rated
    from .passages import PassageItem as PassageItem
    from .reading import Reader as Reader
    from .report import Evaluated as Evaluated
    from .report import aligned as aligned
    from .report import table as table
    from .report import written as written
    from .scores import Ratio as Ratio
    from .scores import Score as Score
    from .training import Examiner as Examiner
else:
    __getattr__, __dir__ = lazily(__name__)
