"""Muon: whose matrices, by what steps; the library's own is the oracle."""

import pytest
import torch
from torch import nn

from lapcli.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM
from lapcli.recipe import TrainingSettings
from lapcli.training.fresh import WholePlan
from lapcli.training.optimisers import MuonAdamW, optimiser_of, orthogonalised

SETTINGS = TrainingSettings(optimizer="muon", lr=1e-2, lr_min=1e-3, weight_decay=0.1, beta2=0.95)


def relative(one, other):
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.parametrize("shape", [(48, 48), (16, 80), (80, 16)], ids=str)
def test_steps_of_matrices_are_those_of_torch(shape):
    """Torch iterates in bf16 everywhere; ours on a CPU in fp32, so that they differ by bf16's rounding."""
    torch.manual_seed(0)
    mine = [nn.Parameter(torch.randn(shape) * 0.1) for _ in range(3)]
    theirs = [nn.Parameter(p.detach().clone()) for p in mine]
    own = MuonAdamW([{"params": mine, "orthogonal": True}], lr=0.01, weight_decay=0.1)
    stock = torch.optim.Muon(theirs, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    before = [p.detach().clone() for p in mine]
    for _ in range(4):
        for one, other in zip(mine, theirs, strict=True):
            one.grad = torch.randn(shape)
            other.grad = one.grad.clone()
        own.step()
        stock.step()
    for one, other, old in zip(mine, theirs, before, strict=True):
        # Fifteen products of bf16 a step, each of which rounds by up to 2^-8.
        assert relative(one - old, other - old) < 15 * 2**-8
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in mine)


def test_singular_values_come_near_one():
    torch.manual_seed(0)
    matrices = torch.randn(4, 24, 40) * torch.tensor([1e-6, 1.0, 1e3, 1.0]).view(-1, 1, 1)
    values = torch.linalg.svdvals(orthogonalised(matrices))
    assert 0.6 < values.min() < values.max() < 1.3
    # What has no direction gets none.
    assert not orthogonalised(torch.zeros(1, 4, 6)).any()


def test_what_tokens_meet_first_and_last_and_vectors_and_filters_are_adamws():
    config = GatedDeltaNetConfig(
        hidden_size=32, num_heads=2, head_dim=16, num_hidden_layers=2, vocab_size=64, intermediate_size=48,
        tie_word_embeddings=False, pad_token_id=0,
    )  # fmt: skip
    model = GatedDeltaNetForCausalLM(config)
    plan = WholePlan({name: tuple(p.shape) for name, p in model.named_parameters()})
    optimiser = optimiser_of(model, plan, SETTINGS)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [[names[id(p)] for p in group["params"]] for group in optimiser.param_groups]
    assert sorted(name for group in groups for name in group) == sorted(names.values())
    (matrices,) = [g for g, group in zip(groups, optimiser.param_groups, strict=True) if group["orthogonal"]]
    assert all(".layers." in name and name.endswith("proj.weight") for name in matrices)
    assert {"model.embeddings.weight", "lm_head.weight"} <= {*names.values()} - {*matrices}
    assert len(matrices) == 2 * 10

    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    stock = torch.optim.AdamW(
        [{"params": [p for n, p in model.named_parameters() if n not in matrices and p.ndim > 1]}],
        lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95),
    )  # fmt: skip
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimiser.step()
    mine = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(before[name])
    stock.step()
    for group in stock.param_groups:
        for p in group["params"]:
            assert torch.equal(mine[names[id(p)]], p)
    for name in matrices:
        # The size of AdamW's steps, 0.2 of the rate, times singular values that are near one.
        size = (mine[name] - before[name] * (1 - 1e-2 * 0.1)).square().mean().sqrt().item()
        assert 0.6 < size / (0.2 * 1e-2) < 1.3, name
