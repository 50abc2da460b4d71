"""Rules over made-up machines: each known-bad combination is found, named with what mends it, and nothing else is."""

from dataclasses import replace

import pytest

from lapcli.doctor.facts import Facts, Gpu, gather
from lapcli.doctor.findings import RULES, findings, rate_findings

H200 = Gpu("NVIDIA H200", (9, 0), 150 * 2**30, 149 * 2**30, 232448, 60 * 2**20, 132)
OLD = Gpu("Tesla T4", (7, 5), 15 * 2**30, 15 * 2**30, 65536, 4 * 2**20, 40)
ALL = {
    "torch": "2.13.0",
    "triton": "3.7.1",
    "transformers": "5.24.0",
    "flash-linear-attention": "0.6.0",
    "fla-core": "0.6.0",
    "causal-conv1d": "1.7.0",
    "mamba-ssm": "2.4.0",
    "peft": "0.21.2",
    "datasets": "5.2.0",
    "lm-eval": "0.4.13",
    "matplotlib": "3.11.2",
}
SOUND = Facts(
    python="3.12.1",
    system="Linux x86_64",
    cpus=16,
    versions=ALL,
    pinned_triton="3.7.1",
    torch_cuda="13.0",
    architectures=("sm_80", "sm_90", "sm_100"),
    driver_cuda=(13, 0),
    device_files=True,
    gpus=(H200,),
    compiler="/usr/bin/gcc",
    cache_folder="/home/user/.triton/cache",
)
CPU_ONLY = replace(
    SOUND, torch_cuda=None, architectures=(), driver_cuda=None, device_files=False, gpus=(), pinned_triton=None
)


def with_versions(facts=SOUND, **versions):
    names = {name.replace("_", "-"): version for name, version in versions.items()}
    merged = {**facts.versions, **names}
    return replace(facts, versions={name: version for name, version in merged.items() if version is not None})


def test_nothing_is_found_where_all_is_well():
    assert findings(SOUND) == []


def test_a_cpu_is_no_fault():
    found = findings(CPU_ONLY)
    assert [finding.level for finding in found] == ["note"]
    assert "0 active drivers" in found[0].what


HOPPER_OLD_TRITON = with_versions(triton="3.6.0", torch="2.11.0", pinned_triton=None)
HOPPER_OLD_TRITON = replace(HOPPER_OLD_TRITON, pinned_triton="3.6.0")


