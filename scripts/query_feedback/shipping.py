"""A trained model as a folder of `lapcli/demo`: weights, tokenizer, a card that says what was measured, and its log."""

import json
import shutil
from collections.abc import Mapping, Sequence
from math import exp
from pathlib import Path
from typing import Any

from studies.documents import read_object

from query_feedback.corpora import MIXTURES, RECALL
from query_feedback.lines import LINES, RUN, TRAINING
from query_feedback.variants import TRAINED_LENGTH, VARIANTS

LIMIT = 14_000_000
"""Bytes of all files together."""
_LICENCES = {
    "gutenberg_train.jsonl.xz": ("Project Gutenberg novels (no Hardy, Wharton, Alcott, W. Collins: those are held out)",
                                 "public domain in the USA"),
    "techdocs.jsonl.xz": ("Technical documentation of PostgreSQL, Django, SQLAlchemy, Python 3.11, Rust, SQLite",
                          "PostgreSQL Licence, BSD-3, MIT, PSF, MIT or Apache-2.0, public domain"),
    "openstax_by.jsonl.xz": ("Two OpenStax textbooks: Introduction to Anthropology, Principles of Economics",
                             "CC BY 4.0, OpenStax, Rice University"),
    "wiki_leads.jsonl.xz": ("Lead sections of Wikipedia's vital articles", "CC BY-SA 4.0, Wikipedia contributors"),
}  # fmt: skip
_TEMPLATE = """\
---
license: cc-by-sa-4.0
language: en
tags: [{model_type}, linear-attention, demo]
---

# demo:{name}

A small Q-Delta language model ({kind}) that ships with lapcli: a Gated DeltaNet whose state is corrected along the
query too (arXiv 2606.08804). It continues English prose and answers from what it just read; it is not meant to be
useful beyond that.

| | |
| --- | --- |
| architecture | `{model_type}`, {layers} layers, hidden {hidden}, {heads} heads of key width {width} |
| loads in | lapcli's own class; stock libraries have none |
| tokenizer | that of `demo:gdn`, {vocabulary} entries |
| trained on | {tokens:,} tokens in {steps} steps, rows of {length}, seed {seed}: {machine} |

## Measured as stored

| measure | value |
| --- | --- |
{measures}

{limit} prompts of each length; {date}. Prompts of more than {length} tokens are beyond what was trained. `beta k.x`, which
keeps the errors of states falling while it lies between 0 and 2: mean {contraction[mean]:.3f}, {contraction[outside]:.2%} outside.

## Data

| source | licence | share of what was trained on |
| --- | --- | --- |
{sources}

Every paragraph that occurs in the held-out tenth of `builtin` was dropped first. `training_log.json` has all figures.

## Limits

English only; old novels dominate, with their prejudices. It invents facts, cannot follow instructions, and knows
nothing after its sources. Not for any decision about people.

## Making it again

    python scripts/query_feedback_study.py prepare TEXTS text.jsonl.xz
    python scripts/query_feedback_study.py run --work DIR --text text.jsonl.xz --output runs.jsonl --gpus 1 \\
        --variants {variant} --seeds {seed} --tokens {budget} --mixture {mixture} --batch-tokens {batch} \\
        --optimizer {optimizer} --lr {lr}
    python scripts/query_feedback_study.py ship runs.jsonl --work DIR --output lapcli/demo/{name} \\
        --variant {variant} --seed {seed}
"""  # noqa: E501 -- rows of Markdown tables cannot be broken


_LEFT_BEHIND = ("README.md", "lapcli.json")
"""The card and the lineage of the training, which name places of the machine that it ran on."""


def ship(files: Sequence[Path], work: Path, output: Path, variant: str, seed: int, shares: Mapping[str, float]) -> str:
    """Make the folder; one line about it.

    Args:
        files: JSON lines of the study.
        work: where `run` trained.
        output: the folder, which must not be there.
        variant: a kind that was trained.
        seed: of the training.
        shares: of the text's files among its characters.

    Raises:
        ArtifactError: a file of the training is missing or damaged.
        DataError: a file of lines is missing, or a line is damaged.
        SystemExit: the model or its measurements are not there, are not of each other, or are too large.
    """
    trained = work / f"{variant}-{seed}" / "trained"
    training = trained.parent / "training" / "training.json"
    making = f"train it first: query_feedback_study.py run --variants {variant} --seeds {seed} --work {work} ..."
    digest = read_object(training, ("record",), making)["record"].get("digest")
    lines = LINES.read(files, TRAINING)
    line = next((line for line in lines if (line.get("training") or {}).get("digest") == digest), None)
    if line is None or (line["variant"], line["seed"]) != (variant, seed):
        raise SystemExit(f"{trained} has no line in {', '.join(map(str, files))}: run and measure it first")
    if output.exists():
        raise SystemExit(f"{output} is there; remove it first")
    temporary = output.with_name(f".{output.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        for file in sorted(trained.iterdir()):
            if file.name not in _LEFT_BEHIND:
                shutil.copyfile(file, temporary / file.name)
        config = read_object(trained / "config.json")
        (temporary / "README.md").write_text(_card(output.name, config, line, shares), encoding="utf-8")
        log = {name: line[name] for name in (*RUN, "machine", "date", "versions", "rows")}
        log |= {"seconds": line["seconds"], "training": line["training"]}
        (temporary / "training_log.json").write_text(json.dumps(log, indent=1) + "\n")
        size = sum(file.stat().st_size for file in temporary.iterdir())
        if size > LIMIT:
            raise SystemExit(f"{output} would take {size:,} bytes, and {LIMIT:,} are allowed")
        temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return f"{output}: {size / 1e6:.1f} MB; next: python scripts/shipped_models.py, and commit both\n"


def _card(name: str, config: Mapping[str, Any], line: dict[str, Any], shares: Mapping[str, float]) -> str:
    """The card, in Markdown."""
    training = line["training"]
    mixed = MIXTURES[line["mixture"]]
    sources = [(*_LICENCES[file], mixed["text"] * share) for file, share in shares.items()]
    sources.append(("`builtin`: documentation of Python", "PSF", mixed["builtin"]))
    recall = sum(share for part, share in mixed.items() if part in RECALL)
    sources.append(("synthetic recall: values hidden in such text and asked for later", "ours", recall))
    measures = [f"| held-out training text, perplexity per token | {exp(training['after']['cross_entropy']):.2f} |"]
    for row in line["rows"]:
        value, error = (row["values"]["model"].get(each) for each in ("value", "stderr"))
        where = row["task"] if row["length"] is None else f"{row['task']}, {row['length']} tokens"
        spread = "" if error is None else f" ± {error:.3g}"
        measures.append(f"| {where}: {row['metric'].replace('_', ' ')} | {value:.4g}{spread} |")
    return _TEMPLATE.format(
        name=name,
        kind=VARIANTS[line["variant"]],
        variant=line["variant"],
        seed=line["seed"],
        model_type=config["model_type"],
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_heads"],
        width=config["head_dim"],
        vocabulary=config["vocab_size"],
        tokens=training["tokens"],
        budget=line["tokens"],
        mixture=line["mixture"],
        batch=line["batch"],
        optimizer=line["optimizer"],
        lr=line["lr"],
        steps=training["step"],
        length=TRAINED_LENGTH,
        machine=line["machine"],
        limit=line["limit"],
        date=line["date"],
        measures="\n".join(measures),
        contraction=training["contraction"],
        sources="\n".join(f"| {what} | {licence} | {share:.1%} |" for what, licence, share in sources),
    )
