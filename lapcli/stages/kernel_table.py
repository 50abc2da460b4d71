"""Which kernels take which widths: what their public source says, with repository, file, commit and date.

Data, read by `lapcli plan`. An entry says only what was found in the file that it names; `None` for the widths means
that nobody looked. `docs/plan.md` tells how to add or refresh one. Nothing here imports torch.
"""

from dataclasses import dataclass
from typing import Any, Literal

Operator = Literal[
    "gated delta rule", "delta rule", "query feedback", "gated delta product", "KDA", "GDN-2", "GLA", "gated states",
    "Mamba-2",
]  # fmt: skip
Phase = Literal["prefill", "decode", "prefill and decode"]
Verdict = Literal["takes it", "lost", "gained", "never took it", "not checked"]

READ = "2026-11-30"
"""When the sources were read."""

OPERATORS: dict[str, Operator] = {
    "gated_deltanet": "gated delta rule",
    "qwen3_next": "gated delta rule",
    "qwen3_5": "gated delta rule",
    "qwen3_5_moe": "gated delta rule",
    "qwen4_exp": "gated delta rule",
    "lara_mini": "gated delta rule",
    "olmo_hybrid": "gated delta rule",
    "delta_net": "delta rule",
    "qdelta": "query feedback",
    "gated_deltaproduct": "gated delta product",
    "gdn2": "GDN-2",
    "gla": "GLA",
    "dsla": "gated states",
    "kda": "KDA",
    "kimi_linear": "KDA",
    "bailing_hybrid": "KDA",
    "glm5_next": "KDA",
    "mamba2": "Mamba-2",
    "bamba": "Mamba-2",
    "falcon_h1": "Mamba-2",
    "granitemoehybrid": "Mamba-2",
    "nemotron_h": "Mamba-2",
    "zamba2": "Mamba-2",
}
"""The operator of a family's layers, by the family's name; a family that is not here has no entries below."""


@dataclass(frozen=True)
class Widths:
    """The head widths that a kernel takes.

    Attributes:
        key: smallest and largest `K`; `None` for no upper bound.
        value: likewise `V`; `None` where that was not checked.
        equal: whether `K` must be `V`.
    """

    key: tuple[int, int | None] = (1, None)
    value: tuple[int, int | None] | None = (1, None)
    equal: bool = False

    def take(self, key_width: int, value_width: int) -> bool:
        """Whether a head of this shape runs."""
        return _within(key_width, self.key) and (self.value is None or _within(value_width, self.value)) and (
            not self.equal or key_width == value_width
        )  # fmt: skip

    def __str__(self) -> str:
        value = "not checked" if self.value is None else _spelled(self.value)
        parts = [f"K {_spelled(self.key)}", f"V {value}"]
        if self.key == self.value == (1, None):
            parts = ["any K, any V"]
        return ", ".join(parts) + (", K = V" if self.equal and self.key[0] != self.key[1] else "")


@dataclass(frozen=True)
class Source:
    """Where a claim was read.

    Attributes:
        repository: `owner/name` on GitHub, or a package and its version.
        path: of the file, with lines where they were noted.
        commit: that was read.
        date: of that commit; `None` where the stored copy did not tell.
    """

    repository: str
    path: str
    commit: str
    date: str | None = None


@dataclass(frozen=True)
class Kernel:
    """One kernel.

    Attributes:
        name: engine and kernel.
        operators: what it computes.
        phase: when it runs.
        widths: the shapes it takes; `None`: not checked.
        source: where that was read; `None`: nowhere.
        note: what follows from it, measured figures with their source.
    """

    name: str
    operators: tuple[Operator, ...]
    phase: Phase
    widths: Widths | None
    source: Source | None
    note: str = ""

    def verdict(self, before: tuple[int, int], after: tuple[int, int]) -> Verdict:
        """What a change of shape from `(K, V)` to `(K', V)` means for it."""
        if self.widths is None:
            return "not checked"
        took, takes = self.widths.take(*before), self.widths.take(*after)
        if takes:
            return "takes it" if took else "gained"
        return "lost" if took else "never took it"

    def row(self, before: tuple[int, int], after: tuple[int, int]) -> dict[str, Any]:
        """The entry and its verdict, JSON-able."""
        source = self.source
        return {
            "kernel": self.name,
            "phase": self.phase,
            "widths": None if self.widths is None else str(self.widths),
            "verdict": self.verdict(before, after),
            "note": self.note,
            "source": None if source is None else {**source.__dict__, "read": READ},
        }


def kernels_for(operator: Operator) -> tuple[Kernel, ...]:
    """The entries of one operator, in the table's order."""
    return tuple(kernel for kernel in KERNELS if operator in kernel.operators)