@pytest.mark.parametrize(
    ("facts", "level", "said", "mended_by"),
    [
        (replace(SOUND, python="3.10.4"), "wrong", "Python 3.10.4", "newer environment"),
        (with_versions(torch="2.9.1"), "wrong", "torch 2.9.1; lapcli needs 2.10", "torch>=2.10"),
        (with_versions(transformers="5.9.0"), "wrong", "transformers 5.9.0", "transformers>=5.10"),
        (
            with_versions(flash_linear_attention="0.5.1", fla_core="0.5.1"),
            "wrong", "fla-core 0.5.1", "fla-core>=0.6",
        ),
        (with_versions(fla_core="0.6.1"), "wrong", "two halves", "fla-core==0.6.0"),
        (HOPPER_OLD_TRITON, "slow", "wrong on Hopper with triton 3.6.0", "tilelang>=0.1.15"),
        (
            replace(with_versions(HOPPER_OLD_TRITON, tilelang="0.1.15"), environment={"FLA_TILELANG": "0"}),
            "slow", "switched off", "unset FLA_TILELANG",
        ),
        (
            replace(with_versions(HOPPER_OLD_TRITON, tilelang="0.1.15"), tilelang_compiles=False),
            "slow", "finds no nvcc", "nvcc",
        ),
        (replace(SOUND, gpus=(), torch_cuda=None), "slow", "was built without CUDA", "CUDA build"),
        (replace(SOUND, gpus=(), driver_cuda=(12, 4)), "wrong", "CUDA up to 12.4", "newer driver"),
        (
            replace(SOUND, gpus=(), cuda_error="CUDA unknown error - this may be due to a bad setup"),
            "wrong", "CUDA unknown error", "nvidia-smi",
        ),
        (replace(SOUND, gpus=(), environment={"CUDA_VISIBLE_DEVICES": ""}), "note", "hides the GPU", "unset"),
        (replace(SOUND, gpus=(OLD,)), "wrong", "compute capability 7.5", "install a build of torch"),
        (replace(SOUND, gpus=(OLD,), architectures=("sm_75",)), "slow", "no bf16", "float16"),
        (replace(SOUND, compiler=None), "wrong", "C compiler", "gcc"),
        (replace(SOUND, cache_writable=False), "wrong", "cannot be written", "TRITON_CACHE_DIR"),
        (replace(SOUND, environment={"TRITON_INTERPRET": "1"}), "wrong", "interpreted", "unset TRITON_INTERPRET"),
        (replace(SOUND, environment={"CUDA_LAUNCH_BLOCKING": "1"}), "slow", "waits for each kernel", "unset"),
        (
            with_versions(flash_linear_attention=None, fla_core=None),
            "slow", "fla is not installed", "lapcli[gpu]",
        ),
        (
            replace(SOUND, unusable={"mamba-ssm": "undefined symbol: _ZN3c10"}),
            "wrong", "mamba-ssm 2.4.0 cannot be imported: undefined symbol", "--no-build-isolation",
        ),
        (with_versions(mamba_ssm=None), "note", "mamba-ssm not installed", "pip install"),
        (replace(SOUND, gpus=(replace(H200, free=2**30),)), "note", "cuda:0 has 1.0 of 150.0 GiB free", "nvidia-smi"),
        (replace(SOUND, gpus=(H200, replace(H200, name="NVIDIA H100 80GB HBM3"))), "note", "unlike GPUs", "--device"),
        (replace(SOUND, pinned_triton="3.8.0"), "note", "released with triton 3.8.0, and 3.7.1", ""),
        (with_versions(kernels="0.12"), "note", "fetch kernels", "HF_HUB_OFFLINE"),
        (with_versions(datasets=None), "note", "datasets is not installed", "pip install datasets"),
    ],
    ids=lambda value: value if isinstance(value, str) and value in ("wrong", "slow", "note") else None,
)  # fmt: skip
def test_a_known_fault_is_found_with_what_mends_it(facts, level, said, mended_by):
    found = [finding for finding in findings(facts) if said in finding.what]
    assert len(found) == 1, findings(facts)
    assert found[0].level == level
    assert mended_by in found[0].remedy
    # And what mends it is not hidden behind faults that are none.
    if level == "note":
        assert all(finding.level == "note" for finding in findings(facts))


@pytest.mark.parametrize(
    "facts",
    [
        with_versions(triton="3.3.1"),
        replace(HOPPER_OLD_TRITON, gpus=(replace(H200, name="NVIDIA A100", capability=(8, 0)),)),
        replace(with_versions(HOPPER_OLD_TRITON, tilelang="0.1.15"), tilelang_compiles=True),
        with_versions(HOPPER_OLD_TRITON, flash_linear_attention=None, fla_core=None),
    ],
    ids=["older triton", "an A100", "tilelang", "no fla"],
)
def test_hopper_alone_has_the_wrong_gradients(facts):
    assert not any("Hopper" in finding.what for finding in findings(facts))


def test_machine_code_of_a_major_version_runs_on_its_later_gpus():
    """sm_80 runs on 8.6 and 8.9, and not on 9.0."""
    later = replace(SOUND, gpus=(replace(H200, capability=(8, 9)),), architectures=("sm_80",))
    assert findings(later) == []
    hopper = replace(SOUND, architectures=("sm_80",))
    assert [finding.level for finding in findings(hopper)] == ["wrong"]
    compiled_on_the_way = replace(SOUND, architectures=("sm_80", "compute_80"))
    assert findings(compiled_on_the_way) == []


def test_the_worst_comes_first():
    facts = replace(with_versions(kernels="0.12", torch="2.9"), environment={"CUDA_LAUNCH_BLOCKING": "1"})
    assert [finding.level for finding in findings(facts)][:3] == ["wrong", "slow", "note"]


def test_rates_far_below_the_data_sheet_are_told():
    assert rate_findings("NVIDIA H200", 4.26e12, 780e12) == []
    slow = rate_findings("NVIDIA H200", 2.4e12, 300e12)
    assert [finding.level for finding in slow] == ["slow", "slow"]
    assert "50%" in slow[0].what
    assert rate_findings("some other chip", 1.0, 1.0) == []


def test_every_rule_takes_what_this_machine_is():
    facts = gather()
    assert facts.versions["torch"]
    for rule in RULES:
        list(rule(facts))
