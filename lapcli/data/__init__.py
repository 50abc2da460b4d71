"""Text: the `builtin` corpus, synthetic recall, files and hub data sets, mixtures, and blocks of tokens of them."""

from lapcli.data.blocks import TokenBlocks, token_blocks
from lapcli.data.builtin import builtin_digest, builtin_train, heldout_builtin_text, load_builtin
from lapcli.data.documents import Document
from lapcli.data.overlap import HeldOutIndex
from lapcli.data.recall import Haystack, Needle, RecallDocument, RecallMix, recall_documents, ruler_single
from lapcli.data.sources import check_source, fingerprint, open_source, parse_mixture

__all__ = [
    "Document",
    "Haystack",
    "HeldOutIndex",
    "Needle",
    "RecallDocument",
    "RecallMix",
    "TokenBlocks",
    "builtin_digest",
    "builtin_train",
    "check_source",
    "fingerprint",
    "heldout_builtin_text",
    "load_builtin",
    "open_source",
    "parse_mixture",
    "recall_documents",
    "ruler_single",
    "token_blocks",
]
