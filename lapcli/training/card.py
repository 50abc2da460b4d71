"""The cards of trained models: recipe, data, budget and results."""

import math
from typing import Any

from lapcli.families.source import ModelSource
from lapcli.recipe import RecoverySettings, TrainingSettings
from lapcli.stages.lineage import LINEAGE_FILE, sliced_lineage
from lapcli.training_recipe import PretrainingSettings

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
        trained += ", and query feedback" if student.config.get("model_type") == "qdelta" else ""
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
        "optimiser": _optimiser(training),
        "time": _time(record),
    }
    lines = [f"# {student.name}, {what}", "", f"Made by lapcli. {student.loading or AS_BEFORE}", ""]
    lines += _facts(rows)
    before, after = record["before"], record["after"]
    if before is not None and after is not None:
        lines += [f"{training.validation} held-out sequences of the training text, means per token:", ""]
        lines += ["| | loss | cross entropy | KL |", "| --- | ---: | ---: | ---: |"]
        lines += [
            f"| {name} | {found['loss']:.4f} | {found['cross_entropy']:.4f} | {found['kl']:.4f} |"
            for name, found in (("before", before), ("after", after))
        ]
        lines.append("")
    lines += _contraction(record)
    if record["stopped"]:
        lines += [f"Training stopped early: {record['stopped']}. These are the last good parameters.", ""]
    lines.append(f"`{LINEAGE_FILE}` holds settings and digests. The base's licence holds.")
    return "\n".join(lines) + "\n"


def training_card(name: str, config: Any, settings: PretrainingSettings, record: dict[str, Any]) -> str:
    """The card of a model that was trained whole, in Markdown.

    Args:
        name: of the model that it was trained on from, or its type.
        config: of the model, as a config of transformers.
        settings: of the training.
        record: how training ended: `tokens`, `step`, `seconds`, `processes`, `before`, `after`, `contraction`,
            `stopped`.
    """
    training = settings.training()
    begins = f"weights drawn from seed {settings.seed} ({settings.start})"
    rows = {
        "model type": f"`{config.model_type}`, {config.num_hidden_layers} layers, hidden size {config.hidden_size}",
        "begins with": begins if settings.base is None else f"`{name}`",
        "tokenizer": f"that of `{settings.tokenizer_name}`",
        "data": f"`{settings.data}`, documents {settings.documents}, seed {settings.seed}",
        "budget": f"{record['tokens']:,} tokens that counted, in {record['step']} of {training.steps} steps of "
        f"{training.batch} x {settings.seq_len}",
        "optimiser": f"{_optimiser(training)}, betas {training.beta1:g} and {training.beta2:g}",
        "stored in": settings.stored,
        "time": _time(record),
    }
    lines = [f"# {name}, trained", "", "Made by `lapcli train`. fla's classes load it where they know its type.", ""]
    lines += _facts(rows)
    before, after = record["before"], record["after"]
    if before is not None and after is not None:
        lines += [f"{training.validation} held-out sequences of the training text:", ""]
        lines += ["| | cross entropy a token | perplexity |", "| --- | ---: | ---: |"]
        lines += [
            f"| {when} | {found['cross_entropy']:.4f} | {math.exp(min(found['cross_entropy'], 700)):.4g} |"
            for when, found in (("before", before), ("after", after))
        ]
        lines.append("")
    lines += _contraction(record)
    if record["stopped"]:
        lines += [f"Training stopped early: {record['stopped']}. These are the last good parameters.", ""]
    lines.append(f"`{LINEAGE_FILE}` holds settings and digests. What may be done with it depends on its data.")
    return "\n".join(lines) + "\n"


def _contraction(record: dict[str, Any]) -> list[str]:
    watched = record.get("contraction")
    if watched is None:
        return []
    return [
        f"beta k.x there (an error shrinks by 1 - beta k.x a token): mean {watched['mean']:.3f}, 1st to 99th "
        f"percentile {watched['p01']:.3f} to {watched['p99']:.3f}, {watched['outside']:.2%} outside (0, 2).",
        "",
    ]


def _facts(rows: dict[str, str]) -> list[str]:
    return ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items()), ""]


def _optimiser(training: TrainingSettings) -> str:
    name = {"adamw": "AdamW", "muon": "Muon and AdamW"}[training.optimizer]
    return (
        f"{name}, {training.lr:g} falling to {training.lr_min:g}, warm-up {training.warmup:.3g}, "
        f"weight decay {training.weight_decay:g}, gradient norm {training.clip:g}"
    )


def _time(record: dict[str, Any]) -> str:
    return f"{record['seconds']:,} s on {record['processes']} process{'es' if record['processes'] > 1 else ''}"


def _pruning(student: ModelSource) -> str:
    lineage = sliced_lineage(student.path)
    if lineage is None or lineage.settings.get("stage") == "training":
        return "none by lapcli"
    if (stage := lineage.settings.get("stage")) != "slicing":
        made = "converted" if stage == "conversion" else "recovered"
        return f"see the card of `{lineage.model.get('name')}`, which it was {made} from"
    return f"{lineage.settings.get('method')}, kept key width {lineage.settings.get('kept_width')}"
