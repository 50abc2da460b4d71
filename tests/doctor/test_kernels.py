"""Checks of kernels: what is right passes, what is wrong is found, kept, and no longer taken (fla 640, 983, 984)."""

import importlib
import json

import pytest
import torch

from lapcli.doctor import diagnosis
from lapcli.doctor.dual_states import dual_state_step_trials as _dual_steps
from lapcli.doctor.dual_states import dual_state_trials as _dual_states
from lapcli.doctor.kernels import (
    _attend_step,
    _checked,
    _delta_step,
    _few_linear,
    _greedy_token,
    _norm,
    _short_conv,
    _ssd_step,
    _thin_linear,
    check_kernels,
    trials,
    verdicts_of,
)
from lapkernels import KernelUnavailable, verdicts
from lapkernels.delta_rule import api, delta_rule, select_impl
from lapkernels.testing import delta_rule_inputs

# Memory is freed after each kernel.
pytestmark = pytest.mark.usefixtures("older_objects_left_alone")

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_file(tmp_path, monkeypatch):
    monkeypatch.setenv(verdicts.FILE_VARIABLE, str(tmp_path / "verdicts.json"))
    # Decode steps have tests of their own; here they would only take time.
    for operator in ("delta_step", "ssd_step", "attend_step", "norm", "thin_linear", "few_linear", "greedy_token",
                     "short_conv"):  # fmt: skip
        monkeypatch.setattr(f"lapcli.doctor.kernels._{operator}", lambda _device: ())
    for made in ("dual_state_trials", "dual_state_step_trials"):
        monkeypatch.setattr(f"lapcli.doctor.dual_states.{made}", lambda _device: ())


