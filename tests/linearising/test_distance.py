"""What is drawn by distance: contributions add up to what the layer gives, weights are the library's."""

import copy

import pytest
import torch

from lapcli.linearising import distance
from lapcli.linearising.distance import by_distance, contributions
from lapcli.linearising.watching import attention_of, watched
from lapcli.testing.dual_state import converted, tiny_teacher
from lapkernels.testing_dual import dual_state_inputs, sum_over_pairs

F64 = torch.float64
IDS = torch.randint(3, 60, (3, 40), generator=torch.Generator().manual_seed(0))


def test_contributions_add_up_to_the_output():
    inputs = dual_state_inputs(time=23, query_heads=6, states=3)
    found = contributions(inputs.q, inputs.k, inputs.v, inputs.g, inputs.mixture, 0.3)
    truth, _ = sum_over_pairs(inputs, 0.3)
    torch.testing.assert_close(found.sum((1, 3)), truth[:, -1], rtol=1e-10, atol=1e-10)


def test_of_a_model_they_add_up_to_what_enters_the_output_projection(monkeypatch):
    model = converted(tiny_teacher("qwen3", dtype=F64), 1)
    seen, plain = {}, distance.contributions

    def keep(*arguments):
        seen["vectors"] = plain(*arguments)
        return seen["vectors"]

    monkeypatch.setattr(distance, "contributions", keep)
    found = by_distance(model, 1, IDS)
    with torch.no_grad(), watched(model, 1) as whole:
        model(input_ids=IDS, use_cache=False)
    expected = whole.heads[0][:, -1].unflatten(-1, (4, -1))
    torch.testing.assert_close(seen["vectors"].sum((1, 3)), expected, rtol=1e-6, atol=1e-8)
    assert found.keys() == {"mixed", "state 0", "state 1"}
    assert found["mixed"].shape == (40,)
    # The last token's own contribution is not decayed, and is the first of the row.
    own = seen["vectors"].sum(1)[:, :, -1].norm(dim=-1).mean()
    assert found["mixed"][0] == pytest.approx(own.item())
    assert "mix" not in vars(attention_of(model, 1))


def test_weights_are_the_library_s():
    model = tiny_teacher("llama")
    found = by_distance(model, 2, IDS)["weight"]
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        maps = eager(input_ids=IDS, output_attentions=True, use_cache=False).attentions
    torch.testing.assert_close(found.float(), maps[2][:, :, -1].mean((0, 1)).flip(0), rtol=1e-4, atol=1e-6)
    assert found.sum() == pytest.approx(1)


def test_a_window_has_no_contributions():
    with pytest.raises(ValueError, match="layer 0 is a window"):
        by_distance(converted(tiny_teacher("llama"), 0, window=5), 0, IDS)
