"""Tokens guessed ahead of a model, which looks at several of them in one step."""

from .drafter import Drafter as Drafter
from .drafter import Guesses as Guesses
from .drafter import Target as Target
from .drafter import View as View
from .glide import GlideDrafter as GlideDrafter
from .model import ModelDrafter as ModelDrafter
from .ngram import NgramDrafter as NgramDrafter
from .retrieval import RetrievalDrafter as RetrievalDrafter
