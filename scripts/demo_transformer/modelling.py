"""The Transformer's configuration and start, how it runs in training, which parameters Muon takes, how it is stored."""

from pathlib import Path
from typing import Any

import torch
from demo_gdn.architecture import Architecture
from demo_gdn.optim import MuonAdamW
from demo_gdn.step import Network
from demo_gdn.vocabulary import BOUNDARY, PADDING, load_tokenizer_json
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from demo_transformer.card import write_card


def demo_config(tokenizer_json: str | None, vocab_size: int, *, length: int, tiny: bool) -> LlamaConfig:
    """The configuration of `demo:transformer`, about the size of `demo:gdn`; or of a two-layer trial.

    Two query heads share a key head, as in most models of today. The window is `length`, the tokens of a row in
    training: rotary positions beyond it mean nothing to the model.
    """
    boundary, padding = 0, 1
    if tokenizer_json is not None:
        tokenizer = load_tokenizer_json(tokenizer_json)
        boundary, padding = tokenizer.token_to_id(BOUNDARY), tokenizer.token_to_id(PADDING)
    size: dict[str, Any] = (
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
        if tiny
        else {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 896}
    )
    return LlamaConfig(
        **size,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        vocab_size=vocab_size,
        bos_token_id=boundary,
        eos_token_id=boundary,
        pad_token_id=padding,
        architectures=["LlamaForCausalLM"],
    )


def fresh_model(config: LlamaConfig, device: torch.device, seed: int) -> Any:
    """A `LlamaForCausalLM`, fp32; what is added to the residual stream begins at zero."""
    torch.manual_seed(seed)
    model: Any = LlamaForCausalLM(config)
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
    return model.to(device)


def make_optimiser(model: nn.Module, device: torch.device, *, muon_rate: float, adam_rate: float) -> MuonAdamW:
    """Muon for the matrices of the layers, AdamW for embedding and norms."""
    named = [(name, parameter) for name, parameter in model.named_parameters()]
    matrices = [parameter for name, parameter in named if parameter.ndim == 2 and "embed" not in name]
    others = [(parameter, 1.0) for name, parameter in named if parameter.ndim != 2 or "embed" in name]
    return MuonAdamW(matrices, others, device, muon_rate=muon_rate, adam_rate=adam_rate)


def _block(block: Any, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """One layer; compiled once and used by all. Without a mask, attention is causal."""
    return block(hidden, attention_mask=None, position_embeddings=(cosine, sine))


class TransformerNetwork(Network):
    """The model as the training runs it; positions are counted from the beginning of a row.

    Args:
        model: a `LlamaForCausalLM`.
        compiled: whether to compile.
        device: where it lies.
    """

    def __init__(self, model: Any, *, compiled: bool, device: torch.device):
        super().__init__(model, compiled=compiled, device=device)
        self._layer: Any = torch.compile(_block, dynamic=False) if compiled else _block

    def hidden(self, ids: Tensor) -> Tensor:
        """`[B, T]` ids to `[B, T, D]` after the last norm."""
        body = self.model.model
        hidden = self._embed(ids, body.embed_tokens.weight)
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        cosine, sine = body.rotary_emb(hidden, position_ids=positions)
        for block in body.layers:
            hidden = self._layer(block, hidden, cosine, sine)
        return body.norm(hidden)


def stored_weights(model: nn.Module) -> dict[str, Tensor]:
    """The state dict as it is stored: bf16."""
    return {name: tensor.detach().bfloat16().cpu() for name, tensor in model.state_dict().items()}


def save_model(model: Any, output: Path) -> None:
    """Write `model.safetensors`, `config.json` and `generation_config.json`."""
    copy: Any = LlamaForCausalLM(model.config).to(torch.bfloat16)  # pyright: ignore[reportArgumentType]
    copy.load_state_dict(stored_weights(model))
    copy.save_pretrained(output)
    (output / "model.safetensors").chmod(0o644)


def _one_way(_model: Any, _name: str) -> None:
    """There is nothing to choose: attention is PyTorch's own."""


TRANSFORMER = Architecture(
    script="scripts/train_demo_transformer.py",
    config=demo_config,
    fresh=fresh_model,
    optimiser=make_optimiser,
    network=TransformerNetwork,
    use=_one_way,
    stored=stored_weights,
    save=save_model,
    card=write_card,
)
"""`demo:transformer`."""
