"""The lengths that an evaluation measures at: those that are set, what models were made for, what tasks take."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from lapcli.errors import UsageError
from lapcli.evaluation.misfit import Misfit, say
from lapcli.evaluation.niah import misfits as niah_misfits
from lapcli.evaluation.ruler import misfits as ruler_misfits
from lapcli.evaluation.ruler_texts import Material
from lapcli.evaluation.settings import DEFAULT_MAX_LENGTH, DEFAULT_RULER_LENGTHS, EvaluationSettings
from lapcli.evaluation.tasks import TaskInfo
from lapcli.evaluation.tokenization import prompt_start
from lapcli.families.packed import longest_sequence
from lapcli.reporting import Reporter

if TYPE_CHECKING:
    from lapcli.families.source import ModelSource


class Asked(NamedTuple):
    """What one model has still to be measured on.

    Attributes:
        label: of the model.
        source: of the model.
        tasks: to be measured.
        else_known: whether something else that was asked for is there already.
    """

    label: str
    source: "ModelSource"
    tasks: Sequence[TaskInfo]
    else_known: bool


class Lengths(NamedTuple):
    """What a look at the lengths found.

    Attributes:
        left_out: for each model's label the needle tasks and RULER's that none of the lengths has room for.
        remarks: what there is to say, each once.
    """

    left_out: Mapping[str, frozenset[str]]
    remarks: tuple[str, ...]


def resolve_max_length(settings: EvaluationSettings, configs: Sequence[Mapping[str, Any]], reporter: Reporter) -> int:
    """Tokens of a window: as set, else 2048 or what the shortest model was made for.

    Args:
        settings: `max_length` is read.
        configs: of all models that are to be compared.
        reporter: told when a window is longer than a model was made for.
    """
    shortest = _shortest_limit(configs)
    if settings.max_length is None:
        return DEFAULT_MAX_LENGTH if shortest is None else min(DEFAULT_MAX_LENGTH, shortest)
    if shortest is not None and settings.max_length > shortest:
        reporter.notice(f"--max-length {settings.max_length} is beyond the {shortest} positions a model was made for")
    return settings.max_length


def resolve_ruler_lengths(settings: EvaluationSettings, configs: Sequence[Mapping[str, Any]]) -> EvaluationSettings:
    """The settings with the lengths of RULER's tasks: as set, else those of the default that every model takes.

    Args:
        settings: `ruler_lengths` is read.
        configs: of all models that are to be compared.
    """
    if settings.ruler_lengths is not None:
        return settings
    shortest = _shortest_limit(configs)
    if shortest is None:
        return replace(settings, ruler_lengths=DEFAULT_RULER_LENGTHS)
    lengths = tuple(length for length in DEFAULT_RULER_LENGTHS if length <= shortest)
    return replace(settings, ruler_lengths=lengths or (shortest,))


def look_at_lengths(
    asked: Sequence[Asked], settings: EvaluationSettings, material: Callable[[], Material], trust_remote_code: bool
) -> Lengths:
    """Hold the lengths of needle tasks and of RULER's against the models' and against what prompts take.

    Args:
        asked: of each model.
        settings: with the lengths of RULER's tasks.
        material: what RULER's prompts are made of; read where it is needed.
        trust_remote_code: whether code in a model's directory may run.

    Raises:
        UsageError: no length has room for anything that is asked for.
        DataError: the material cannot be read.
    """
    remarks: list[str] = []
    left_out: dict[str, frozenset[str]] = {}
    for label, source, tasks, else_known in asked:
        needles = [info.name for info in tasks if info.kind == "niah"]
        niah = tuple(dict.fromkeys(settings.niah_lengths)) if needles else ()
        names = [info.name for info in tasks if info.kind == "ruler"]
        ruler = tuple(dict.fromkeys(settings.ruler_lengths or DEFAULT_RULER_LENGTHS)) if names else ()
        limit = longest_sequence(source.config)
        for kind, lengths in (("niah", niah), ("ruler", ruler)):
            beyond = [str(length) for length in lengths if limit is not None and length > limit]
            if beyond:
                remarks.append(
                    f"{kind} at {', '.join(beyond)} is beyond the {limit} positions that {label} was made for"
                )
        if not niah and not ruler:
            continue
        from lapcli.families.loading import load_tokenizer

        tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
        found: dict[str, list[Misfit]] = {
            name: each for name in needles if (each := niah_misfits(name, settings, tokenizer))
        }
        if ruler:
            start = prompt_start(tokenizer, settings.bos)
            found |= ruler_misfits(names, material(), tokenizer, lengths=ruler, seed=settings.seed, start=start)
        said = [f"{name} {say(each)}" for name, each in found.items()]
        left_out[label] = frozenset(
            name for name, each in found.items() if len(each) == len(niah if name in needles else ruler)
        )
        if len(left_out[label]) == len(tasks) and not else_known:
            options = [option for option, set_ in (("--niah-lengths", niah), ("--ruler-lengths", ruler)) if set_]
            raise UsageError("; ".join(said), f"give longer {' and '.join(options)}")
        remarks += said
    return Lengths(left_out, tuple(dict.fromkeys(remarks)))


def _shortest_limit(configs: Sequence[Mapping[str, Any]]) -> int | None:
    return min((limit for limit in map(longest_sequence, configs) if limit is not None), default=None)
