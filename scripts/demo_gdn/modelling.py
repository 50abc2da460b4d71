"""The model's configuration and start, which parameters Muon takes, and how the result is stored."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from demo_gdn.optim import MuonAdamW
from demo_gdn.vocabulary import BOUNDARY, PADDING, load_tokenizer_json
from lapcli.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM
from lapcli.training.fresh import spread_out


def demo_config(tokenizer_json: str | None, vocab_size: int, *, length: int, tiny: bool) -> GatedDeltaNetConfig:
    """The configuration of `demo:gdn`, trained on rows of `length` tokens, or of a two-layer trial.

    It is named for twice that length, up to which it is measured: a state has no positions.
    """
    boundary, padding = 0, 1
    if tokenizer_json is not None:
        tokenizer = load_tokenizer_json(tokenizer_json)
        boundary, padding = tokenizer.token_to_id(BOUNDARY), tokenizer.token_to_id(PADDING)
    size: dict[str, Any] = (
        {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 32, "intermediate_size": 128}
        if tiny
        else {"hidden_size": 256, "num_hidden_layers": 6, "num_heads": 4, "head_dim": 64, "intermediate_size": 768}
    )
    return GatedDeltaNetConfig(
        **size,
        expand_v=1.0,
        use_gate=True,
        use_short_conv=True,
        conv_size=4,
        max_position_embeddings=2 * length,
        tie_word_embeddings=True,
        vocab_size=vocab_size,
        bos_token_id=boundary,
        eos_token_id=boundary,
        pad_token_id=padding,
        architectures=["GatedDeltaNetForCausalLM"],
    )


def fresh_model(config: GatedDeltaNetConfig, device: torch.device, seed: int) -> Any:
    """A `GatedDeltaNetForCausalLM` at its `spread` start (`lapcli.training.fresh`), fp32."""
    torch.manual_seed(seed)
    model: Any = GatedDeltaNetForCausalLM(config)
    spread_out(model)
    return model.to(device)


def make_optimiser(model: nn.Module, device: torch.device, *, muon_rate: float, adam_rate: float) -> MuonAdamW:
    """Muon for the 2-D weights of the layers but the gates' narrow ones, AdamW for the rest."""
    matrices: list[nn.Parameter] = []
    others: list[tuple[nn.Parameter, float]] = []
    for name, parameter in model.named_parameters():
        narrow = name.endswith(("a_proj.weight", "b_proj.weight"))
        if parameter.ndim == 2 and "embeddings" not in name and not narrow:
            matrices.append(parameter)
        else:
            others.append((parameter, 1.0))
    return MuonAdamW(matrices, others, device, muon_rate=muon_rate, adam_rate=adam_rate)


def stored_weights(model: nn.Module) -> dict[str, Tensor]:
    """The state dict as it is stored: bf16, but fp32 for what sets the decays, where bf16 has too few digits."""
    return {
        name: tensor.detach().float().cpu() if name.endswith(("A_log", "dt_bias")) else tensor.detach().bfloat16().cpu()
        for name, tensor in model.state_dict().items()
    }


def save_model(model: GatedDeltaNetForCausalLM, output: Path) -> None:
    """Write `model.safetensors`, `config.json` and `generation_config.json`."""
    copy: Any = GatedDeltaNetForCausalLM(model.config)
    copy.to(torch.bfloat16)
    weights = stored_weights(model)
    copy.load_state_dict(weights)
    for name, parameter in copy.named_parameters():
        parameter.data = weights[name]
    copy.save_pretrained(output)
    (output / "model.safetensors").chmod(0o644)
