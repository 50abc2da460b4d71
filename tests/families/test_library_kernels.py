"""Fast packages that are installed but cannot run: on a CPU a model loads and computes as if they were not there."""

import inspect
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from lapcli.families.library_kernels import choose_kernels, kernels_of
from lapcli.families.loading import load_model, resolve_model
from lapcli.testing.stock_models import tiny_stock_model

MODEL_TYPES = ["bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2", "qwen3_next"]
# What transformers looks up in each package; see the paths in its integrations/hub_kernels.py.
FUNCTIONS = {
    "causal_conv1d": ["causal_conv1d_fn", "causal_conv1d_update"],
    "mamba_ssm": ["mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined", "selective_state_update"],
    "fla": ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda", "fused_recurrent_kda"],
}
FAILING = """
def {name}(*args, activation=None, initial_state=None, **kwargs):
    raise RuntimeError("{name}: 0 active drivers")
"""
RUN = """
import sys
folder, packages, names = sys.argv[1], sys.argv[2], sys.argv[3].split()
if packages:
    sys.path.insert(0, packages)  # before the installed ones
else:
    for name in ("causal_conv1d", "mamba_ssm", "fla"):
        sys.modules[name] = None  # cannot be imported
import torch
from lapcli.families.library_kernels import choose_kernels, kernels_of
from lapcli.families.loading import load_model, resolve_model
torch.set_num_threads(1)
ids = torch.arange(3, 63).view(2, 30)
found = {}
for name in names:
    model = load_model(resolve_model(f"{folder}/{name}"))
    assert set(kernels_of(model).values()) == {"PyTorch"}
    with torch.no_grad():
        outputs = [model(input_ids=ids, use_cache=False).logits]
        outputs.append(model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None))
        # In training the library tries a function that does all of a Mamba mixer at once.
        outputs.append(model.train()(input_ids=ids, use_cache=False).logits)
    choose_kernels(model, "cuda")
    found[name] = outputs, set(kernels_of(model).values())
torch.save(found, sys.argv[4])
"""


def run(folder, packages):
    target = folder / f"with-{packages and packages.name}.pt"
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(folder), str(packages or ""), " ".join(MODEL_TYPES), str(target)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.load(target)


def test_packages_that_cannot_run_on_a_cpu_change_nothing(tmp_path):
    packages = tmp_path / "packages"
    for package, names in FUNCTIONS.items():
        (packages / package).mkdir(parents=True)
        (packages / package / "__init__.py").write_text("".join(FAILING.format(name=name) for name in names))
    for model_type in MODEL_TYPES:
        tiny_stock_model(model_type, tmp_path / model_type)
    without, broken = run(tmp_path, None), run(tmp_path, packages)
    for model_type in MODEL_TYPES:
        wanted, of_none = without[model_type]
        found, of_a_gpu = broken[model_type]
        assert all(map(torch.equal, found, wanted)), model_type
        # They were bound, and a GPU would get them back.
        assert of_none == {"PyTorch"}
        assert of_a_gpu == ({"causal_conv1d", "fla"} if model_type == "qwen3_next" else {"causal_conv1d", "mamba_ssm"})


def in_a_module(function):
    """As the `kernels` package gives a function back."""

    class Func(nn.Module):
        kernel_layer_name = function.__name__

        def forward(self, *args, **kwargs):
            return func(*args, **kwargs)

    func = function
    return Func()


def test_a_binding_inside_a_module_of_the_kernels_package_is_one(tmp_path, monkeypatch):
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
    from transformers.models.bamba import modeling_bamba

    def failing(*_args, activation=None):
        raise RuntimeError("0 active drivers")

    package = ModuleType("a_broken_package")
    package.causal_conv1d_fn = failing
    monkeypatch.setitem(sys.modules, "a_broken_package", package)
    plain = inspect.unwrap(modeling_bamba.causal_conv1d_fn)
    bound = use_kernel_func_from_hub_with_fallback("causal_conv1d_fn", "a_broken_package")(plain)
    inside = in_a_module(bound)
    monkeypatch.setattr(modeling_bamba, "causal_conv1d_fn", inside)
    model = load_model(resolve_model(str(tiny_stock_model("bamba", tmp_path))))
    assert modeling_bamba.causal_conv1d_fn is plain
    with torch.no_grad():
        assert model(input_ids=torch.arange(3, 13)[None]).logits.isfinite().all()
    choose_kernels(model, "cuda")
    assert modeling_bamba.causal_conv1d_fn is inside
    assert kernels_of(model)["causal_conv1d_fn"] == "a_broken_package"
    with torch.no_grad(), pytest.raises(RuntimeError, match="0 active drivers"):
        model(input_ids=torch.arange(3, 13)[None])
