"""Copies of task data that others have reshaped, put back into the columns of the hub's data sets.

lm-eval's definitions read the hub's columns. What a copy still says is put back exactly; what it no longer says is
named by the note of the task (`lapcli.evaluation.local_data`). Nothing here reads files: records come in as they stand
in the file, one a line, and leave as lm-eval wants them.

Layouts: those of mosaicml/llm-foundry (`scripts/eval/local_data`) for ARC, BoolQ, OpenBookQA and WinoGrande;
klosax/hellaswag_text_data for HellaSwag, as JSON lines; the official files of PIQA and SQuAD.
"""

import re
from collections.abc import Iterator
from typing import Any

_LETTERS = "ABCDEFGH"
_LAST_SENTENCE_END = re.compile(r"(?s)^(.*[.?!][\"')]*) +([^.?!]*)$")


class Misshapen(ValueError):
    """A record that is not of the layout; says what is amiss."""


def arc(record: dict[str, Any]) -> dict[str, Any]:
    """`question`, `choices.text`, `choices.label` and `answerKey` of a question with `query`, `choices` and `gold`.

    The copy has four choices everywhere: where the data set has three, a wrong one is there twice. The second is
    dropped. Letters stand for the data set's labels (some are digits there), which no prompt shows.
    """
    choices, gold = _choices(record)
    question = _without(_text(record, "query"), "Question: ", "")
    kept = list(dict.fromkeys(choices))
    if choices.count(choices[gold]) > 1:
        raise Misshapen("the right choice is there twice")
    return {"question": question, **_lettered(kept, kept.index(choices[gold]))}


def openbookqa(record: dict[str, Any]) -> dict[str, Any]:
    """`question_stem`, `choices.text`, `choices.label` and `answerKey` from `query`, `choices` and `gold`."""
    choices, gold = _choices(record)
    return {"question_stem": _text(record, "query"), **_lettered(choices, gold)}


def boolq(record: dict[str, Any]) -> dict[str, Any]:
    """`passage`, `question` and `label` from a `query` of both, without the title before the passage."""
    choices, gold = _choices(record)
    if choices != ["no", "yes"]:
        raise Misshapen(f"the choices are {choices}, not no and yes")
    passage, found, question = _text(record, "query").rpartition("\nQuestion: ")
    if not found:
        raise Misshapen("the query has no line that begins with 'Question: '")
    return {
        "passage": _without(passage, "Passage: ", ""),
        "question": _without(question, "", "?"),
        "label": gold,
    }


def hellaswag(record: dict[str, Any]) -> dict[str, Any]:
    """`activity_label`, `ctx_a`, `ctx_b`, `endings` and `label` from `query`, `choices` and `gold`.

    lm-eval capitalises `ctx_b`, the beginning of the sentence to be completed. In the copy it stands in lower case
    after the last end of a sentence; a text that ends with a whole sentence has none. lm-eval's own cleaning
    (brackets, doubled blanks) has been done in the copy and changes nothing when done again.
    """
    choices, gold = _choices(record)
    label, found, context = _text(record, "query").partition(": ")
    if not found:
        raise Misshapen("the query has no label before a colon")
    split = _LAST_SENTENCE_END.match(context)
    before, begun = split.groups() if split else ("", context)
    if not before or context.rstrip()[-1:] in ".?!\"')":
        before, begun = context, ""
    return {"activity_label": label, "ctx_a": before, "ctx_b": begun, "endings": choices, "label": str(gold)}


def winogrande(record: dict[str, Any]) -> dict[str, Any]:
    """`sentence` with `_`, `option1`, `option2` and `answer` from `context_options`, `continuation` and `gold`.

    lm-eval puts each option in the place of `_` and scores what follows. Where the options begin alike makes no
    difference to that, so that the place is taken at the first word that differs.
    """
    options, gold = _choices(record, "context_options")
    if len(options) != 2 or any("_" in option for option in options):
        raise Misshapen("context_options are not two texts without '_'")
    shared = _shared_beginning(*options)
    place = shared.rfind(" ") + 1
    first, second = (option[place:] for option in options)
    if not first or not second:
        raise Misshapen("one of the context_options is the beginning of the other")
    return {
        "sentence": f"{shared[:place]}_ {_text(record, 'continuation')}",
        "option1": first,
        "option2": second,
        "answer": str(gold + 1),
    }


def piqa(record: dict[str, Any], label: str) -> dict[str, Any]:
    """`goal`, `sol1`, `sol2` and `label` from a line of the official file and of its labels."""
    if label not in ("0", "1"):
        raise Misshapen(f"the label is {label!r}, not 0 or 1")
    return {**{name: _text(record, name) for name in ("goal", "sol1", "sol2")}, "label": int(label)}


def squad(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """`text` and `value` of each question that has an answer, from SQuAD's own file (1.1 or 2.0).

    `text` is lm-eval's `squadv2` prompt; `value` is the first annotator's answer.
    """
    try:
        for article in document["data"]:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    if not question.get("is_impossible") and question["answers"]:
                        yield {
                            "text": f"Title: {article['title']}\n\nBackground: {paragraph['context']}\n\n"
                            f"Question: {question['question']}\n\nAnswer:",
                            "value": question["answers"][0]["text"],
                        }
    except (KeyError, TypeError, AttributeError) as error:
        raise Misshapen(f"not laid out as SQuAD is ({error!r})") from error


def _shared_beginning(left: str, right: str) -> str:
    count = next((place for place, (one, other) in enumerate(zip(left, right, strict=False)) if one != other), None)
    return left[:count] if count is not None else min(left, right, key=len)


def _choices(record: dict[str, Any], field: str = "choices") -> tuple[list[str], int]:
    choices, gold = record.get(field), record.get("gold")
    if not isinstance(choices, list) or not 2 <= len(choices) <= len(_LETTERS):
        raise Misshapen(f"no list of choices in the field {field!r}")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise Misshapen(f"a choice in {field!r} is no text")
    if not isinstance(gold, int) or not 0 <= gold < len(choices):
        raise Misshapen(f"gold is {gold!r}, not the number of a choice")
    return choices, gold


def _text(record: dict[str, Any], field: str) -> str:
    text = record.get(field)
    if not isinstance(text, str):
        raise Misshapen(f"no text in the field {field!r} (there is: {', '.join(record)})")
    return text


def _without(text: str, start: str, end: str) -> str:
    if not text.startswith(start) or not text.endswith(end):
        raise Misshapen(f"{text[:40]!r} does not begin with {start!r} and end with {end!r}")
    return text[len(start) : len(text) - len(end)]


def _lettered(choices: list[str], gold: int) -> dict[str, Any]:
    labels = list(_LETTERS[: len(choices)])
    return {"choices": {"text": choices, "label": labels}, "answerKey": labels[gold]}
