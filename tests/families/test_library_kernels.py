"""Fast packages that are installed but cannot run: on a CPU a model loads and computes as if they were not there."""

import inspect
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lapcli.families.library_kernels import choose_by_device, differentiate_without, kernels_of
from lapcli.families.loading import load_model, resolve_model
from lapcli.testing.processes import run_forked
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
from lapcli.families.library_kernels import kernels_of
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
    found[name] = outputs, set(kernels_of(model, torch.device("cuda")).values())
torch.save(found, sys.argv[4])
"""


def run(folder, packages):
    target = folder / f"with-{packages and packages.name}.pt"
    given = [str(folder), str(packages or ""), " ".join(MODEL_TYPES), str(target)]
    if packages is None:
        done = run_forked(*given, program=RUN)
    else:
        # What is looked up at the import of transformers finds them.
        done = subprocess.run([sys.executable, "-c", RUN, *given], capture_output=True, text=True, check=False)
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
        # They were bound, and a GPU would run them.
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


@pytest.fixture
def made(tmp_path):
    return resolve_model(str(tiny_stock_model("bamba", tmp_path)))


@pytest.fixture(params=["bare", "in a module"])
def called(request, monkeypatch):
    """Who ran a function of Bamba's module on which device: a package that stands behind it, or PyTorch."""
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
    from transformers.models.bamba import modeling_bamba

    seen = []

    def fast(hidden_states, *_args, activation=None):
        seen.append(f"package on {hidden_states.device.type}")
        return hidden_states

    convolution = inspect.unwrap(modeling_bamba.causal_conv1d_fn)

    def plain(hidden_states, *args, activation=None, **_others):
        seen.append(f"PyTorch on {hidden_states.device.type}")
        # Without a GPU, torch cannot convolve tensors that only say that they are on one.
        return hidden_states if hidden_states.is_cuda else convolution(hidden_states, *args, activation=activation)

    package = ModuleType("a_package")
    package.causal_conv1d_fn = fast
    monkeypatch.setitem(sys.modules, "a_package", package)
    bound = use_kernel_func_from_hub_with_fallback("causal_conv1d_fn", "a_package")(plain)
    made = bound if request.param == "bare" else in_a_module(bound)
    monkeypatch.setattr(modeling_bamba, "causal_conv1d_fn", made)
    return seen


def runs(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 13)[None], use_cache=False).logits


def convolve(*, device, gradient=False):
    """Call the function as a model on that device would; there is no memory behind these tensors."""
    from transformers.models.bamba import modeling_bamba

    with FakeTensorMode():
        rows, filters = torch.empty(1, 8, 5, device=device), torch.empty(8, 4, device=device, requires_grad=gradient)
        return modeling_bamba.causal_conv1d_fn(rows, filters, None, activation="silu")


def test_models_of_one_class_on_two_devices_run_each_its_devices_functions(made, called):
    teacher = load_model(made)
    wanted = runs(teacher)
    called.clear()
    # As a student that goes to a GPU block by block.
    student = load_model(made, device="cuda", weights="in memory")
    assert kernels_of(teacher)["causal_conv1d_fn"] == "PyTorch"
    assert kernels_of(student, torch.device("cuda"))["causal_conv1d_fn"] == "a_package"
    convolve(device="cuda")
    assert torch.equal(runs(teacher), wanted)
    convolve(device="cuda")
    assert called[0] == called[-1] == "package on cuda"
    assert set(called[1:-1]) == {"PyTorch on cpu"}


def test_a_function_with_a_wrong_gradient_runs_where_there_is_none(made, called):
    model = load_model(made)
    assert differentiate_without(model, "another_package") == ()
    convolve(device="cuda", gradient=True)
    assert differentiate_without(model, "a_package") == ("a_package's causal_conv1d_fn",)
    convolve(device="cuda", gradient=True)
    convolve(device="cuda")
    with torch.no_grad():
        convolve(device="cuda", gradient=True)
    assert called == ["package on cuda", "PyTorch on cuda", "package on cuda", "package on cuda"]


def test_a_choice_is_compiled_without_a_break(made, called):
    model = load_model(made)
    mixer = model.model.layers[0].mamba
    with torch.no_grad():
        hidden = torch.randn(1, 6, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
        found = torch.compile(mixer, backend="eager", fullgraph=True)(hidden)
        assert torch.equal(found, mixer(hidden))
    assert set(called) <= {"PyTorch on cpu"}


def test_choosing_twice_changes_nothing(made, called):
    model = load_model(made)
    before = kernels_of(model, torch.device("cuda"))
    choose_by_device(model)
    assert kernels_of(model, torch.device("cuda")) == before
    convolve(device="cuda")
    assert called == ["package on cuda"]