def _within(width: int, bounds: tuple[int, int | None]) -> bool:
    return bounds[0] <= width and (bounds[1] is None or width <= bounds[1])


def _spelled(bounds: tuple[int, int | None]) -> str:
    low, high = bounds
    if low == high:
        return f"= {low}"
    if high is None:
        return "any" if low == 1 else f">= {low}"
    return f"<= {high}" if low == 1 else f"{low}..{high}"


_ANY = Widths()
_UP_TO_256 = Widths(key=(1, 256))
_ONLY_128 = Widths(key=(128, 128), value=(128, 128))
_TILE = "tiles of the next power of two over K, masked"

_FLA = ("fla-org/flash-linear-attention", "bc3b101dcb71", "2026-08-22")
_FLASHINFER = ("flashinfer-ai/flashinfer", "fb28d7242b35", "2026-08-22")
_FLA_06 = ("flash-linear-attention 0.6.0", "0.6.0")
_MAMBA = ("state-spaces/mamba", "e9594ce1c732", "2026-07-23")
_CULA = ("inclusionAI/cuLA", "fa742a23fcc6", "2026-04-24")


def _at(snapshot: tuple[str, str, str], path: str) -> Source:
    repository, commit, date = snapshot
    return Source(repository, path, commit, date)


def _ours(path: str) -> Source:
    return Source("lapcli", f"kernels/lapkernels/{path}", "of this version")


def _vllm(path: str, commit: str) -> Source:
    return Source("vllm-project/vllm", f"vllm/model_executor/layers/{path}", commit)


def _sglang(path: str, commit: str) -> Source:
    return Source("sgl-project/sglang", f"python/sglang/srt/layers/attention/{path}", commit)


