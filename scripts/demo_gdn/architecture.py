"""What a training run must know of the model it trains: the same run makes `demo:gdn` and `demo:transformer`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from demo_gdn.card import write_card
from demo_gdn.modelling import demo_config, fresh_model, make_optimiser, save_model, stored_weights
from demo_gdn.operator_variants import use_operator
from demo_gdn.optim import MuonAdamW
from demo_gdn.step import Network


class _Optimiser(Protocol):
    def __call__(self, model: nn.Module, device: torch.device, *, muon_rate: float, adam_rate: float) -> MuonAdamW: ...


@dataclass(frozen=True)
class Architecture:
    """A model, and how it is run, trained and stored.

    Attributes:
        script: that makes it, for the log.
        config: of a tokenizer, a vocabulary and the tokens of a training row; `tiny` for a trial.
        fresh: the model of a config, on a device, by a seed.
        optimiser: of its parameters.
        network: how it runs in training.
        use: lets it run by one of the implementations that it has.
        stored: the state dict as it is stored.
        save: writes weights and config.
        card: writes the card from the log.
    """

    script: str
    config: Callable[..., Any]
    fresh: Callable[[Any, torch.device, int], Any]
    optimiser: _Optimiser
    network: type[Network]
    use: Callable[[Any, str], None]
    stored: Callable[[nn.Module], Mapping[str, Tensor]]
    save: Callable[[Any, Path], None]
    card: Callable[..., None]


GDN = Architecture(
    script="scripts/train_demo_gdn.py",
    config=demo_config,
    fresh=fresh_model,
    optimiser=make_optimiser,
    network=Network,
    use=use_operator,
    stored=stored_weights,
    save=save_model,
    card=write_card,
)
"""`demo:gdn`."""
