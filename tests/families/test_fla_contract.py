"""The contract for families that fla's own classes run.

Slicing needs neither fla nor a device, so what it writes is tested anywhere. Whether it computes what masking computes
is measured by the same functions in two lanes: on a GPU, and on a CPU in Triton's interpreter, which needs a process of
its own since Triton decides at import whether it interprets.
"""

import json
import re
import subprocess
import sys

import pytest
import torch

from lapcli.errors import FamilyError, ModelError
from lapcli.families import fla_library
from lapcli.families.fla_library import refuse_where_fla_cannot_run
from lapcli.families.loading import load_model, load_tokenizer, resolve_model
from lapcli.families.registry import family_for
from lapcli.machine import Machine
from lapcli.recipe import CalibrationSettings, SelectionSettings
from lapcli.selectors.registry import CHANNEL_SELECTORS
from lapcli.stages.calibration import calibrate, read_rows
from lapcli.stages.selection import select
from lapcli.stages.slicing import plan_slicing, slice_model
from lapcli.testing.fla_checks import chunked_errors, stepwise_errors
from lapcli.testing.fla_models import register_gdn2
from lapcli.testing.interpreter import run_interpreted
from lapcli.testing.processes import run_forked
from lapcli.testing.slices import layers_of, random_kept, selection_of, sliced_by
from lapkernels.delta_rule.fla_backend import why_wrong

KEPT = 11
# Prefill against cached decode has this bound too: two fp32 evaluations in another order of sums. The oracle's usual
# 1e-5 is for keys and queries that a norm makes large; gla's have none, and RMSNorm makes small outputs large.
FP32 = 2e-5
GRAM = 1e-5  # of fp32 products of two short convolutions, summed in fp64

VARIANTS = {
    "gla": ("gla", {}),
    "gla-shared-keys-conv-relu": (
        "gla",
        {"num_heads": 4, "num_kv_heads": 2, "expand_k": 2.0, "use_short_conv": True, "feature_map": "relu"},
    ),
    "kda": ("kda", {}),
    "kda-gva-no-conv": ("kda", {"num_v_heads": 4, "use_short_conv": False}),
    "gdn2": ("gdn2", {}),
    "gdn2-gva-negative": ("gdn2", {"num_v_heads": 4, "allow_neg_eigval": True}),
    "gated_deltaproduct": ("gated_deltaproduct", {"use_forget_gate": True}),
    "gated_deltaproduct-3-no-gate-no-conv": ("gated_deltaproduct", {"num_householder": 3, "use_short_conv": False}),
}
ON_DISK = VARIANTS | {
    "kda-tied-sharded": ("kda", {"tie_word_embeddings": True, "max_shard_size": "20KB"}),
}
BUILD = """
import json, sys
from pathlib import Path
from lapcli.testing.fla_models import tiny_fla_model
for name, (model_type, config) in json.loads(sys.argv[2]).items():
    tiny_fla_model(model_type, Path(sys.argv[1]) / name / "base", **config)
"""
MEASURE = """
import json, sys
from pathlib import Path
from lapcli.testing.fla_checks import stepwise_errors
from lapcli.testing.fla_models import register_gdn2
register_gdn2()
found = {}
for name in json.load(sys.stdin):
    work = Path(sys.argv[1]) / name
    found[name] = stepwise_errors(work / "base", work / "interpreted", "cpu", 8)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The folder with every tiny model, `NAME/base`; fla is imported in another process, since it registers types."""
    folder = tmp_path_factory.mktemp("fla")
    done = run_forked(folder, json.dumps(ON_DISK), program=BUILD)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(params=list(ON_DISK))
def base(request, models):
    return resolve_model(str(models / request.param / "base"))


@pytest.fixture
def sliced(base, tmp_path):
    return sliced_by(base, random_kept(base, KEPT), tmp_path)


def test_everything_else_stays(base, sliced):
    layers = layers_of(base)
    cut = {member.tensor for layer in layers for member in layer.members}
    assert sliced.tensors.keys() == base.tensors.keys()
    for name, (header, entry) in base.tensors.items():
        new_header, new_entry = sliced.tensors[name]
        assert new_header.path.name == header.path.name
        assert new_entry.dtype == entry.dtype
        old = header.path.read_bytes()[entry.start : entry.start + entry.nbytes]
        new = new_header.path.read_bytes()[new_entry.start : new_entry.start + new_entry.nbytes]
        assert len(new) * layers[0].key_width == len(old) * KEPT if name in cut else old == new, name
    for before, after in zip(layers, layers_of(sliced), strict=True):
        assert (after.key_width, after.value_width) == (KEPT, before.value_width)
        assert (after.heads, after.value_heads) == (before.heads, before.value_heads)
        assert before.convolution_bytes(KEPT) == after.convolution_bytes()


def test_keeping_all_channels_is_the_identity(base, tmp_path):
    same = sliced_by(base, random_kept(base, layers_of(base)[0].key_width), tmp_path)
    for header in base.headers:
        assert (same.path / header.path.name).read_bytes() == header.path.read_bytes()


