"""Folders of models that tell embeddings, as the library `sentence-transformers` writes them."""

from .files import head_of_folder as head_of_folder
from .files import write_modules as write_modules
