"""The Transformer's card, written from the training log; data and limits are those of `demo:gdn`."""

from pathlib import Path
from typing import Any

from demo_gdn.card import data_and_limits

_TEMPLATE = """\
---
license: cc-by-sa-4.0
language: en
library_name: transformers
tags: [llama, demo]
---

# demo:transformer

A small Transformer of Llama's architecture ({parameters:.1f} M parameters) that ships with lapcli: the teacher for `lapcli
convert --to dsla`, trained on the text and with the tokenizer of `demo:gdn`, so that the two can be compared. It continues
English prose and answers from what it just read; it is not meant to be useful beyond that.

| | |
| --- | --- |
| architecture | Llama, {layers} layers, hidden {hidden}, {heads} query heads and {key_heads} key heads of {width}, rotary embeddings, SwiGLU of {inner}, tied embeddings |
| tokenizer | that of `demo:gdn`: byte-level BPE, {vocabulary} entries |
| stored as | bf16 |
| trained on | {tokens:.0f} M tokens in {steps} steps, rows of {length}, {training_seconds:.0f} s on one {device} |
| Python whose documentation it saw | {builtin_python} |

Documents follow one another with one `<|endoftext|>` between them and rows begin anywhere; attention reaches across.

**Its window is {window} tokens**, as config and tokenizer say. Nothing longer was in training and rotary positions do not
extrapolate: beyond the window it runs, and is of no use. Measures below at more tokens show that.

## Measured as stored

| measure | value |
| --- | --- |
{measures}

Perplexities are per token, windows of {length} tokens side by side, at most 400 000 tokens; `niah_*` are the prompts of
`lapcli eval niah`, 200 for each length, `exact` the share whose digits are all the most likely ones. Greedy generation gave
the same answer in {generated} of 16 prompts of 1024 tokens.

{data_and_limits}
## Making it again

    python scripts/train_demo_gdn.py export-builtin builtin.jsonl
    python scripts/train_demo_transformer.py --data DATA --builtin builtin.jsonl --output OUT --minutes {minutes}

on one GPU. The schedule follows the clock, so weights differ from run to run; figures hardly do.
"""  # noqa: E501 -- rows of Markdown tables cannot be broken


def write_card(output: Path, log: dict[str, Any], config: Any, *, modern: tuple[str, ...]) -> None:
    """Write `README.md` from the training log."""
    text = _TEMPLATE.format(
        parameters=log["parameters"] / 1e6,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        key_heads=config.num_key_value_heads,
        width=config.hidden_size // config.num_attention_heads,
        inner=config.intermediate_size,
        vocabulary=config.vocab_size,
        tokens=log["tokens"] / 1e6,
        steps=log["steps"],
        length=log["settings"]["length"],
        window=config.max_position_embeddings,
        minutes=log["settings"]["minutes"],
        training_seconds=log["training_seconds"],
        device=log["device"],
        builtin_python=log["builtin_python"],
        measures="\n".join(f"| {name} | {value:.4g} |" for name, value in log["final"].items()) or "| none | |",
        generated="no" if log["generated_recall"] is None else round(16 * log["generated_recall"]),
        data_and_limits=data_and_limits(log, modern=modern),
    )
    (output / "README.md").write_text(text, encoding="utf-8")
