"""How many tokens of a prompt a second each kind takes: `lapcli bench prefill`, of models with random weights."""

import json
from pathlib import Path
from typing import Any

from studies.commands import Commands
from studies.lines import machine

from query_feedback.lines import LINES, THROUGHPUT, key_of


class Throughput(Commands):
    """Prompts of every kind at every length, on one device that should have nothing else to do."""

    def run(self) -> bool:
        """Everything that is not there yet; whether all of it is there now."""
        options = self.options
        where = machine()
        there = {key_of(each) for each in LINES.there(options.output, options.known, THROUGHPUT)}
        missing: dict[str, tuple[int, ...]] = {}
        for name in options.variants:
            wanted = {"kind": THROUGHPUT, "variant": name, "batch": options.batch, "dtype": options.dtype}
            lengths = [
                length for length in options.prompts
                if key_of({**wanted, "length": length, "machine": where}) not in there
            ]  # fmt: skip
            if lengths:
                missing[name] = tuple(lengths)
        self.say(f"{len(options.variants) * len(options.prompts)} wanted, {sum(map(len, missing.values()))} to do")
        if not missing:
            return True
        groups: dict[tuple[int, ...], list[str]] = {}
        for name, lengths in missing.items():
            groups.setdefault(lengths, []).append(name)
        # One after the other, however many workers there are: they would measure one another.
        options.workers = 1
        return self.each(list(groups.items()), lambda _number, group: self._group(*group, where))

    def _group(self, lengths: tuple[int, ...], names: list[str], where: str) -> bool:
        """Measure kinds at lengths, in one process; whether all were."""
        options = self.options
        folder = self.work / "throughput"
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            (folder / f"{name}.json").write_text(json.dumps(config_of(name, max(lengths)), indent=1) + "\n")
        output = folder / f"{'-'.join(map(str, lengths))}.json"
        output.unlink(missing_ok=True)
        command = [
            "bench", "prefill", "--config", ",".join(str(folder / f"{name}.json") for name in names), "--ratio", "0",
            "--batch", str(options.batch), "--tokens", ",".join(map(str, lengths)), "--ways", "lapcli", "--dtype",
            options.dtype, "--trials", str(options.trials), "--output", str(output),
            *(["--first-config"] if options.first_config else []),
        ]  # fmt: skip
        try:
            self.lapcli(0, *command)
        except RuntimeError as error:
            self.say(str(error))
        # What was measured before an end is measured.
        rows = json.loads(output.read_text())["rows"] if output.is_file() else []
        measured = [row for row in rows if row["status"] == "measured"]
        for row in measured:
            self.add(
                {"kind": THROUGHPUT, "variant": row["model"], "length": row["tokens"], "batch": row["batch"],
                 "dtype": options.dtype, "machine": where, "command": f"lapcli {' '.join(command)}", **_figures(row)}
            )  # fmt: skip
        for row in rows:
            if row["status"] != "measured":
                self.say(f"{row['model']}, {row['tokens']} tokens: {row['status']}: {row['detail']}")
        return len(measured) == len(names) * len(lengths)


def _figures(row: dict[str, Any]) -> dict[str, Any]:
    """Of a row of `lapcli bench`; `trials` are the median seconds of each."""
    names = ("seconds", "trials", "repeats", "detail", "error_share", "peak_bytes", "tokens_per_second")
    return {name: row[name] for name in names}


def config_of(variant: str, length: int) -> dict[str, Any]:
    """The config that the recipe of a kind makes, for prompts of this length."""
    from lapcli.families.loading import load_tokenizer
    from lapcli.families.source import resolve_tokenizer
    from lapcli.shipped import find_recipe
    from lapcli.training.fresh import fresh_config
    from lapcli.training_recipe import read_training_recipe

    recipe = read_training_recipe(find_recipe(Path(f"train/small-{variant}")))
    asked = {**(recipe.model or {}), "max_position_embeddings": length}
    tokenizer = load_tokenizer(resolve_tokenizer(recipe.tokenizer_name, asked))
    document = json.loads(fresh_config(asked, tokenizer, recipe.seq_len).to_json_string(use_diff=False))
    return {name: value for name, value in document.items() if name not in ("dtype", "transformers_version")}