def test_every_copy_of_a_head_keeps_the_same_channels(base, sliced):
    kept = random_kept(base, KEPT)
    for layer, after in zip(layers_of(base), layers_of(sliced), strict=True):
        for old, new in zip(layer.members, after.members, strict=True):
            if old.role.endswith("projection"):
                rows = read_rows(base, layer, old)
                for head, indices in enumerate(kept[layer.index]):
                    assert torch.equal(read_rows(sliced, after, new)[head], rows[head, indices])


def test_a_plan_counts_what_will_be_written(base, sliced, tmp_path):
    (tmp_path / "again").mkdir()
    plan = plan_slicing(base, selection_of(base, random_kept(base, KEPT), tmp_path / "again"))
    assert plan.bytes_after == sum(entry.nbytes for _header, entry in sliced.tensors.values())
    assert plan.state_bytes_after == sum(layer.state_bytes() for layer in layers_of(sliced))


def test_stock_fla_has_the_shapes_of_the_slices_in_a_fresh_process(models, tmp_path):
    """Shapes from stock fla's own constructors, on the meta device, against the sliced checkpoints'."""
    slices = {}
    for name in ON_DISK:
        (tmp_path / name).mkdir()
        source = resolve_model(str(models / name / "base"))
        # Several widths, since expand_k and expand_v go through fla's float arithmetic.
        for width in (3, 7, KEPT, 13):
            folder = tmp_path / name / str(width)
            folder.mkdir()
            slices[f"{name} {width}"] = sliced_by(source, random_kept(source, width), folder)
    program = """
import json, sys, warnings, torch
warnings.simplefilter("ignore")
import fla.models
from transformers import AutoConfig, AutoModelForCausalLM
found = {}
for name, path in json.load(sys.stdin).items():
    if name.startswith("gdn2"):
        from lapcli.testing.fla_models import register_gdn2
        register_gdn2()
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found[name] = {key: list(tensor.shape) for key, tensor in model.state_dict().items()}
print(json.dumps(found))
"""
    paths = {name: str(source.path) for name, source in slices.items()}
    # Types that fla has come first: for them nothing of lapcli's is imported.
    paths = dict(sorted(paths.items(), key=lambda item: item[0].startswith("gdn2")))
    done = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(paths), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    wanted = json.loads(done.stdout.splitlines()[-1])
    assert wanted.keys() == slices.keys()
    for name, shapes in wanted.items():
        if slices[name].config["tie_word_embeddings"]:
            shapes.pop("lm_head.weight")
        found = {key: list(entry.shape) for key, (_header, entry) in slices[name].tensors.items()}
        assert found == shapes, name


def test_a_hybrid_s_softmax_layer_is_left_out(models):
    # From the config alone: fla's hybrids need flash-attn even to be built.
    config = resolve_model(str(models / "kda" / "base")).config
    hybrid = {**config, "attn": {"layers": [1], "num_heads": 2}}
    assert [layer.index for layer in family_for(hybrid).layers(hybrid)] == [0]


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("gla", {"num_kv_heads": 3}, "num_kv_heads"),
        ("gla", {"expand_k": 0.7}, "expand_k"),
        ("gla", {"feature_map": "elu"}, "feature_map"),
        ("kda", {"num_v_heads": 3}, "num_v_heads"),
        ("gdn2", {"expand_v": 1.03}, "expand_v"),
        ("gated_deltaproduct", {"num_householder": 0}, "num_householder"),
    ],
)
def test_a_field_that_means_nothing_is_named(models, name, changes, field):
    config = {**resolve_model(str(models / name / "base")).config, **changes}
    with pytest.raises(ModelError, match=field):
        family_for(config).layers(config)


def test_rwkv7_is_refused_with_the_reason():
    with pytest.raises(FamilyError, match=r"rwkv7.*key width is tied to the hidden size"):
        family_for({"model_type": "rwkv7"})