KERNELS: tuple[Kernel, ...] = (
    Kernel(
        "transformers, PyTorch path",
        ("gated delta rule",),
        "prefill and decode",
        _ANY,
        Source("transformers 5.24.0", "models/qwen3_next/modeling_qwen3_next.py:371", "5.24.0"),
        "reads K and V from the tensors; lapcli's tests run slices on it",
    ),
    Kernel(
        "transformers, PyTorch path",
        ("Mamba-2",),
        "prefill and decode",
        _ANY,
        Source("transformers 5.24.0", "models/mamba2/modeling_mamba2.py:195-320", "5.24.0"),
        "reads the state size from the tensors; lapcli's tests run slices on it",
    ),
    Kernel(
        "lapcli, PyTorch over chunks",
        ("gated delta rule", "delta rule", "query feedback", "KDA"),
        "prefill",
        _ANY,
        _ours("delta_rule/chunked.py"),
        "on any device, with gradients; lapcli's tests run slices on it",
    ),
    Kernel(
        "lapcli, Triton over chunks",
        ("gated delta rule", "delta rule", "query feedback"),
        "prefill",
        _UP_TO_256,
        _ours("delta_rule/triton_backend.py"),
        "on a GPU in half precision, with gradients; K above 128 where a GPU has more than 100 KB of shared memory",
    ),
    Kernel(
        "lapcli, fused step",
        ("gated delta rule", "delta rule", "query feedback"),
        "decode",
        _ANY,
        _ours("delta_step/triton_launch.py"),
        "K in up to three tiles that are powers of two, the last one masked",
    ),
    Kernel(
        "fla, chunked (comba)",
        ("query feedback",),
        "prefill",
        _UP_TO_256,
        Source(_FLA_06[0], "ops/comba/chunk.py:66, ops/common/chunk_delta_h.py:716,772", _FLA_06[1]),
        "given e^g (k + lambda q), as its error is from before the decay; what lapcli runs on GPUs other than Hopper",
    ),
    Kernel(
        "Q-Delta's release, chunked",
        ("query feedback",),
        "prefill and decode",
        _UP_TO_256,
        Source("psmiz/Q-Delta", "qdelta/qdelta_rule/common/chunk_delta_h.py:456,501", "4afe5b5146c0", "2026-07-13"),
        "another function within chunks (docs/q-delta.md); lapcli computes it in PyTorch where a config says compat",
    ),
    Kernel(
        "fla, recurrent (comba)",
        ("query feedback",),
        "decode",
        _ANY,
        Source(_FLA_06[0], "ops/comba/fused_recurrent.py:139-141", _FLA_06[1]),
        f"{_TILE}; lapcli decodes by its own step",
    ),
    Kernel(
        "fla, chunked",
        ("gated delta rule", "delta rule"),
        "prefill",
        _UP_TO_256,
        _at(_FLA, "fla/ops/common/chunk_delta_h.py:712,766"),
        "an assertion in forward and backward; hands over to FlashQLA where that is installed and takes the shape",
    ),
    Kernel(
        "fla, recurrent",
        ("gated delta rule",),
        "decode",
        _ANY,
        _at(_FLA, "fla/ops/gated_delta_rule/fused_recurrent.py:206"),
        _TILE,
    ),
    Kernel(
        "fla, recurrent",
        ("delta rule",),
        "decode",
        _ANY,
        _at(_FLA, "fla/ops/delta_rule/fused_recurrent.py:272"),
        _TILE,
    ),
    Kernel(
        "fla, chunked",
        ("gated delta product",),
        "prefill",
        _UP_TO_256,
        _at(_FLA, "fla/ops/gated_delta_product/chunk_deltaproduct_h.py:458,503"),
    ),
    Kernel("fla, chunked", ("GDN-2",), "prefill", _UP_TO_256, _at(_FLA, "fla/ops/gdn2/chunk.py:333")),
    Kernel("fla, recurrent", ("GDN-2",), "decode", _ANY, _at(_FLA, "fla/ops/gdn2/fused_recurrent.py:283"), _TILE),
    Kernel(
        "fla, chunked",
        ("GLA", "gated states"),
        "prefill",
        _ANY,
        _at(_FLA, "fla/ops/gla/chunk.py:906"),
        "above K = 256 in split tiles; states that share keys count as one of all their channels",
    ),
    Kernel("fla, recurrent", ("gated delta product", "GLA"), "decode", None, None),
    Kernel("fla, chunked", ("KDA",), "prefill", _UP_TO_256, _at(_FLA, "fla/ops/kda/chunk.py:409")),
    Kernel("fla, recurrent", ("KDA",), "decode", _ANY, _at(_FLA, "fla/ops/kda/fused_recurrent.py:267"), _TILE),
    Kernel(
        "FlashQLA",
        ("gated delta rule",),
        "prefill",
        _ONLY_128,
        Source(
            "QwenLM/FlashQLA",
            "flash_qla/ops/gated_delta_rule/chunk/hopper/{fused_fwd.py:662,prepare_h.py:585,fused_bwd.py:1148}",
            "c18a4860ea9c",
            "2026-08-11",
        ),
        "without it prefill falls back to fla's Triton kernels: measured on one H200, 8 x 8192 tokens, 16 key and 32 "
        "value heads, V 128: 1.25 ms at K 128 with FlashQLA, 2.67 ms at K 64 and 2.41 ms at K 32 with fla, so prefill "
        "of such a layer gets slower",
    ),
    Kernel(
        "FlashKDA through fla",
        ("KDA",),
        "prefill",
        _ONLY_128,
        _at(_FLA, "fla/ops/kda/backends/flash_kda.py"),
        "inference only; fla falls back to its Triton kernels",
    ),
    Kernel(
        "cuLA",
        ("KDA",),
        "prefill",
        _ONLY_128,
        _at(_CULA, "cula/kda/chunk.py:388, cula/kda/hopper_fused_fwd.py:225, cula/kda/blackwell_fused_fwd.py:376"),
    ),
    Kernel(
        "cuLA",
        ("KDA",),
        "decode",
        Widths(key=(128, 128)),
        _at(_CULA, "cula/ops/kda_decode.py:44,1920"),
        "V in whole tiles besides",
    ),
    Kernel("cuLA", ("gated delta rule",), "prefill", None, None, "no kernel for it was found in cuLA as of 2026-04-24"),
    Kernel(
        "FlashInfer",
        ("gated delta rule",),
        "prefill",
        _ONLY_128,
        _at(
            _FLASHINFER,
            "flashinfer/gdn_prefill.py:485, flashinfer/gdn_kernels/delta_rule_dsl/{delta_rule_sm90.py:2376,"
            "delta_rule_sm120.py:2029}",
        ),
        "Hopper and Blackwell alike; the state is head_size x head_size",
    ),
    Kernel(
        "FlashInfer, fp32 state",
        ("gated delta rule",),
        "decode",
        Widths(key=(128, None), value=(128, None)),
        _at(_FLASHINFER, "flashinfer/gdn_decode.py:395,561,772"),
        "V in whole tiles besides",
    ),
    Kernel(
        "FlashInfer, bf16 state",
        ("gated delta rule",),
        "decode",
        _ONLY_128,
        _at(_FLASHINFER, "flashinfer/gdn_decode.py:264-270"),
        "other shapes do not get this kernel",
    ),
    Kernel(
        "FlashInfer",
        ("KDA",),
        "decode",
        _ONLY_128,
        _at(_FLASHINFER, "flashinfer/kda_kernels/fused_kda_decode.py:659-720"),
    ),
    Kernel(
        "FlashInfer",
        ("Mamba-2",),
        "decode",
        None,
        None,
        "some of its kernels are written for a state size of 128; which shapes the general one takes was not found",
    ),
    Kernel(
        "vLLM, Triton",
        ("gated delta rule",),
        "prefill",
        _UP_TO_256,
        _vllm("fla/ops/chunk_delta_h.py", "05f989dca718"),
    ),
    Kernel(
        "vLLM, FlashInfer",
        ("gated delta rule",),
        "prefill",
        _ONLY_128,
        _vllm("mamba/gdn/qwen_gdn_linear_attn.py", "00545a8acc22"),
        "the widths are FlashInfer's; vLLM's automatic choice on Hopper, where the version read does not look at K: "
        'for another K pass --additional-config \'{"gdn_prefill_backend": "triton"}\'; on Blackwell it looks, and '
        "takes Triton by itself",
    ),
    Kernel(
        "vLLM, CuteDSL",
        ("gated delta rule",),
        "prefill",
        Widths(key=(128, 128), value=None),
        _vllm("mamba/gdn/qwen_gdn_linear_attn.py", "00545a8acc22"),
        "Blackwell, and only where it is asked for",
    ),
    Kernel(
        "vLLM, Triton",
        ("gated delta rule",),
        "decode",
        _ANY,
        _vllm("fla/ops/fused_recurrent.py", "03c6dad84ad3"),
        _TILE,
    ),
    Kernel(
        "vLLM",
        ("KDA",),
        "prefill and decode",
        Widths(key=(1, 256), equal=True),
        _vllm("mamba/mamba_utils.py", "02d710837549"),
        "its pool has room for a square state of head_dim x head_dim (kda_state_shape), so K below V does not fit",
    ),
    Kernel(
        "SGLang, Triton",
        ("gated delta rule",),
        "prefill",
        _UP_TO_256,
        _sglang("fla/chunk_delta_h.py", "06a2775440b9"),
        "choose it with --linear-attn-prefill-backend triton; which one is the default was not checked",
    ),
    Kernel(
        "SGLang, Triton",
        ("gated delta rule",),
        "decode",
        _ANY,
        _sglang("fla/fused_recurrent.py", "10faf33794f8"),
        _TILE,
    ),
    Kernel(
        "SGLang, FlashQLA",
        ("gated delta rule",),
        "prefill",
        _ONLY_128,
        _sglang("linear/kernels/gdn_flashqla.py", "86e877de6782"),
        "only where it is asked for, and from 16384 tokens a batch on; in the version read it falls back for dtype and "
        "length but not for K, so do not ask for it with another K",
    ),
    Kernel("SGLang", ("KDA",), "prefill and decode", None, None),
    Kernel(
        "vLLM, SGLang",
        ("delta rule", "query feedback", "gated delta product", "GDN-2", "GLA"),
        "prefill and decode",
        None,
        None,
    ),
    Kernel(
        "vLLM, Triton",
        ("Mamba-2",),
        "prefill",
        _ANY,
        _vllm("mamba/ops/ssd_chunk_scan.py", "01d5a332e9fa"),
        f"{_TILE}; above 128 in a loop",
    ),
    Kernel(
        "vLLM, Triton",
        ("Mamba-2",),
        "decode",
        _ANY,
        _vllm("mamba/ops/mamba_ssm.py", "007ad216374b"),
        f"{_TILE}; its tile heights are chosen for a state size up to 16, 32, 64, 128 and above",
    ),
    Kernel(
        "SGLang, Triton",
        ("Mamba-2",),
        "prefill",
        _ANY,
        _sglang("mamba/ops/ssd_chunk_scan.py", "13be28e2583f"),
        f"{_TILE}; above 128 in a loop",
    ),
    Kernel(
        "SGLang, Triton",
        ("Mamba-2",),
        "decode",
        _ANY,
        _sglang("mamba/ops/mamba_ssm.py", "05f4e1676f82"),
        f"{_TILE}; its tile heights are chosen for a state size up to 16, 32, 64, 128 and above",
    ),
    Kernel(
        "mamba_ssm, Triton",
        ("Mamba-2",),
        "prefill",
        _ANY,
        _at(_MAMBA, "mamba_ssm/ops/triton/ssd_chunk_scan.py:107,1303"),
        f"{_TILE}; above 128 in a loop",
    ),
    Kernel(
        "mamba_ssm, Triton",
        ("Mamba-2",),
        "decode",
        _ANY,
        _at(_MAMBA, "mamba_ssm/ops/triton/selective_state_update.py:22,194"),
        _TILE,
    ),
)
"""All entries."""
