import json

import pytest

from lapcli.testing.models import tiny_gated_deltanet
from lapkernels import verdicts
from lapkernels.delta_rule import api


@pytest.fixture(autouse=True)
def own_file(tmp_path, monkeypatch):
    monkeypatch.setenv(verdicts.FILE_VARIABLE, str(tmp_path / "verdicts.json"))


def test_one_screen_says_what_is_here_and_what_will_run(lapcli):
    code, out, err = lapcli("doctor", "--device", "cpu")
    assert (code, out) == (0, "")
    assert len(err.splitlines()) <= 40
    for said in (
        "torch ", "triton ", "transformers ", "fla ", "tilelang ", "causal-conv1d ", "mamba-ssm ", "FlashQLA ",
        "copies", "TFLOP/s", "delta_rule chunked", "right, 0.", "training: chunked", "what will be used here is right",
    ):  # fmt: skip
        assert said in err, said


def test_json_is_alone_on_stdout(lapcli):
    code, out, err = lapcli("doctor", "--device", "cpu", "--json")
    found = json.loads(out)
    assert code == 0, err
    assert "kernels against fp64: " in err
    assert "delta_rule" not in err
    assert found["sound"] is True
    assert found["rates"]["copy_bytes"] > 1e8
    assert {"forward", "backward", "decode"} == {check["way"] for check in found["kernels"]}
    assert found["verdicts"] is None


def test_a_wrong_kernel_is_exit_code_1_with_a_remedy_and_then_an_error_when_forced(lapcli, monkeypatch, tmp_path, text):
    right = api.delta_rule_chunked
    monkeypatch.setattr(api, "delta_rule_chunked", lambda *a: tuple(1.01 * x for x in right(*a)))
    code, out, err = lapcli("doctor", "--device", "cpu")
    assert (code, out) == (1, "")
    assert "WRONG" in err
    assert "wrong: delta_rule chunked is wrong here in forward" in err
    assert "prefill: reference" in err
    code, out, err = lapcli("doctor", "--device", "cpu", "--json")
    assert code == 1
    assert json.loads(out)["sound"] is False
    assert json.loads(out)["verdicts"] == str(tmp_path / "verdicts.json")
    model = tiny_gated_deltanet(tmp_path / "model")
    job = ["calibrate", model, "--samples", "8", "--seq-len", "64", "--data", text, "--device", "cpu"]
    code, _out, err = lapcli(*job, "--kernel", "chunked")
    assert code == 1
    assert "--kernel chunked cannot run here: measured here on" in err
    code, _out, err = lapcli(*job)
    assert code == 0, err
    assert "kernel: reference (" in err
    assert "found wrong" in err


def test_require_fast(lapcli):
    code, _out, err = lapcli("doctor", "--device", "cpu", "--require-fast", "--quiet")
    assert code == 1
    assert "--require-fast: prefill runs the chunked kernel" in err


def test_a_dry_run_checks_nothing(lapcli, monkeypatch):
    monkeypatch.setattr("lapcli.doctor.diagnosis.diagnose", None)
    code, out, _err = lapcli("doctor", "--device", "cpu", "--dry-run", "--json")
    assert code == 0
    assert json.loads(out)["dry_run"] is True


@pytest.mark.parametrize(("arguments", "said"), [(["--limit", "0"], "--limit 0"), (["--device", "gpu"], "--device")])
def test_what_makes_no_sense_is_refused(lapcli, arguments, said):
    code, _out, err = lapcli("doctor", *arguments)
    assert code == 2
    assert said in err
