"""The model card of a recovered model: recipe, data, budget and results."""

from typing import Any

from lapcli.families.source import ModelSource
from lapcli.recipe import RecoverySettings
from lapcli.stages.lineage import LINEAGE_FILE, sliced_lineage

AS_BEFORE = "It loads as the model it was made from does."


def recovery_card(
    student: ModelSource, teacher: ModelSource | None, settings: RecoverySettings, record: dict[str, Any]
) -> str:
    """The card, in Markdown.

    Args:
        student: the model that was trained.
        teacher: the model it learned from, if any.
        settings: of the recovery.
        record: how training ended: `tokens`, `step`, `seconds`, `processes`, `before`, `after`, `stopped`.
    """
    training = settings.training()
    what = "trained as a control for recovery" if settings.control else "recovered"
    trained = "the mixers whole" if settings.full else f"LoRA, rank {settings.rank}, alpha {settings.alpha}"
    if not settings.full:
        trained += " (" + ("q, k and v projections" if settings.targets is None else ", ".join(settings.targets))
        trained += "), short convolutions and norms in full"
    loss = "cross entropy"
    if teacher is not None:
        loss += f" + {training.kl_weight:g} T^2 KL(teacher, student), T = {training.temperature:g}"
    rows = {
        "trained from": f"`{student.name}` ({student.digest[:12]})",
        "pruning": _pruning(student),
        "teacher": "none" if teacher is None else f"`{teacher.name}` ({teacher.digest[:12]})",
        "data": f"`{settings.data}`, seed {settings.seed}",
        "budget": f"{record['tokens']:,} tokens that counted, in {record['step']} of {training.steps} steps of "
        f"{training.batch} x {settings.seq_len}",
        "trained": trained + "; layers with a state only",
        "loss": loss,
        "optimiser": f"AdamW, {training.lr:g} falling to {training.lr_min:g}, warm-up {training.warmup:g}, "
        f"weight decay {training.weight_decay:g}, gradient norm {training.clip:g}",
        "time": f"{record['seconds']:,} s on {record['processes']} process{'es' if record['processes'] > 1 else ''}",
    }
    lines = [f"# {student.name}, {what}", "", f"Made by lapcli. {student.loading or AS_BEFORE}", ""]
    lines += ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items()), ""]
    before, after = record["before"], record["after"]
    if before is not None and after is not None:
        lines += [f"{training.validation} held-out sequences of the training text, means per token:", ""]
        lines += ["| | loss | cross entropy | KL |", "| --- | ---: | ---: | ---: |"]
        lines += [
            f"| {name} | {found['loss']:.4f} | {found['cross_entropy']:.4f} | {found['kl']:.4f} |"
            for name, found in (("before", before), ("after", after))
        ]
        lines.append("")
    if record["stopped"]:
        lines += [f"Training stopped early: {record['stopped']}. These are the last good parameters.", ""]
    lines.append(f"`{LINEAGE_FILE}` holds settings and digests. The base's licence holds.")
    return "\n".join(lines) + "\n"


def _pruning(student: ModelSource) -> str:
    lineage = sliced_lineage(student.path)
    if lineage is None:
        return "none by lapcli"
    if lineage.settings.get("stage") != "slicing":
        return f"see the card of `{lineage.model.get('name')}`, which it was recovered from"
    return f"{lineage.settings.get('method')}, kept key width {lineage.settings.get('kept_width')}"
