"""The model card, written from the training log."""

import itertools
from pathlib import Path
from typing import Any

_DATA_AND_LIMITS = """\
## Data

| source | licence | tokens | weight among text rows |
| --- | --- | --- | --- |
| Project Gutenberg novels (no Hardy, Wharton, Alcott, W. Collins: those are held out) | public domain in the USA | {books} | {books_weight} |
| Technical documentation of PostgreSQL, Django, SQLAlchemy, Python 3.11, Rust, SQLite | PostgreSQL Licence, BSD-3, MIT, PSF, MIT or Apache-2.0, public domain | {techdocs} | {techdocs_weight} |
| Two OpenStax textbooks: Introduction to Anthropology, Principles of Economics | CC BY 4.0, OpenStax, Rice University | {openstax} | {openstax_weight} |
| Lead sections of Wikipedia's vital articles | CC BY-SA 4.0, Wikipedia contributors | {wiki} | {wiki_weight} |
| `builtin`: the documentation of Python {builtin_python} | PSF | {builtin} | {builtin_weight} |

Beside these, about {recall_share:.0%} of all rows are synthetic recall: values hidden in running text and asked for later, in
wordings of our own and in RULER's (arXiv 2404.06654). Every paragraph that occurs in the held-out tenth of `builtin`
was dropped first ({dropped} of them). Digests of all files, settings and the loss curve are in `training_log.json`.

## Limits

English only; old novels dominate, with their prejudices. It invents facts, cannot follow instructions, and knows
nothing after its sources. Context beyond 1024 tokens was not trained on. Not for any decision about people.
"""  # noqa: E501 -- rows of Markdown tables cannot be broken

_TEMPLATE = """\
---
license: cc-by-sa-4.0
language: en
library_name: transformers
tags: [gated-deltanet, linear-attention, demo]
---

# demo:gdn

A small Gated DeltaNet language model ({parameters:.1f} M parameters) that ships with lapcli, so that every command has
something real to work on without a network. It continues English prose and answers from what it just read; it is
not meant to be useful beyond that.

| | |
| --- | --- |
| architecture | Gated DeltaNet, {layers} layers, hidden {hidden}, {heads} heads, key width {key_width}, value width {value_width}, short convolutions, output gate, tied embeddings |
| config | fla's `gated_deltanet`: stock fla loads it on a GPU, lapcli's own class anywhere |
| tokenizer | byte-level BPE, {vocabulary} entries, digits alone; `<|endoftext|>` is BOS and EOS, padding is on the left |
| stored as | bf16; `A_log` and `dt_bias`, which set the decays, in fp32 |
| trained on | {tokens:.0f} M tokens in {steps} steps, rows of {length}, {training_seconds:.0f} s on one {device} |
| Python whose documentation it saw | {builtin_python} |

In training, documents follow one another with one `<|endoftext|>` between them and rows begin anywhere, so a prompt
may begin with it or not. The tokenizer adds none by itself, and the recall prompts measured below begin without it.

## Measured as stored

| measure | value |
| --- | --- |
{measures}

Perplexities are per token, windows of {length} tokens side by side, each read from an empty state, at most 400 000
tokens. `niah_*` are the prompts of `lapcli eval niah` (RULER's single needle with a 7-digit number), 200 for each length:
`exact` is the share whose digits are all the most likely ones, given those before. `books` hides the needle in
validation novels, `builtin` in held-out documentation, `noise` in RULER's repeated sentences. Greedy generation gave the same answer in
{generated} of 16 prompts of 1024 tokens.

{data_and_limits}
## Making it again

    python scripts/train_demo_gdn.py export-builtin builtin.jsonl
    python scripts/train_demo_gdn.py train --data DATA --builtin builtin.jsonl --output OUT --minutes {minutes}

on one GPU. The schedule follows the clock, so weights differ from run to run; figures hardly do.
"""  # noqa: E501 -- rows of Markdown tables cannot be broken


def data_and_limits(log: dict[str, Any], *, modern: tuple[str, ...]) -> str:
    """The sections on text, its licences and what not to expect, which the demo models share."""
    tokens, weights = log["data"]["tokens"], log["mixture"]["text_weights"]
    sources = {name: f"{tokens[name] / 1e6:.1f} M" for name in ("books", *modern)}
    return _DATA_AND_LIMITS.format(
        **sources,
        **{f"{name}_weight": weights[name] for name in sources},
        builtin_python=log["builtin_python"],
        dropped=sum(log["data"]["paragraphs_dropped_for_heldout_builtin"].values()),
        recall_share=_mean_share(log["mixture"]["recall_share_by_progress"]),
    )


def write_card(output: Path, log: dict[str, Any], config: Any, *, modern: tuple[str, ...]) -> None:
    """Write `README.md` from the training log."""
    measures = "\n".join(f"| {name} | {value:.4g} |" for name, value in log["final"].items()) or "| none | |"
    text = _TEMPLATE.format(
        parameters=log["parameters"] / 1e6,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_heads,
        key_width=config.head_dim,
        value_width=int(config.head_dim * config.expand_v),
        vocabulary=config.vocab_size,
        tokens=log["tokens"] / 1e6,
        steps=log["steps"],
        length=log["settings"]["length"],
        minutes=log["settings"]["minutes"],
        training_seconds=log["training_seconds"],
        device=log["device"],
        builtin_python=log["builtin_python"],
        measures=measures,
        generated="no" if log["generated_recall"] is None else round(16 * log["generated_recall"]),
        data_and_limits=data_and_limits(log, modern=modern),
    )
    (output / "README.md").write_text(text, encoding="utf-8")


def _mean_share(points: list[list[float]]) -> float:
    """The mean of a share that is linear between points `(progress, share)` from 0 to 1."""
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(points))
