"""lapkernels in the place of a library's functions: the same logits and gradients, only where they are the choice."""

import os
import subprocess
import sys
import textwrap
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lapcli.errors import ModelError
from lapcli.families import stand_ins
from lapcli.families.library_kernels import kernels_of, let_lapkernels_stand_in
from lapcli.families.loading import load_model, resolve_model
from lapcli.families.registry import family_for
from lapcli.machine import Machine
from lapcli.reporting import SilentReporter
from lapcli.runtime.prefill import cache_argument
from lapcli.testing.stock_models import tiny_stock_model
from lapkernels.delta_rule.api import Choice
from lapkernels.errors import InvalidInput

CUDA = torch.device("cuda")

INTERPRETED = """
    from lapkernels.testing_interpreter import quicken
    quicken()
    import sys
    import torch
    from lapcli.families import library_kernels, stand_ins
    from lapcli.families.loading import load_model, resolve_model
    # As on a GPU: whatever the library has for one goes before PyTorch.
    library_kernels._runs_pytorch = lambda device: False
    seen = []
    kernel = stand_ins.delta_rule
    stand_ins.delta_rule = lambda *a, **k: seen.append(k["impl"]) or kernel(*a, **k)
    tokens = torch.arange(3, 73)[None]
    model, found = load_model(resolve_model(sys.argv[1])), []
    for ours in (True, False):
        library_kernels.let_lapkernels_stand_in(model, ours)
        for choice in library_kernels._chosen(model):
            choice.fast = choice.plain
        model.zero_grad()
        first = model(input_ids=tokens[:, :66], use_cache=True)
        first.logits.square().mean().backward()
        # On from a state.
        cache = {name: first[name] for name in ("past_key_values", "cache") if first.get(name) is not None}
        with torch.no_grad():
            second = model(input_ids=tokens[:, 66:], use_cache=True, **cache)
        found.append([first.logits, second.logits, *(p.grad for p in model.parameters() if p.grad is not None)])
        assert seen == ["triton"] * (2 * ours), seen
        seen.clear()
    for mine, librarys in zip(*found, strict=True):
        # fp32 sums in another order, there and back.
        assert float((mine - librarys).abs().max()) <= 1e-4 * float(librarys.abs().max())
"""


def test_logits_states_and_gradients_of_the_librarys_function(tmp_path):
    """Of a model with several value heads a key head, and keys narrower than values."""
    config = {"linear_key_head_dim": 8, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    folder = tiny_stock_model("qwen3_5", tmp_path / "m", **config)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(INTERPRETED), str(folder)],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture
def chosen(monkeypatch):
    """What `auto` takes, as far as stand-ins can see; told of each question."""
    asked = []

    def to_be(name):
        def select(device, dtype, **call):
            asked.append((str(device), dtype, call))
            return Choice(name, "of the test")

        monkeypatch.setattr(stand_ins, "select_impl", select)
        return asked

    return to_be


def call(**change):
    """With tensors that only say that they are on a GPU."""
    with FakeTensorMode():
        given = {
            "query": torch.empty(1, 70, 2, 64, device="cuda", dtype=torch.bfloat16),
            "key": torch.empty(1, 70, 2, 64, device="cuda", dtype=torch.bfloat16),
            "value": torch.empty(1, 70, 4, 128, device="cuda", dtype=torch.bfloat16),
            "g": torch.empty(1, 70, 4, device="cuda"),
            "beta": torch.empty(1, 70, 4, device="cuda", dtype=torch.bfloat16),
        }
        return stand_ins.chunk_gated_delta_rule(**{**given, **change})


def test_only_what_is_the_choice_is_taken(chosen, monkeypatch):
    ran = []
    monkeypatch.setattr(stand_ins, "delta_rule", lambda *_, **options: ran.append(options) or ("output", "state"))
    asked = chosen("fla")
    assert call() is None
    asked = chosen("triton")
    assert call(use_qk_l2norm_in_kernel=True, output_final_state=True, position_ids=None) == ("output", "state")
    shape = {"key_width": 64, "value_width": 128, "time": 70, "gated": True}
    assert asked[-1] == ("cuda:0", torch.bfloat16, {**shape, "needs_gradient": False})
    assert (ran[0]["impl"], ran[0]["qk_l2norm"], ran[0]["output_final_state"]) == ("triton", True, True)
    call(beta=torch.empty(1, 70, 4, requires_grad=True))
    assert asked[-1][2]["needs_gradient"]
    # What means another function is the package's.
    assert call(use_gate_in_kernel=True) is None
    assert len(ran) == 2


def test_it_is_said_and_can_be_left_out(chosen, tmp_path):
    model = load_model(resolve_model(str(tiny_stock_model("qwen3_5", tmp_path / "m"))))
    asked = chosen("triton")
    assert kernels_of(model)["chunk_gated_delta_rule"] == "PyTorch"
    assert kernels_of(model, CUDA, needs_gradient=True)["chunk_gated_delta_rule"] == "lapkernels"
    assert asked[-1][2]["needs_gradient"]
    assert "lapkernels" not in {kernels_of(model, CUDA)[name] for name in ("fused_recurrent_gated_delta_rule",)}
    reporter = SilentReporter()
    Machine("cpu").announce(model, reporter, device=CUDA)
    assert "lapkernels" in reporter.notices[0]
    let_lapkernels_stand_in(model, False)
    try:
        assert kernels_of(model, CUDA)["chunk_gated_delta_rule"] != "lapkernels"
    finally:
        let_lapkernels_stand_in(model, True)
    chosen("fla")
    assert kernels_of(model, CUDA)["chunk_gated_delta_rule"] != "lapkernels"


