"""Slices that stock classes cannot load: the code beside them, whose it is and when it runs, and pruning them again."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lapcli.errors import ModelError
from lapcli.families.loading import load_model, load_tokenizer
from lapcli.families.registry import family_for
from lapcli.families.source import resolve_model
from lapcli.reporting import SilentReporter
from lapcli.stages.slicing import plan_slicing, slice_into, slice_model
from lapcli.testing.oracle import relative_error
from lapcli.testing.slices import random_kept, selection_of
from lapcli.testing.stock_models import tiny_stock_model

KEPT = 11
FAMILIES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            name not in CONFIG_MAPPING, reason=f"transformers {transformers.__version__} has no {name}"
        ),
    )
    for name in ("kimi_linear", "glm5_next", "bailing_hybrid")
]
IDS = torch.randint(3, 259, (1, 30), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=FAMILIES)
def base(request, tmp_path_factory):
    return resolve_model(str(tiny_stock_model(request.param, tmp_path_factory.mktemp(request.param) / "base")))


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """Where transformers copies code to; one folder, since a process imports it as one package."""
    return str(tmp_path_factory.mktemp("modules"))


def sliced_to(source, width, folder):
    folder.mkdir(exist_ok=True)
    slice_model(source, selection_of(source, random_kept(source, width), folder), folder / "sliced")
    return resolve_model(str(folder / "sliced"))


@pytest.fixture
def sliced(base, tmp_path):
    return sliced_to(base, KEPT, tmp_path / "first")


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def code_of(source):
    return family_for(source.config).model_code(source.config)


def test_only_a_narrower_model_needs_code(base, sliced, tmp_path):
    assert code_of(base) is None
    same = sliced_to(base, 32, tmp_path / "same")
    assert same.config == base.config
    assert not list(same.path.glob("*.py"))
    assert {file.name for file in sliced.path.glob("*.py")} == code_of(sliced).files().keys()
    assert base.loading is same.loading is None
    assert sliced.loading in (sliced.path / "README.md").read_text()
    assert sliced.config["auto_map"]["AutoConfig"].split(".")[0] + ".py" in code_of(sliced).files()


def test_the_code_knows_nothing_of_lapcli(sliced):
    for file in sliced.path.glob("*.py"):
        lines = [line.strip() for line in file.read_text().splitlines()]
        assert not [line for line in lines if line.startswith(("import lapcli", "from lapcli"))]


def test_lapcli_loads_it_by_its_own_class(sliced):
    assert type(load_model(sliced)).__module__ == f"lapcli.families.remote.{code_of(sliced).module}"
    assert len(load_tokenizer(sliced)) == 259


@pytest.mark.parametrize("change", ["another", "missing"])
def test_other_code_is_not_run_unless_allowed(sliced, change, tmp_path, modules, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    file = sliced.path / f"{code_of(sliced).module}.py"
    wanted = logits(load_model(sliced))
    if change == "missing":
        file.unlink()
    else:
        file.write_text(file.read_text() + f"\nopen({str(tmp_path / 'ran')!r}, 'w').close()\n")
    for load in (load_model, load_tokenizer):
        with pytest.raises(ModelError, match=file.name) as refused:
            load(sliced)
        assert "--trust-remote-code" in refused.value.hint
    assert not (tmp_path / "ran").exists()
    if change == "another":
        model = load_model(sliced, trust_remote_code=True)
        assert (tmp_path / "ran").exists()
        assert type(model).__module__.startswith("transformers_modules.")
        # A class that lapcli does not know is left to transformers' kernels, so the same functions run.
        assert relative_error(logits(model), wanted) < 1e-6


def test_a_slice_is_pruned_again(base, sliced, tmp_path):
    """The channels kept twice over, at once."""
    again = sliced_to(sliced, 5, tmp_path / "again")
    first, second = random_kept(base, KEPT), random_kept(sliced, 5)
    at_once = {index: rows.gather(1, second[index]) for index, rows in first.items()}
    wanted = tmp_path / "wanted"
    slice_model(base, selection_of(base, at_once, tmp_path), wanted)
    assert again.config == resolve_model(str(wanted)).config
    assert (again.path / "model.safetensors").read_bytes() == (wanted / "model.safetensors").read_bytes()
    assert logits(load_model(again)).isfinite().all()


def test_slicing_a_slice_again_brings_todays_code(sliced, tmp_path):
    for file in sliced.path.glob("*.py"):
        file.write_text("# of an older lapcli\n")
    again = sliced_to(sliced, 5, tmp_path / "again")
    assert code_of(again).missing(again.path) == []


def test_a_slice_with_other_code_is_made_again(base, tmp_path):
    selection = selection_of(base, random_kept(base, KEPT), tmp_path)
    for change, works in ((None, True), (None, False), ("other", True), ("none", True)):
        file = tmp_path / "sliced" / "lapcli_narrow_keys.py"
        if change == "other":
            file.write_text("# of an older lapcli\n")
        elif change == "none":
            file.unlink()
        assert slice_into(base, selection, tmp_path / "sliced", overwrite=False, reporter=SilentReporter())[1] is works


def test_saved_again_it_takes_the_code_with_it(sliced, tmp_path):
    model = load_model(sliced)
    model.save_pretrained(tmp_path / "again")
    again = resolve_model(str(tmp_path / "again"))
    assert again.tensors.keys() == sliced.tensors.keys()
    assert code_of(again).missing(again.path) == []
    assert again.config["auto_map"].items() >= {("AutoConfig", sliced.config["auto_map"]["AutoConfig"])}
    assert torch.equal(logits(load_model(again)), logits(model))


def test_made_from_its_config_it_has_weights(sliced):
    """Not only loading fills what the narrower mixer has anew."""
    made = type(load_model(sliced))(load_model(sliced).config)
    assert all(parameter.isfinite().all() for parameter in made.parameters())
    for layer in family_for(sliced.config).layers(sliced.config):
        gate = made.get_submodule(layer.mixer).forget_gate
        assert gate.dt_bias.shape == (layer.heads * KEPT,)
        assert gate.dt_bias.unique().numel() > KEPT


def test_a_base_with_code_of_its_own_loses_that_of_the_model_alone(base, tmp_path):
    folder = tmp_path / "base"
    shutil.copytree(base.path, folder)
    own = {"AutoConfig": "their.Config", "AutoModel": "their.Model", "AutoTokenizer": ["their.Tokenizer", None]}
    (folder / "config.json").write_text(json.dumps({**base.config, "auto_map": own}))
    found = sliced_to(resolve_model(str(folder)), KEPT, tmp_path / "sliced").config["auto_map"]
    assert found["AutoTokenizer"] == ["their.Tokenizer", None]
    assert not [name for name, place in found.items() if name != "AutoTokenizer" and place.startswith("their")]


MIXERS = {
    "kimi_linear": "model.layers.3.self_attn.",
    "glm5_next": "model.language_model.layers.3.self_attn.",
    "bailing_hybrid": "model.layers.3.attention.",
}


@pytest.mark.parametrize(("stateful", "mtp"), [(False, "passes through"), (True, "dropped")], ids=["softmax", "KDA"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prediction_head_lies_after_the_last_layer(family, stateful, mtp, tmp_path):
    folder = tiny_stock_model(family, tmp_path / "base")
    tensors = load_file(folder / "model.safetensors")
    mixer = MIXERS[family]
    head = {
        mixer + "q_proj.weight": torch.ones(64, 64),
        mixer.rpartition("layers.3.")[0] + "layers.3.eh_proj.weight": torch.ones(64, 128),
    }
    if stateful:
        head[mixer + "A_log"] = torch.ones(2)
    save_file({**tensors, **head}, folder / "model.safetensors", {"format": "pt"})
    source = resolve_model(str(folder))
    assert plan_slicing(source, selection_of(source, random_kept(source, KEPT), tmp_path)).mtp == mtp
    found = sliced_to(source, KEPT, tmp_path / "sliced")
    assert found.tensors.keys() == (tensors if stateful else {**tensors, **head}).keys()
