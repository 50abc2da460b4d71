"""Which class loads a model that brings code of its own along; which tokenizers fit."""

import json
import sys

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lapcli.errors import ModelError
from lapcli.families.loading import load_model, load_tokenizer
from lapcli.families.source import resolve_model
from lapcli.testing.dual_state import tiny_conversion
from lapcli.testing.models import byte_tokenizer, tiny_gated_deltanet
from lapcli.testing.stock_models import tiny_stock_model

CODE = """
from transformers.models.{stock}.configuration_{stock} import {name}Config
from transformers.models.{stock}.modeling_{stock} import {name}ForCausalLM

open({marker!r}, "w").close()


class Config({name}Config):
    model_type = {model_type!r}


class Model({name}ForCausalLM):
    config_class = Config
"""


@pytest.fixture
def imports_code(tmp_path, monkeypatch):
    """Transformers copies code into a package and imports that once a process; here it is a package of this test's."""
    folder = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", folder)
    monkeypatch.syspath_prepend(folder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        del sys.modules[name]


@pytest.mark.usefixtures("imports_code")
@pytest.mark.parametrize(
    ("stock", "name", "model_type", "loaded_from"),
    [
        pytest.param("kimi_linear", "KimiLinear", "kimi_linear", "transformers.models.kimi_linear.", id="known"),
        pytest.param("mamba2", "Mamba2", "a_mamba_of_ones_own", "transformers_modules.", id="unknown"),
    ],
)
def test_a_models_code_runs_only_where_transformers_has_none(stock, name, model_type, loaded_from, tmp_path):
    if stock not in CONFIG_MAPPING:
        pytest.skip(f"the installed transformers has no {stock}")
    folder, marker = tiny_stock_model(stock, tmp_path / "model"), tmp_path / "ran"
    (folder / "own_code.py").write_text(CODE.format(stock=stock, name=name, model_type=model_type, marker=str(marker)))
    config = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": "own_code.Config", "AutoModelForCausalLM": "own_code.Model"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type, "auto_map": auto_map}))
    model = load_model(resolve_model(str(folder)), trust_remote_code=True)
    assert type(model).__module__.startswith(loaded_from)
    assert marker.exists() is (loaded_from == "transformers_modules.")


def test_a_token_without_a_row_is_named(tmp_path):
    source = resolve_model(str(tiny_gated_deltanet(tmp_path, vocab_size=260)))
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<fits>"])
    tokenizer.save_pretrained(tmp_path)
    assert len(load_tokenizer(source)) == 260
    tokenizer.add_tokens(["<first>", "<second>"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"has the id 260 \('<first>'\), but the model embeds 260 ids"):
        load_tokenizer(source)


def test_a_conversion_is_no_model_and_what_is_one_is_named(tmp_path):
    root = tiny_conversion(tmp_path / "conversion")
    (root / "conversion.json").touch()
    with pytest.raises(ModelError, match="has no config") as refused:
        resolve_model(str(root))
    assert "--export" in refused.value.hint
    assert "lapcli serve" in refused.value.hint
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ModelError, match="has no config") as refused:
        resolve_model(str(tmp_path / "nothing"))
    assert refused.value.hint is None
