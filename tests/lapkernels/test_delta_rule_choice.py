"""Which implementation `auto` takes, what a forced one says when it cannot run, and what is imported for it."""

import subprocess
import sys
import textwrap

import pytest
import torch

from lapkernels import KernelUnavailable, _triton
from lapkernels.delta_rule import delta_rule, fla_backend, select_impl, triton_backend, why_not
from lapkernels.testing import delta_rule_inputs

CALL = {"key_width": 64, "time": 512, "gated": True}


@pytest.fixture
def hopper(monkeypatch):
    """A machine with fla and a Hopper GPU, as far as the choice can see; returns what sets its triton."""
    monkeypatch.setattr(fla_backend, "is_installed", lambda package: package == "fla")
    for backend in (fla_backend, triton_backend):
        monkeypatch.setattr(backend, "kernels_can_run", lambda device: device.type == "cuda")
    monkeypatch.setattr(fla_backend, "is_hopper", lambda index=0: True)

    def set_triton(*version: int) -> None:
        monkeypatch.setattr(fla_backend, "triton_version", lambda: version)

    set_triton(3, 6, 0)
    return set_triton


@pytest.mark.parametrize(
    ("version", "wrong"),
    [((3, 3, 1), False), ((3, 4, 0), True), ((3, 6, 0), True), ((3, 7, 0), True), ((3, 7, 1), False), ((3, 9), False)],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_the_gated_backward_pass_that_is_wrong_on_hopper(hopper, version, wrong):
    """Case 14: an error when forced, another choice for `auto`, with the reason; only with a gate and a gradient."""
    hopper(*version)
    assert select_impl("cuda", torch.bfloat16, needs_gradient=True, **CALL).name == "triton"
    forced = why_not("fla", "cuda", torch.bfloat16, key_width=64, gated=True, needs_gradient=True)
    assert ("wrong on Hopper" in (forced or "")) == wrong
    assert why_not("fla", "cuda", torch.bfloat16, key_width=64, gated=True) is None
    assert why_not("fla", "cuda", torch.bfloat16, key_width=64, gated=False, needs_gradient=True) is None


def test_an_erase_direction_goes_through_the_gated_kernels(hopper):
    call = {"key_width": 64, "gated": False, "erasing": True, "needs_gradient": True}
    assert "wrong on Hopper" in why_not("fla", "cuda", torch.bfloat16, **call)


def test_tilelang_mends_it(hopper, monkeypatch):
    monkeypatch.setattr(fla_backend, "_tilelang_takes_over", lambda: True)
    assert why_not("fla", "cuda", torch.bfloat16, key_width=64, gated=True, needs_gradient=True) is None


def test_where_lapkernels_were_not_measured_fla_runs_if_it_is_right(hopper, monkeypatch):
    monkeypatch.setattr(fla_backend, "is_hopper", lambda index=0: False)
    assert select_impl("cuda", torch.bfloat16, **CALL).name == "fla"
    monkeypatch.setattr(fla_backend, "is_installed", lambda package: False)
    assert select_impl("cuda", torch.bfloat16, **CALL).name == "triton"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({}, "fla"),
        ({"needs_gradient": True}, "fla"),
        ({"key_width": 64}, "triton"),
        ({"value_width": 256}, "triton"),
        ({"value_width": None}, "triton"),
        ({"gated": False}, "triton"),
        ({"erasing": True}, "triton"),
    ],
    ids=str,
)
def test_flash_qla_through_fla(hopper, monkeypatch, change, name):
    monkeypatch.setattr(fla_backend, "is_installed", lambda package: True)
    monkeypatch.setattr(fla_backend, "_tilelang_takes_over", lambda: True)
    assert select_impl("cuda", torch.bfloat16, **(CALL | {"key_width": 128, "value_width": 128} | change)).name == name


def test_flash_qla_without_the_compiler_that_it_needs(hopper, monkeypatch):
    monkeypatch.setattr(fla_backend, "is_installed", lambda package: package == "flash_qla")
    assert select_impl("cuda", torch.bfloat16, **(CALL | {"key_width": 128, "value_width": 128})).name == "triton"