def test_without_a_gpu_calibration_is_refused_before_any_text_is_read(base, tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    machine = Machine(device="cpu")
    settings = CalibrationSettings(data=str(tmp_path / "nowhere.txt"), samples=1, seq_len=64)
    model_type = base.config["model_type"]
    with pytest.raises(ModelError, match=f"fla's {model_type} runs on a CUDA device only"):
        calibrate(base, settings, tmp_path / "calibration", machine=machine)
    with pytest.raises(ModelError, match="CUDA device only"):
        machine.check(base.config)
    with pytest.raises(ModelError, match="CUDA device only"):
        load_model(base)
    assert len(load_tokenizer(base)) == 259


def test_without_fla_it_says_what_to_install(base, monkeypatch):
    monkeypatch.setattr(fla_library.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"lapcli\[gpu\]"):
        refuse_where_fla_cannot_run(base.config, "cuda")


def test_what_fla_does_not_run_passes():
    for model_type in ("gated_deltanet", "mamba2", "unknown"):
        refuse_where_fla_cannot_run({"model_type": model_type}, "cpu")


def test_deltaproduct_in_fp32_is_refused(monkeypatch):
    monkeypatch.setattr(fla_library.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ModelError, match="float32"):
        refuse_where_fla_cannot_run({"model_type": "gated_deltaproduct"}, "cuda", torch.float32)


def test_other_models_stay_transformers_own_once_fla_is_imported(tmp_path):
    """fla registers a Mamba-2 of its own in the place of transformers'."""
    program = """
import sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
from lapcli.families.loading import load_model, resolve_model
from lapcli.testing.stock_models import tiny_stock_model
folder = tiny_stock_model("mamba2", Path(sys.argv[1]))
import fla.models
from transformers import AutoConfig
assert type(AutoConfig.from_pretrained(folder)).__module__.startswith("fla.")
print(type(load_model(resolve_model(str(folder)))).__module__)
"""
    done = run_forked(tmp_path / "mamba2", program=program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "transformers.models.mamba2.modeling_mamba2"


def assert_stepwise(errors: dict[str, float]):
    assert errors["oracle"] < FP32
    assert errors["decode"] < FP32
    assert errors["gram_query"] < GRAM
    assert errors["gram_key"] < GRAM
    # The oracle would also pass if both ignored the cut: the unmasked model must differ.
    assert errors["cut"] > 1e-3


@pytest.fixture(scope="module")
def interpreted(models):
    return json.loads(run_interpreted(MEASURE, str(models), given=list(VARIANTS)).splitlines()[-1])


@pytest.mark.parametrize("name", VARIANTS)
def test_sliced_equals_masked_in_the_interpreter(interpreted, name):
    assert_stepwise(interpreted[name])


def on_a_gpu(test):
    """Marks a test: skipped where there is no GPU; fla, triton and transformers warn about themselves."""
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    return pytest.mark.gpu(skip(pytest.mark.filterwarnings("ignore")(test)))


@pytest.fixture
def fla_on_a_gpu(monkeypatch):
    """All types registered; convolutions in fp32, for cuDNN's are in TF32 by default (torch's matrices are not)."""
    register_gdn2()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert not torch.backends.cuda.matmul.allow_tf32


@on_a_gpu
@pytest.mark.parametrize("name", VARIANTS)
def test_sliced_equals_masked_on_a_gpu(fla_on_a_gpu, models, tmp_path, name):
    # The bounds of the interpreter: up to 64 tokens fla's kernels have no matrix products, so no TF32.
    assert_stepwise(stepwise_errors(models / name / "base", tmp_path, "cuda", 60))


DTYPES = [(torch.float32, 2**-10), (torch.bfloat16, 2**-8)]


@on_a_gpu
@pytest.mark.parametrize(("dtype", "unit"), DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", VARIANTS)
def test_chunked_kernels_lose_no_more_by_the_cut(fla_on_a_gpu, models, tmp_path, name, dtype, unit):
    """Sliced against a truth in fp32, as close as the masked model comes to it, which runs the same kernels.

    Twice its error, and one unit in the last place at the largest logit: of bf16, or of TF32, in which the chunked
    kernels multiply fp32.
    """
    if name.startswith("gated_deltaproduct") and dtype is torch.float32:
        pytest.skip("fla's chunked DeltaProduct refuses fp32")
    errors = chunked_errors(models / name / "base", tmp_path, "cuda", dtype)
    assert errors["sliced"] < 2 * errors["masked"] + unit, errors
    assert errors["masked"] < 0.2, errors  # or the first would say nothing


@on_a_gpu
@pytest.mark.parametrize("name", ["gla-shared-keys-conv-relu", "kda-gva-no-conv", "gdn2", "gated_deltaproduct"])
def test_calibrated_selected_and_sliced_by_every_selector_it_runs(fla_on_a_gpu, models, tmp_path, name):
    source = resolve_model(str(models / name / "base"))
    settings = CalibrationSettings(data="builtin", samples=8, seq_len=128)
    machine = Machine(device="cuda", dtype="bfloat16")
    wrong = why_wrong(torch.device("cuda"), gated=True, needs_gradient=True)
    if name == "gated_deltaproduct" and wrong is not None:  # fla's own model: nothing else can differentiate it.
        with pytest.raises(FamilyError, match=re.escape(wrong)):
            calibrate(source, settings, tmp_path / "calibration", machine=machine, saliency=True)
        return
    calibration, worked = calibrate(source, settings, tmp_path / "calibration", machine=machine, saliency=True)
    assert worked
    ids = torch.arange(3, 131).unsqueeze(0)
    for method in CHANNEL_SELECTORS:
        request = SelectionSettings(method=method, ratio="0.5")
        selection, _worked = select(calibration, request, tmp_path / f"{method}.safetensors")
        slice_model(source, selection, tmp_path / method)
        model = load_model(resolve_model(str(tmp_path / method)), device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            assert model(input_ids=ids.cuda(), use_cache=False).logits.isfinite().all()
