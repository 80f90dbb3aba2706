"""Text in, batches out.

`path_documents` or `stdlib_documents` -> `train_tokenizer` -> `encode_corpus` -> `Corpus.split` ->
`Rows` -> `BatchLoader` -> `global_arrays`. Grain, tokenizers and pyarrow are imported when they are
first needed: random rows (`SyntheticRows`) need none of them, a `Tokenizer` no JAX.
"""

from typing import TYPE_CHECKING

from colossax.lazy import lazily

if TYPE_CHECKING:
    from colossax.config import cache_folder as cache_folder

    from .chats.chat import Chat as Chat
    from .chats.template import ChatTemplate as ChatTemplate
    from .corpus import Corpus as Corpus
    from .corpus import Split as Split
    from .corpus import encode_corpus as encode_corpus
    from .corpus import unigram_entropy_nats as unigram_entropy_nats
    from .loader import BatchLoader as BatchLoader
    from .loader import ValidationBatches as ValidationBatches
    from .loader import global_arrays as global_arrays
    from .loader import wanted_rows as wanted_rows
    from .masking import MaskedRows as MaskedRows
    from .mixture import Mixture as Mixture
    from .rows import Rows as Rows
    from .rows import RowSource as RowSource
    from .rows import WholeDocuments as WholeDocuments
    from .rows import stack_rows as stack_rows
    from .sound.log_mel import log_mel as log_mel
    from .sound.tones import Tones as Tones
    from .sources import Documents as Documents
    from .sources import joined as joined
    from .sources import path_documents as path_documents
    from .sources import stdlib_documents as stdlib_documents
    from .spans import SpanRows as SpanRows
    from .synthetic import SyntheticRows as SyntheticRows
    from .tokenizer import Tokenizer as Tokenizer
    from .tokenizer import train_tokenizer as train_tokenizer
else:
    __getattr__, __dir__ = lazily(__name__)