@pytest.mark.parametrize(
    ("device", "dtype", "change", "name", "reason"),
    [
        ("cpu", torch.bfloat16, {}, "chunked", "needs a GPU"),
        ("cpu", torch.float32, {"time": 1}, "reference", "one step"),
        ("cuda", torch.float32, {}, "chunked", "TF32"),
        ("cuda", torch.float64, {}, "chunked", "no kernel"),
        ("cuda", torch.bfloat16, {"key_width": 320}, "chunked", "256"),
        ("cuda", torch.bfloat16, {"time": 1}, "fla", "one kernel"),
        ("cuda", torch.bfloat16, {"time": 64}, "fla", "one kernel"),
        ("cuda", torch.bfloat16, {"time": 65}, "triton", "fastest"),
        ("cuda", torch.bfloat16, {"time": 64, "needs_gradient": True}, "triton", "fastest"),
        ("cuda", torch.bfloat16, {"time": 1, "erasing": True}, "reference", "one step"),
    ],
    ids=["cpu", "cpu_step", "fp32", "fp64", "wide", "gpu_step", "short", "longer", "short_gradient", "erasing_step"],
)
def test_what_auto_takes(hopper, device, dtype, change, name, reason):
    choice = select_impl(device, dtype, **(CALL | change))
    assert choice.name == name
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("there", "widest"), [(99 * 1024, 128), (163 * 1024, 256), (227 * 1024, 256), (None, 256), (64 * 1024, 0)]
)
def test_keys_that_shared_memory_has_no_room_for(hopper, monkeypatch, there, widest):
    """Case 15: a clear error before any launch, and `auto` takes what runs."""
    monkeypatch.setattr(triton_backend, "shared_memory", lambda device: there)
    for key_width in (16, 128, 129, 192, 256):
        why = why_not("triton", "cuda", torch.bfloat16, key_width=key_width, gated=True)
        choice = select_impl("cuda", torch.bfloat16, **(CALL | {"key_width": key_width}))
        if key_width <= widest:
            assert why is None
            assert choice.name == "triton"
        else:
            assert "KiB of shared memory" in (why or "")
            assert f"this GPU has {there // 1024}" in (why or "")
            assert choice.name == "fla"
            assert "shared memory" in choice.reason


def test_decays_of_channels(hopper, monkeypatch):
    """fla's kernels for them, trained with too, which do not go through the wrong one; never an erase direction."""
    call = CALL | {"by_channel": True}
    for needs_gradient in (False, True):
        choice = select_impl("cuda", torch.bfloat16, needs_gradient=needs_gradient, **call)
        assert choice.name == "fla"
        assert "not measured" in choice.reason
    known = {"key_width": 64, "gated": True, "by_channel": True}
    assert "erase direction" in (why_not("fla", "cuda", torch.bfloat16, erasing=True, **known) or "")
    assert why_not("triton", "cuda", torch.bfloat16, erasing=True, needs_gradient=True, **known) is None
    monkeypatch.setattr(fla_backend, "is_installed", lambda package: False)
    choice = select_impl("cuda", torch.bfloat16, **call)
    assert choice.name == "chunked"
    assert "not measured on a GPU" in choice.reason


def test_decays_of_channels_through_fla(hopper, monkeypatch):
    """What fla is called with: log decays in fp32, by the kernel that the length asks for."""
    called = {}

    def kernel(operator, form):
        return lambda **given: called.update(given, operator=operator, form=form) or (given["v"], None)

    monkeypatch.setattr(fla_backend, "_kernel", kernel)
    inputs = delta_rule_inputs(time=5, by_channel=True).to(torch.bfloat16)
    for needs_gradient, form in ((False, "fused_recurrent"), (True, "chunk")):
        fla_backend.delta_rule_fla(
            inputs.q, inputs.k, inputs.v, inputs.beta, inputs.g, None, 0.5, None, True, None,
            qk_l2norm=True, needs_gradient=needs_gradient,
        )  # fmt: skip
        assert (called["operator"], called["form"]) == ("kda", form)
    assert called["g"].dtype == torch.float32
    assert called["g"].shape == inputs.g.shape
    assert called["use_qk_l2norm_in_kernel"]
    assert not called.get("use_gate_in_kernel")
    assert called["scale"] == 0.5


def test_a_forced_kernel_that_cannot_run_is_an_error():
    with pytest.raises(KernelUnavailable, match="impl='fla'"):
        delta_rule(**delta_rule_inputs(time=5).to(torch.float32).tensors(), impl="fla")


def test_without_fla_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(fla_backend, "is_installed", lambda package: False)
    assert "pip install" in why_not("fla", "cuda", torch.bfloat16, key_width=64, gated=True)


@pytest.mark.parametrize(
    ("text", "version"),
    [("3.7.1", (3, 7, 1)), ("3.7.1+git5", (3, 7, 1)), ("3.4.0rc1", (3, 4, 0)), ("3.10", (3, 10))],
    ids=str,
)
def test_versions_compare_as_numbers(text, version):
    assert _triton.parse_version(text) == version


def test_a_version_without_numbers_is_refused():
    with pytest.raises(ValueError, match="not a version"):
        _triton.parse_version("unknown")


def test_the_package_runs_without_triton_fla_transformers_and_lapcli():
    script = """
        import sys
        blocked = ("triton", "fla", "transformers", "lapcli")
        for name in blocked:
            sys.modules[name] = None
        from lapkernels.delta_rule import delta_rule
        from lapkernels.testing import delta_rule_inputs
        inputs = delta_rule_inputs(time=9, erase="key").tensors()
        for impl in ("auto", "reference", "chunked"):
            assert delta_rule(**inputs, impl=impl).output.isfinite().all()
        assert not any(sys.modules.get(name) for name in blocked)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=120)
