"""One training by several processes: what a part of a batch computes, as a module that DDP or FSDP2 can wrap.

Every process holds a device and takes its share of each step's sequences. Under DDP all have the whole models and only
gradients meet; under FSDP2 each keeps a share of every tensor of student and teacher, and a decoder block is whole
only while it computes. Both average gradients over the processes, so the loss of a part counts as often as there are
processes (`Parallel.average_of`).

Gradients and shards go over a group of their own: NCCL between GPUs, gloo between CPUs. Numbers of the host (signals,
counts, sums, checkpoints) go over the command's gloo group (`lapcli.parallel`), so that no device is waited for.
"""

import contextlib
import functools
import os
import warnings
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from lapcli.artifacts import digest_document
from lapcli.errors import ModelError
from lapcli.models.loss import IGNORED
from lapcli.parallel import ALONE, PATIENCE, Processes
from lapcli.training.adapters import trained_parameters
from lapcli.training.distillation import Sums, distillation_sums, head_of
from lapcli.training.packing import PackedBatch, last_hidden, reads_packing

Sharding = Literal["none", "fsdp"]


class Objective(nn.Module):
    """The sums of the recovery loss over a part of a batch, for student and teacher together.

    Heads are looked up in each call: FSDP2 puts whole tensors in the place of sharded ones only for its duration.

    Args:
        student: with adapters, on its device.
        teacher: frozen, on any device; or `None`.
        vocabulary: leading ids that both have, as for `distillation_sums`.
        temperature: of the KL.
        autocast: whether products are in bf16 on a GPU.

    Raises:
        ModelError: one of them has no head that can be distilled.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module | None,
        *,
        vocabulary: int | None = None,
        temperature: float = 2.0,
        autocast: bool = True,
    ):
        super().__init__()
        self.student = student
        # Not registered, since DDP asks that all it is given lies on devices of one type.
        self._teachers = () if teacher is None else (teacher,)
        self._vocabulary, self._temperature, self._autocast = vocabulary, temperature, autocast
        for model in self.models():
            # Where the weights are yet to come, their owner looks.
            if not next(model.parameters()).is_meta:
                head_of(model)

    def models(self) -> list[Any]:
        """The student, and the teacher if there is one, out of peft's wrapper."""
        return [unwrapped(model) for model in (self.student, *self._teachers)]

    def adopt_teacher(self) -> None:
        """Take the teacher in among the modules, for what is to wrap both."""
        for teacher in self._teachers:
            self.teacher = teacher

    def passes(self, batch: PackedBatch) -> int:
        """How often a decoder runs for a part at most, where one reads no boundaries of documents; 0 where all do.

        Such a decoder runs once for documents of similar lengths (`last_hidden`), and not for those of one token.
        """
        if all(reads_packing(model) for model in self.models()):
            return 0
        return len(batch.calls)

    def forward(self, batch: PackedBatch, passes: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """The fields of `Sums`, with a gradient unless there is `no_grad`.

        Args:
            batch: the part, on the CPU.
            passes: how often a decoder that reads no boundaries is to run at least, since all processes must run a
                sharded block equally often, and each trained parameter once before DDP adds up gradients. What is
                beyond `self.passes(batch)` runs for nothing, and adds zeros.
        """
        student, *teachers = self.models()
        idle = max(0, passes - self.passes(batch))
        with self._precision(student.device):
            hidden = _hidden(student, batch, idle)
        guide = guide_head = None
        for teacher in teachers:
            with torch.no_grad(), self._precision(teacher.device):
                guide, guide_head = _hidden(teacher, batch, idle), head_of(teacher)
        with self._precision(student.device):
            sums = distillation_sums(
                hidden,
                head_of(student),
                guide,
                guide_head,
                batch.labels,
                vocabulary=self._vocabulary,
                temperature=self._temperature,
            )
        return sums.cross_entropy, sums.kl, sums.tokens

    def _precision(self, device: torch.device) -> Any:
        return product_precision(device) if self._autocast else contextlib.nullcontext()


def product_precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """In which matrix products of training are made: bf16 on a GPU, whatever the weights are in; elsewhere theirs."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def unwrapped(model: Any) -> Any:
    """A model out of peft's wrapper, if it has one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _hidden(model: Any, batch: PackedBatch, idle: int) -> Tensor:
    """As `last_hidden`, after which a decoder that reads no boundaries runs so often again on two tokens."""
    hidden = last_hidden(model, batch)
    if not reads_packing(model):
        ids = batch.ids[:1, :2].to(model.device)
        for _ in range(idle):
            hidden = hidden + 0 * model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state.sum()
    return hidden


def nothing_of(batch: PackedBatch) -> PackedBatch:
    """The same part, in which no token counts: for processes that have none left while others do."""
    return replace(batch, labels=torch.full_like(batch.labels, IGNORED))


class Parallel:
    """An objective as all processes compute it; in one process just the objective.

    What was trained differently by the processes (LoRA is drawn at random) becomes the leader's.

    Args:
        objective: whose models this process has whole, on its device. Under FSDP2 they are sharded in place for good,
            and the leader may have them in memory and the others nowhere (`lapcli.families.loading.load_model`).
        processes: those that train, which have a process group (`lapcli.parallel.jointly`) if there are several.
        sharding: `none` for DDP, `fsdp` for FSDP2; either does nothing in one process.
        device: this process's; by default that of the student.

    Raises:
        ModelError: no decoder blocks are found to be sharded, or processes hold different models.
    """

    def __init__(
        self,
        objective: Objective,
        processes: Processes = ALONE,
        sharding: Sharding = "none",
        device: torch.device | None = None,
    ):
        self._plain = self._wrapped = objective
        self._processes = processes
        self.sharded = processes.size > 1 and sharding == "fsdp"
        if processes.size == 1:
            return
        here: torch.device = objective.models()[0].device if device is None else device
        group = _group_between(here)
        if self.sharded:
            _shard(objective, here, group, processes)
        else:
            _take_the_leaders(objective.student, group)
            self._wrapped = _replicated(objective, group)

    def average_of(self, loss: Tensor) -> Tensor:
        """A loss of which the average over processes is the sum of what they passed, as its gradient will be."""
        return loss * self._processes.size

    def sums(self, batch: PackedBatch, passes: int = 0) -> Sums:
        """Those of a part, to be followed by a backward pass, if gradients are on."""
        module = self._wrapped if torch.is_grad_enabled() else self._plain
        return Sums(*module(batch, passes))

    def accumulating(self, last: bool) -> Any:
        """Around the passes of a part: gradients of DDP meet in the last of a step alone.

        FSDP2 adds them up in each, so that no process ever holds more than its share.
        """
        if self._wrapped is self._plain or last:
            return contextlib.nullcontext()
        wrapped: Any = self._wrapped
        return wrapped.no_sync()

    def rest(self) -> None:
        """Give back what a forward pass without a backward pass left whole."""
        if self.sharded:
            sharded: Any = self._plain
            sharded.reshard()


def _group_between(device: torch.device) -> Any:
    """The group that tensors of the processes' devices go over."""
    import torch.distributed as dist

    if device.type != "cuda":
        return dist.group.WORLD
    torch.cuda.set_device(device)
    # Multicast needs rights on the NVLink switch that containers often lack, and is then a hang or a failure.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    return _nccl_beside(dist.group.WORLD)


@functools.lru_cache(maxsize=1)
def _nccl_beside(_world: Any) -> Any:
    """One NCCL group of all processes for as long as the command's own group lives."""
    import torch.distributed as dist

    return dist.new_group(backend="nccl", timeout=PATIENCE)


@torch.no_grad()
def _take_the_leaders(student: nn.Module, group: Any) -> None:
    import torch.distributed as dist

    for parameter in trained_parameters(student).values():
        value = parameter.detach().contiguous()
        dist.broadcast(value, src=0, group=group)
        parameter.copy_(value)


def _replicated(objective: Objective, group: Any) -> nn.Module:
    """Let the gradients of every process's copy meet."""
    from torch.nn.parallel import DistributedDataParallel

    with warnings.catch_warnings():
        # Newer versions of torch have two names for what this one says in all of them.
        warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
        # Frozen tensors come from one checkpoint, and nothing trains buffers.
        return DistributedDataParallel(
            objective, process_group=group, broadcast_buffers=False, init_sync=False, gradient_as_bucket_view=True
        )


def _shard(objective: Objective, device: torch.device, group: Any, processes: Processes) -> None:
    """Shard every decoder block of both models by itself, and what remains together.

    Where the leader alone has the weights, each part comes to the devices whole just before it is sharded, so that no
    device ever holds more than its share and one part.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    objective.adopt_teacher()
    _refuse_different(objective, processes)
    mesh = DeviceMesh.from_group(group, device.type)
    missing = any(tensor.is_meta for tensor in (*objective.parameters(), *objective.buffers()))
    apart = any(flag.item() for flag in processes.collect(torch.tensor([missing])))
    if not apart:
        _take_the_leaders(objective.student, group)
    brought: set[int] = set()
    for model in objective.models():
        for block in decoder_blocks(model):
            if apart:
                _bring(block, device, group, processes.leader, brought)
            fully_shard(block, mesh=mesh)
    if apart:
        _bring(objective, device, group, processes.leader, brought)
    # The heads are read in the objective's own forward pass, for which this group is whole.
    fully_shard(objective, mesh=mesh, reshard_after_forward=False)


def _refuse_different(objective: Objective, processes: Processes) -> None:
    """Refuse models whose tensors differ between processes, which would wait for each other for ever."""
    named = (*objective.named_parameters(), *objective.named_buffers())
    said = digest_document(
        [[name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad] for name, tensor in named]
    )
    mine = torch.tensor(list(bytes.fromhex(said)), dtype=torch.uint8)
    if not all(torch.equal(theirs, mine) for theirs in processes.collect(mine)):
        raise ModelError(
            "the processes of this run hold models of different tensors",
            "see that all machines have the same model directories and versions of transformers and lapcli",
        )


@torch.no_grad()
def _bring(module: nn.Module, device: torch.device, group: Any, leader: bool, brought: set[int]) -> None:
    """Put the leader's tensors on every process's device, those left out that were brought or sharded before.

    Tensors that modules share stay shared within what is brought at once, which is what FSDP2 shards together.

    Args:
        module: whose parameters and buffers it is about.
        device: of this process.
        group: of all.
        leader: whether this process has the values.
        brought: ids of buffers that were brought; those of this module are added.
    """
    import torch.distributed as dist

    # With the old ones, whose ids must not be given to others meanwhile.
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for part in module.modules():
        tensors: list[dict[str, Any]] = [part._parameters, part._buffers]
        for slots in tensors:
            for name, old in slots.items():
                if old is None or hasattr(old, "device_mesh") or id(old) in brought:
                    continue
                if id(old) not in made:
                    new = old.detach().to(device).contiguous() if leader else old.new_empty(old.shape, device=device)
                    if new.numel():
                        # As bytes, since not all transports know all dtypes.
                        dist.broadcast(new.view(-1).view(torch.uint8), src=0, group=group)
                    is_parameter = isinstance(old, nn.Parameter)
                    made[id(old)] = old, nn.Parameter(new, old.requires_grad) if is_parameter else new
                slots[name] = made[id(old)][1]
    brought.update(id(new) for _old, new in made.values() if not isinstance(new, nn.Parameter))


def decoder_blocks(model: Any) -> list[nn.Module]:
    """The decoder blocks of a model, those within others left out.

    Raises:
        ModelError: none are found.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    found: dict[str, nn.Module] = {}
    for name, module in model.get_decoder().named_modules():
        is_block = isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in names
        if is_block and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    if not found:
        raise ModelError(
            f"{type(model).__name__} does not say which of its modules are decoder blocks, so it cannot be sharded",
            "train without sharding",
        )
    return list(found.values())


def local(value: Any) -> Tensor:
    """A tensor, or this process's part of a sharded one, which may be empty."""
    return value.to_local() if hasattr(value, "to_local") else value


def placed_like(parameter: Any, value: Tensor) -> Tensor:
    """A whole tensor, the same on every process, on a parameter's device and sharded as it is."""
    if not hasattr(parameter, "device_mesh"):
        return value.to(parameter.device)
    from torch.distributed.tensor import distribute_tensor

    # Without a source rank each process cuts its part out of its own copy.
    return distribute_tensor(
        value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )
