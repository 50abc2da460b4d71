"""Settings of the machine: where and in which precision something runs. Never hashed into a lineage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lapcli import parallel
from lapcli.errors import ModelError, UsageError
from lapcli.families.base import StatefulLayer
from lapcli.reporting import Reporter

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class Machine:
    """Where a stage runs.

    Attributes:
        device: "auto", "cpu", "cuda", "cuda:1", …; "split" spreads a model over all GPUs, then memory and disk. Of
            several processes that torchrun started, each takes a GPU of its own.
        dtype: "auto" or a torch dtype's name.
        kernel: "auto", "reference", "chunked", "triton" or "fla".
        require_fast: whether it is an error when no fast kernel runs.
        trust_remote_code: whether code in a model's directory may run.
    """

    device: str = "auto"
    dtype: str = "auto"
    kernel: str = "auto"
    require_fast: bool = False
    trust_remote_code: bool = False

    @property
    def split(self) -> bool:
        """Whether a model is spread over all devices."""
        return self.device == "split"

    def first_device(self) -> torch.device:
        """The device, or the first of those that a model is spread over: where tokens go.

        Raises:
            UsageError: see `torch_device`; or every process would spread a model over the same devices.
        """
        if not self.split:
            return self.torch_device()
        if parallel.launched():
            raise UsageError(
                "--device split spreads one model over all devices, and torchrun starts several",
                "use either: torchrun where a model fits one GPU, --device split without torchrun where it does not",
            )
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    def torch_device(self) -> torch.device:
        """The device.

        Raises:
            UsageError: it is none, or CUDA is asked for where there is none, or one process or device where there are
                several.
        """
        if self.split:
            raise UsageError("--device split is for calibrate and prune", "pass --device auto, cpu, cuda or cuda:N")
        if parallel.launched() and self.device != "cpu":
            return self._own_device()
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise UsageError(f"--device {self.device!r} is no device", "cpu, cuda, cuda:1, … or auto") from error
        if device.type == "cuda":
            count = torch.cuda.device_count()
            if not torch.cuda.is_available() or (device.index or 0) >= count:
                built = torch.version.cuda or "no CUDA"
                raise UsageError(
                    f"--device {self.device}: there are {count} CUDA devices here (torch {torch.__version__}, {built})",
                    "pass --device cpu, or install a CUDA build of torch",
                )
        return device

    def _own_device(self) -> torch.device:
        """The GPU of this one of several processes."""
        if self.device == "auto" and not torch.cuda.is_available():
            return torch.device("cpu")
        if self.device not in ("auto", "cuda"):
            raise UsageError(
                f"--device {self.device}: torchrun gives each of its processes a GPU of its own",
                "pass --device cuda, cpu or auto",
            )
        count, wanted = torch.cuda.device_count(), parallel.local_size()
        if wanted > count:
            raise UsageError(
                f"torchrun started {wanted} processes here, but there are {count} CUDA devices",
                f"pass --nproc-per-node {count} to torchrun" if count else "pass --device cpu",
            )
        return torch.device("cuda", parallel.local_rank())

    def torch_dtype(self, config: Mapping[str, Any]) -> torch.dtype:
        """The dtype of the weights: fp32 on a CPU, the checkpoint's on a GPU or where split, unless named.

        Raises:
            UsageError: the name is no dtype that lapcli runs in.
        """
        if self.dtype != "auto":
            if self.dtype not in _DTYPES:
                raise UsageError(f"--dtype {self.dtype!r} is none of {', '.join(_DTYPES)}, auto")
            return _DTYPES[self.dtype]
        if self.first_device().type == "cpu" and not self.split:
            return torch.float32
        text = config.get("text_config") or {}
        stored = config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or "bfloat16"
        return _DTYPES.get(stored, torch.bfloat16)

    def dtype_by_name(self, config: Mapping[str, Any]) -> str | None:
        """The name of the dtype that was asked for; `None` where the machine chose it, or nobody did.

        Raises:
            UsageError: it is no dtype that lapcli runs in.
        """
        return None if self.dtype == "auto" else str(self.torch_dtype(config)).removeprefix("torch.")

    def check(
        self, config: Mapping[str, Any], layers: Sequence[StatefulLayer] = (), *, needs_gradient: bool = False
    ) -> None:
        """Refuse, before any work, a device, dtype or kernel that cannot be.

        Args:
            config: of the model.
            layers: its stateful layers, where lapcli's own kernels will run them.
            needs_gradient: whether a backward pass will run.

        Raises:
            UsageError: one of the names is none.
            ModelError: a kernel asked for by name cannot run such layers here, or `require_fast` is set and none can.
        """
        from lapcli.families.dual_state import has_states, kernel_choice
        from lapcli.families.fla_library import refuse_where_fla_cannot_run
        from lapcli.families.library_kernels import why_not_kernel
        from lapkernels.delta_rule import IMPLEMENTATIONS, select_impl, why_not

        device, dtype = self.first_device(), self.torch_dtype(config)
        if self.kernel not in IMPLEMENTATIONS:
            raise UsageError(f"--kernel {self.kernel!r} is none of {', '.join(IMPLEMENTATIONS)}")
        refuse_where_fla_cannot_run(config, device.type, dtype)
        if has_states(config):
            choice = kernel_choice(self.kernel, device, dtype, needs_gradient=needs_gradient)
            self.refuse_slow(choice.name, choice.reason)
            return
        for layer in layers[:1]:
            if layer.keys is not None:
                # A stock model: its library binds the kernels.
                if self.require_fast and device.type == "cpu":
                    self.refuse_slow("PyTorch", "transformers' functions, on a CPU")
                wrong = why_not_kernel(self.kernel, config, device, dtype, needs_gradient=needs_gradient)
                if wrong is not None:
                    raise ModelError(f"--kernel {self.kernel} cannot run here: {wrong}", "use --kernel auto")
                break
            shape: dict[str, Any] = {
                "key_width": layer.key_width,
                "gated": layer.gated,
                "erasing": layer.erasing,
            }
            if self.kernel != "auto":
                wrong = why_not(self.kernel, device, dtype, needs_gradient=needs_gradient, **shape)
                if wrong is not None:
                    raise ModelError(f"--kernel {self.kernel} cannot run here: {wrong}", "use --kernel auto")
                self.refuse_slow(self.kernel, "asked for by name")
            else:
                choice = select_impl(
                    device, dtype, time=1024, needs_gradient=needs_gradient, value_width=layer.value_width, **shape
                )
                self.refuse_slow(choice.name, choice.reason)

    def refuse_slow(self, name: str, reason: str) -> None:
        """Refuse a kernel that is no fast one where fast ones are required.

        Args:
            name: of the kernel that would run.
            reason: why it would.

        Raises:
            ModelError: it is one of PyTorch's ways, and `require_fast` is set.
        """
        if self.require_fast and name not in ("fla", "triton"):
            raise ModelError(
                f"--require-fast: the {name} kernel would run ({reason})",
                "install 'lapcli[gpu]' on a machine with a CUDA device, or drop --require-fast",
            )

    def announce(
        self, model: Any, reporter: Reporter, *, needs_gradient: bool = False, device: torch.device | None = None
    ) -> None:
        """Say in one line which kernels run, or refuse when fast ones were required and some are not.

        Args:
            model: one of lapcli's own models, or a stock one.
            reporter: where the line goes.
            needs_gradient: whether a backward pass will follow.
            device: where the model will lie, if not where it lies now.

        Raises:
            ModelError: `require_fast` is set and the PyTorch path runs.
        """
        if not hasattr(model, "kernel_choice"):
            place = device or model.device
            if not self._announce_dual_states(model, reporter, place, needs_gradient=needs_gradient):
                self._announce_library(model, reporter, device, needs_gradient=needs_gradient)
            return
        name, reason = model.kernel_choice(2, training=needs_gradient, device=device)
        if needs_gradient and self.kernel == name:
            from lapkernels.delta_rule import why_not

            mixer = model.mixers()[0]
            wrong = why_not(
                name,
                device or model.device,
                model.dtype,
                key_width=mixer.shape.key_width,
                gated=mixer.gated,
                erasing=mixer.erasing,
                needs_gradient=True,
            )
            if wrong is not None:
                raise ModelError(f"--kernel {name} cannot compute gradients here: {wrong}", "use --kernel auto")
        self.refuse_slow(name, reason)
        reporter.notice(f"kernel: {name} ({reason}), {_placement(model, device)}")

    def _announce_dual_states(
        self, model: Any, reporter: Reporter, device: torch.device, *, needs_gradient: bool
    ) -> bool:
        """The same of a transformer some of whose layers hold states; whether it is one."""
        from lapcli.families.dual_state import kernel_choice
        from lapcli.families.remote.lapcli_dual_state import DualStateAttention

        found = [each for each in model.modules() if isinstance(each, DualStateAttention)]
        holding = sum(each.settings.window is None for each in found)
        if not holding:
            return False
        name, reason = kernel_choice(self.kernel, device, model.dtype, needs_gradient=needs_gradient)
        self.refuse_slow(name, reason)
        layers = f"{holding} of {model.config.num_hidden_layers} layers"
        reporter.notice(f"kernel: {name} ({reason}) in {layers}, {_placement(model, device)}")
        return True

    def _announce_library(
        self, model: Any, reporter: Reporter, device: torch.device | None, *, needs_gradient: bool
    ) -> None:
        from lapcli.families.library_kernels import kernels_of

        where = _placement(model, device)
        if type(model).__module__.startswith("fla."):
            reporter.notice(f"kernels: fla's, {where}")
            return
        found = kernels_of(model, device, needs_gradient=needs_gradient)
        slow = sorted(name for name, package in found.items() if package in ("PyTorch", "reference", "chunked"))
        if self.require_fast and (slow or not found):
            raise ModelError(
                f"--require-fast: transformers' PyTorch functions would run ({', '.join(slow) or 'all'})",
                "install flash-linear-attention, causal-conv1d and mamba-ssm beside a CUDA device, "
                "or drop --require-fast",
            )
        packages = sorted({package for package in found.values() if package != "PyTorch"})
        if not packages:
            reporter.notice(f"kernels: transformers' PyTorch functions, {where}")
        else:
            plain = sorted(name for name, package in found.items() if package == "PyTorch")
            rest = f", PyTorch for {', '.join(plain)}" if plain else ""
            reporter.notice(f"kernels: {', '.join(packages)} through transformers{rest}, {where}")


def _placement(model: Any, device: torch.device | None) -> str:
    """The dtype of a model and where it lies, or will lie, in words."""
    places: Mapping[str, Any] = getattr(model, "hf_device_map", None) or {"": device or model.device}
    names = [str(torch.device(place)) if place != "disk" else place for place in dict.fromkeys(places.values())]
    return f"{str(model.dtype).removeprefix('torch.')} on {', '.join(names)}"
