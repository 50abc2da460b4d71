import json

import pytest
import torch

from lapkernels import KernelUnavailable, verdicts
from lapkernels.delta_rule import delta_rule, fla_backend, select_impl, why_not
from lapkernels.testing import delta_rule_inputs
from lapkernels.verdicts import Verdict

CPU = torch.device("cpu")
CALL = {"key_width": 8, "time": 9, "gated": True}


@pytest.fixture(autouse=True)
def own_file(tmp_path, monkeypatch):
    monkeypatch.setenv(verdicts.FILE_VARIABLE, str(tmp_path / "cache" / "verdicts.json"))


def wrong(impl="chunked", *, backward=True, variant="gated"):
    return Verdict("delta_rule", impl, backward, variant, "dq: off by 0.3, allowed 0.02", "2026-11-30")


def run(impl, *, gradient=True, gate=0.5):
    inputs = delta_rule_inputs(gate=gate).tensors()
    q = inputs.pop("q").requires_grad_(gradient)
    return delta_rule(q, **inputs, impl=impl)


def test_wrong_gradients_are_an_error_when_forced_and_auto_takes_another_and_says_so():
    """fla 640, 983, 984."""
    assert select_impl(CPU, torch.float32, needs_gradient=True, **CALL).name == "chunked"
    verdicts.remember(CPU, [wrong()])
    choice = select_impl(CPU, torch.float32, needs_gradient=True, **CALL)
    assert choice.name == "reference"
    assert "measured here on 2026-11-30 and found wrong: dq: off by 0.3" in choice.reason
    with pytest.raises(KernelUnavailable, match=r"impl='chunked'.*found wrong: dq"):
        run("chunked")
    assert run("auto").output.requires_grad
    # Results are right, and so are other variants.
    assert run("chunked", gradient=False).output.isfinite().all()
    assert run("chunked", gate=None).output.requires_grad
    assert select_impl(CPU, torch.float32, **CALL).name == "chunked"


def test_wrong_results_bar_an_implementation_from_everything():
    verdicts.remember(CPU, [wrong(backward=False)])
    for gradient in (False, True):
        with pytest.raises(KernelUnavailable, match="found wrong"):
            run("chunked", gradient=gradient)
        assert select_impl(CPU, torch.float32, needs_gradient=gradient, **CALL).name == "reference"


def test_fla_where_it_could_run(monkeypatch):
    monkeypatch.setattr(fla_backend, "why_unavailable", lambda *_arguments, **_options: None)
    call = {"dtype": torch.bfloat16, "key_width": 64, "gated": True, "needs_gradient": True}
    assert why_not("fla", CPU, **call) is None
    verdicts.remember(CPU, [wrong("fla")])
    assert "found wrong" in (why_not("fla", CPU, **call) or "")
    choice = select_impl(CPU, time=64, **call)
    assert choice.name == "chunked"
    assert "found wrong: dq" in choice.reason


def test_the_definition_is_never_barred():
    verdicts.remember(CPU, [wrong("reference", backward=False)])
    assert run("reference").output.requires_grad


def test_a_later_measurement_takes_the_place_of_an_earlier():
    path = verdicts.remember(CPU, [wrong()])
    assert path is not None
    assert verdicts.remember(CPU, []) == path
    assert verdicts.remember(CPU, []) is None
    assert json.loads(path.read_text())["machines"] == {}
    assert run("chunked").output.requires_grad


def test_other_machines_and_versions_keep_theirs(monkeypatch):
    path = verdicts.remember(CPU, [wrong()])
    monkeypatch.setattr(verdicts, "fingerprint", lambda _device: "an H200, triton 3.6")
    assert run("chunked").output.requires_grad
    verdicts.remember(CPU, [wrong("fla")])
    assert path is not None
    assert len(json.loads(path.read_text())["machines"]) == 2


def test_what_was_found_wrong_can_be_measured_again():
    verdicts.remember(CPU, [wrong()])
    with verdicts.ignored():
        assert run("chunked").output.requires_grad
    with pytest.raises(KernelUnavailable):
        run("chunked")


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '{"schema": 2, "machines": {}}', '{"schema": 1, "machines": []}'],
    ids=["empty", "a list", "cut short", "newer", "no machines"],
)
def test_a_file_that_is_no_verdict_says_nothing(content):
    path = verdicts.verdicts_file()
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert run("chunked").output.requires_grad
    verdicts.remember(CPU, [wrong()])
    with pytest.raises(KernelUnavailable):
        run("chunked")


def test_fields_of_another_version_are_passed_over():
    path = verdicts.remember(CPU, [wrong(), wrong("fla")])
    assert path is not None
    document = json.loads(path.read_text())
    document["machines"][verdicts.fingerprint(CPU)][0]["severity"] = 3
    path.write_text(json.dumps(document))
    verdicts._remembered.cache_clear()
    assert run("chunked").output.requires_grad


def test_a_folder_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(verdicts.FILE_VARIABLE, str(tmp_path / "file" / "verdicts.json"))
    with pytest.raises(OSError, match="file"):
        verdicts.remember(CPU, [wrong()])