@pytest.fixture
def slip(monkeypatch):
    """A chunked form that is off by one part in a thousand, in its results or in its gradients alone."""
    right = api.delta_rule_chunked

    class Leaky(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return 1.001 * gradient

    def install(*, backward):
        def chunked(q, *rest):
            output, state = right(Leaky.apply(q) if backward else q, *rest)
            return (output, state) if backward else (1.001 * output, state)

        monkeypatch.setattr(api, "delta_rule_chunked", chunked)

    return install


def test_what_is_right_here_passes():
    checks = check_kernels(CPU)
    ran = [check for check in checks if check.status != "not here"]
    assert {(check.impl, check.way) for check in ran} == {
        ("reference", "forward"), ("reference", "backward"),
        ("chunked", "forward"), ("chunked", "backward"), ("chunked", "decode"),
    }  # fmt: skip
    assert {check.status for check in ran} == {"right"}
    assert max(check.share for check in ran) < 1
    assert all("GPU" in check.detail for check in checks if check.impl == "fla")
    assert verdicts_of(checks) == []


def test_wrong_gradients_are_found_kept_and_no_longer_taken(slip):
    slip(backward=True)
    found = diagnosis.diagnose(CPU)
    assert not found.sound
    assert {(check.impl, check.way) for check in found.checks if check.bad} == {("chunked", "backward")}
    told = next(finding for finding in found.findings if finding.level == "wrong")
    assert told.what.startswith("delta_rule chunked is wrong here in backward (gated), backward (plain)")
    assert "dq" in told.what
    assert "--kernel chunked is an error" in told.remedy
    assert {use.work: use.name for use in found.uses}["training"] == "reference"
    assert {use.work: use.name for use in found.uses}["prefill"] == "chunked"
    # The same check feeds the choice.
    choice = select_impl(CPU, torch.float32, key_width=64, time=512, gated=True, needs_gradient=True)
    assert choice.name == "reference"
    assert "found wrong: dq" in choice.reason
    inputs = delta_rule_inputs().requiring_grad().tensors()
    with pytest.raises(KernelUnavailable, match="found wrong: dq"):
        delta_rule(**inputs, impl="chunked")


def test_wrong_results_are_found_in_each_way(slip):
    slip(backward=False)
    checks = check_kernels(CPU)
    bad = {(check.impl, check.variant, check.way) for check in checks if check.bad}
    variants = ("gated", "plain", "with an erase direction", "decay by channel")
    assert bad >= {("chunked", variant, way) for variant in variants for way in ("forward", "decode")}
    assert {impl for impl, _variant, _way in bad} == {"chunked"}


def test_what_was_mended_is_taken_again(slip, monkeypatch):
    right = api.delta_rule_chunked
    slip(backward=True)
    assert diagnosis.diagnose(CPU).verdicts is not None
    monkeypatch.setattr(api, "delta_rule_chunked", right)
    found = diagnosis.diagnose(CPU)
    assert found.sound
    assert verdicts.remembered(CPU) == ()
    assert select_impl(CPU, torch.float32, key_width=64, time=512, gated=True, needs_gradient=True).name == "chunked"


def test_what_was_not_checked_keeps_its_verdict(slip):
    slip(backward=True)
    diagnosis.diagnose(CPU)
    kept = verdicts.remembered(CPU)
    found = diagnosis.diagnose(CPU, limit=0)
    assert {check.status for check in found.checks} == {"not checked"}
    assert verdicts.remembered(CPU) == kept
    assert any("want of time" in finding.what for finding in found.findings)


def test_a_kernel_that_raises_is_wrong_and_one_without_memory_is_not(monkeypatch):
    def failing(error):
        def chunked(*_arguments):
            raise error

        monkeypatch.setattr(api, "delta_rule_chunked", chunked)
        return [check for check in check_kernels(CPU) if check.impl == "chunked"]

    checks = failing(RuntimeError("no kernel image is available\nmore"))
    assert {check.status for check in checks} == {"failed"}
    assert checks[0].detail == "RuntimeError: no kernel image is available"
    assert verdicts_of(checks)
    checks = failing(torch.OutOfMemoryError("CUDA out of memory"))
    assert {check.status for check in checks} == {"not checked"}
    assert verdicts_of(checks) == []


def test_a_result_that_is_not_finite_is_wrong_and_can_be_written_as_json(monkeypatch):
    right = api.delta_rule_chunked
    monkeypatch.setattr(api, "delta_rule_chunked", lambda *a: tuple(x * float("nan") for x in right(*a)))
    found = diagnosis.diagnose(CPU)
    assert {check.status for check in found.checks if check.impl == "chunked"} == {"wrong"}
    json.loads(json.dumps(found.to_json()), parse_constant=lambda name: pytest.fail(name))


def test_the_definition_is_checked_too(monkeypatch):
    right = api.delta_rule_reference
    monkeypatch.setattr(api, "delta_rule_reference", lambda *a: tuple(1.001 * x for x in right(*a)))
    checks = check_kernels(CPU)
    assert {check.impl for check in checks if check.bad} == {"reference"}
    # Nothing could take its place.
    assert verdicts_of(checks) == []


def test_what_takes_longest_comes_last():
    costs = [trial.cost for trial in trials(CPU)]
    assert costs == sorted(costs)


def test_a_verdict_that_cannot_be_kept_is_told(slip, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(verdicts.FILE_VARIABLE, str(tmp_path / "file" / "verdicts.json"))
    slip(backward=True)
    found = diagnosis.diagnose(CPU)
    assert any("could not be kept" in finding.what for finding in found.findings)


@pytest.mark.parametrize(
    ("operator", "made"),
    [("delta_step", _delta_step), ("ssd_step", _ssd_step), ("attend_step", _attend_step)],
    ids=["delta", "ssd", "attend"],
)
def test_decode_steps_are_checked_too(operator, made, monkeypatch):
    def statuses():
        return {_checked(trial, CPU).status for trial in made(CPU) if trial.impl == "reference"}

    assert statuses() == {"right"}
    module = importlib.import_module(f"lapkernels.{operator}")
    right = getattr(module, operator)
    monkeypatch.setattr(module, operator, lambda *a, **k: right(*a, **k) * 1.001)
    assert statuses() == {"wrong"}


def test_gated_states_are_checked_too(monkeypatch):
    from lapkernels import dual_state as operator

    def found():
        checks = [_checked(trial, CPU) for trial in _dual_states(CPU) if trial.why_not is None]
        return {(check.impl, check.way): check.status for check in checks}

    assert set(found().values()) == {"right"}
    right = operator.api.dual_state_chunked
    monkeypatch.setattr(
        operator.api, "dual_state_chunked", lambda q, k, v, g, m, *rest: right(q, k, v, g, 1.001 * m, *rest)
    )
    assert {key: status for key, status in found().items() if status != "right"} == {
        ("chunked", "forward"): "wrong",
        ("chunked", "backward"): "wrong",
    }
    assert {_checked(trial, CPU).status for trial in _dual_steps(CPU) if trial.impl == "reference"} == {"right"}


def test_the_choice_of_tokens_is_checked_too(monkeypatch):
    def checked():
        (trial,) = [trial for trial in _greedy_token(CPU) if trial.impl == "reference"]
        return _checked(trial, CPU)

    assert checked().status == "right"
    module = importlib.import_module("lapkernels.greedy_token")
    right = module.greedy_token

    def last_row_wrong(logits, tokens, *rest, **options):
        right(logits, tokens, *rest, **options)
        tokens[-1] -= 1

    monkeypatch.setattr(module, "greedy_token", last_row_wrong)
    assert checked().status == "wrong"
    assert "tokens" in checked().detail
    monkeypatch.setattr(module, "greedy_token", lambda a, b, c, slots, **k: right(a, b, c, slots + 1, **k))
    assert "positions" in checked().detail


def test_norms_are_checked_too(monkeypatch):
    def checked(way):
        (trial,) = [trial for trial in _norm(CPU) if trial.impl == "reference" and trial.way == way]
        return _checked(trial, CPU)

    assert checked("forward").status == checked("backward").status == "right"
    module = importlib.import_module("lapkernels.norm")
    right = module.rms_norm
    monkeypatch.setattr(module, "rms_norm", lambda x, weight, *a, **k: right(x, _slope_off(weight), *a, **k))
    assert checked("forward").status == "right"
    assert checked("backward").status == "wrong"
    assert "dweight" in checked("backward").detail
    monkeypatch.setattr(module, "rms_norm", right)
    monkeypatch.setattr(module, "swiglu", lambda x, **_: x.chunk(2, -1)[0] * x.chunk(2, -1)[1])
    assert "swiglu" in checked("forward").detail
    assert checked("forward").status == "wrong"


def test_short_convolutions_are_checked_too(monkeypatch):
    def checked(way):
        (trial,) = [trial for trial in _short_conv(CPU) if trial.impl == "reference" and trial.way == way]
        return _checked(trial, CPU)

    assert checked("forward").status == checked("backward").status == "right"
    module = importlib.import_module("lapkernels.short_conv")
    right = module.short_conv
    monkeypatch.setattr(module, "short_conv", lambda x, weight, state, **k: right(x, weight, _slope_off(state), **k))
    assert checked("forward").status == "right"
    assert checked("backward").status == "wrong"
    assert "dstate" in checked("backward").detail
    monkeypatch.setattr(module, "short_conv", lambda x, weight, state, **k: right(x, weight, **k))
    assert checked("forward").status == "wrong"


def _slope_off(x):
    """The same number, with a gradient that is one part in a thousand too large."""
    return x + 1e-3 * (x - x.detach())


def test_thin_layers_are_checked_too(monkeypatch):
    def checked():
        (trial,) = [trial for trial in _thin_linear(CPU) if trial.impl == "reference"]
        return _checked(trial, CPU)

    assert checked().status == "right"
    module = importlib.import_module("lapkernels.thin_linear")
    right = module.thin_linear

    def unbiased(x, weight, bias=None, **options):
        return right(x, weight, **options)

    monkeypatch.setattr(module, "thin_linear", unbiased)
    assert checked().status == "wrong"
    assert "gated" in checked().detail
    monkeypatch.setattr(module, "thin_linear", lambda *a, **k: right(*a, **k) * (1.001 if "norm" in k else 1))
    assert "normed" in checked().detail


def test_products_of_few_rows_are_checked_too(monkeypatch):
    def checked():
        (trial,) = [trial for trial in _few_linear(CPU) if trial.impl == "reference"]
        return _checked(trial, CPU)

    assert {trial.impl for trial in _few_linear(CPU)} == {"reference", "triton", "gluon"}
    assert checked().status == "right"
    module = importlib.import_module("lapkernels.few_linear")
    right, gated = module.few_linear, module.few_swiglu
    monkeypatch.setattr(module, "few_swiglu", lambda x, weight, bias, **k: gated(x, weight.roll(1, 0), bias, **k))
    assert checked().status == "wrong"
    assert "activated" in checked().detail
    monkeypatch.setattr(module, "few_swiglu", gated)
    for wrong, name in ((False, "whole"), (True, "summed by a norm")):
        monkeypatch.setattr(
            module, "few_linear", lambda *a, apart=False, wrong=wrong, **k: right(*a, apart=apart, **k) * (
                1.001 if apart == wrong else 1
            )
        )  # fmt: skip
        assert checked().status == "wrong"
        assert name in checked().detail