def test_a_kernel_asked_for_by_name_runs_wherever_the_tensors_are(tmp_path, monkeypatch):
    """Also on a CPU, until a model of the class is loaded without a name; what cannot run is refused by name."""
    source, ran = resolve_model(str(tiny_stock_model("qwen3_5", tmp_path / "m"))), []
    kernel = stand_ins.delta_rule
    monkeypatch.setattr(stand_ins, "delta_rule", lambda *a, **k: ran.append(k["impl"]) or kernel(*a, **k))
    tokens, found = torch.arange(3, 80)[None], {}
    for name in ("reference", "chunked", "auto"):
        model, reporter = load_model(source, kernel=name), SilentReporter()
        Machine("cpu", kernel=name).announce(model, reporter)
        assert (name in reporter.notices[0]) == (name != "auto")
        with torch.no_grad():
            found[name] = model(tokens).logits
    assert set(ran) == {"reference", "chunked"}
    for name in ("reference", "chunked"):
        # fp32 sums in another order.
        assert float((found[name] - found["auto"]).abs().max()) <= 1e-4 * float(found["auto"].abs().max())
    with pytest.raises(ModelError, match="--kernel triton cannot run here: triton kernels need a GPU"):
        load_model(source, kernel="triton")
    with pytest.raises(InvalidInput, match="the reference kernel does not take head_first"):
        call(head_first=True, impl="reference")


KDA = pytest.mark.skipif("kimi_linear" not in CONFIG_MAPPING, reason="this transformers has no kimi_linear")


@KDA
def test_the_chunked_form_goes_before_the_librarys_pytorch_function(tmp_path, monkeypatch):
    """Where each key channel has a decay of its own: logits, states and gradients, on a CPU, and as names say it."""
    source, ran = resolve_model(str(tiny_stock_model("kimi_linear", tmp_path / "m"))), []
    kernel = stand_ins.delta_rule
    monkeypatch.setattr(stand_ins, "delta_rule", lambda *a, **k: ran.append(k["impl"]) or kernel(*a, **k))
    tokens, found = torch.arange(3, 80)[None], []
    model = load_model(source)
    for ours in (True, False):
        let_lapkernels_stand_in(model, ours)
        assert kernels_of(model)["chunk_kda"] == ("lapkernels" if ours else "PyTorch")
        model.zero_grad()
        first = model(input_ids=tokens[:, :66], use_cache=True)
        first.logits.square().mean().backward()
        name = cache_argument(model.forward)
        with torch.no_grad():
            second = model(input_ids=tokens[:, 66:], use_cache=True, **{name: first[name]})
        found.append(
            [first.logits.detach(), second.logits, *(p.grad for p in model.parameters() if p.grad is not None)]
        )
        assert (set(ran) == {"chunked"}) == ours
        ran.clear()
    let_lapkernels_stand_in(model, True)
    for mine, librarys in zip(*found, strict=True):
        # fp32 sums in another order, there and back.
        assert float((mine - librarys).abs().max()) <= 1e-4 * float(librarys.abs().max())
    # In the place of fla's on a GPU, by name alone; before PyTorch's also where fla's is not to be differentiated.
    monkeypatch.setattr(stand_ins, "select_impl", lambda *_, **call: Choice("chunked", str(call["by_channel"])))
    assert stand_ins.stands_in("chunk_kda", model, CUDA, before_pytorch=True)
    assert not stand_ins.stands_in("chunk_kda", model, CUDA)


@KDA
def test_a_kernel_asked_for_by_name_for_decays_of_channels(tmp_path, monkeypatch):
    source, ran = resolve_model(str(tiny_stock_model("kimi_linear", tmp_path / "m"))), []
    kernel = stand_ins.delta_rule
    monkeypatch.setattr(stand_ins, "delta_rule", lambda *a, **k: ran.append(k["impl"]) or kernel(*a, **k))
    with torch.no_grad():
        load_model(source, kernel="reference")(torch.arange(3, 20)[None])
    assert set(ran) == {"reference"}
    with pytest.raises(ModelError, match="--kernel triton cannot run here: triton kernels need a GPU"):
        load_model(source, kernel="triton")
    load_model(source)


@pytest.mark.parametrize(
    ("model_type", "kernel", "why"),
    [
        ("qwen3_5", "chunked", None),
        ("qwen3_5", "triton", "triton kernels need a GPU"),
        ("mamba2", "chunked", "chooses its kernels itself"),
    ],
)
def test_a_kernel_is_refused_before_any_work(model_type, kernel, why, tmp_path):
    source = resolve_model(str(tiny_stock_model(model_type, tmp_path / "m")))
    layers = family_for(source.config).layers(source.config)
    with nullcontext() if why is None else pytest.raises(ModelError, match=why):
        Machine("cpu", kernel=kernel).check(source.config, layers)
