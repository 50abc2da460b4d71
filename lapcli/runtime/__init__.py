"""Decoding at the memory limit: static states, fused steps, CUDA graphs, rows that come and go.

`Engine` runs a stock checkpoint; `Batch` decodes any number of rows with it, each with its own settings.
"""

from lapcli.runtime.batch import Batch
from lapcli.runtime.engine import Engine, Prefilled
from lapcli.runtime.settings import DecodePath, Event, GenerationSettings, TokenScores

__all__ = ["Batch", "DecodePath", "Engine", "Event", "GenerationSettings", "Prefilled", "TokenScores"]
