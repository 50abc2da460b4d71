"""What `lapcli generate` does, without a command line: prompts in, text out as it comes, and what it took."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lapcli.errors import DataError, UsageError
from lapcli.runtime.batch import Batch
from lapcli.runtime.engine import Engine
from lapcli.runtime.settings import GenerationSettings


@dataclass
class Continuation:
    """A prompt and what came after it.

    Attributes:
        prompt: the text.
        prompt_tokens: its tokens.
        tokens: the tokens that came, an end token included.
        text: their text, without stop texts.
        reason: why it ended.
    """

    prompt: str
    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: str | None = None


@dataclass
class Generated:
    """All continuations, and what they took.

    Attributes:
        continuations: in the order of the prompts.
        first_seconds: until the first token was there, the first prompts' forward passes included.
        seconds: in all.
    """

    continuations: list[Continuation]
    first_seconds: float
    seconds: float

    @property
    def tokens(self) -> int:
        """Tokens that came."""
        return sum(len(each.tokens) for each in self.continuations)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens after the first, over the time after it; `None` where there are none."""
        rest, seconds = self.tokens - 1, self.seconds - self.first_seconds
        return rest / seconds if rest > 0 and seconds > 0 else None

    def document(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {
            "continuations": [asdict(each) for each in self.continuations],
            "tokens": self.tokens,
            "first_seconds": self.first_seconds,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
        }


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file: one a line, or of JSONL the field `prompt` or `text`. Empty lines are passed over.

    Raises:
        DataError: the file cannot be read, is not UTF-8, has a line without the field, or holds no prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {error.start})", "save it as UTF-8") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", "name a text or JSONL file of prompts") from error
    jsonl = path.suffix in (".jsonl", ".ndjson")
    prompts = [_field(path, number, line) if jsonl else line for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise DataError(f"{path} holds no prompt", "write one a line")
    return prompts


def _field(path: Path, number: int, line: str) -> str:
    try:
        document = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"line {number} of {path} is no JSON ({error.msg})", "one JSON object a line") from error
    for name in ("prompt", "text"):
        if isinstance(document, dict) and isinstance(document.get(name), str):
            return document[name]
    raise DataError(f"line {number} of {path} has no text under prompt or text", 'write {"prompt": "..."} a line')


def encode_prompts(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """The tokens of prompts, as the tokenizer begins a text; an empty prompt is its BOS token, or EOS.

    Raises:
        UsageError: a prompt is empty, and the tokenizer has neither.
    """
    found: list[list[int]] = [list(tokenizer(prompt, verbose=False)["input_ids"]) for prompt in prompts]
    start: int | None = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if start is None and not all(found):
        raise UsageError("an empty prompt, and a tokenizer with neither a BOS nor an EOS token", "begin with a word")
    return [tokens if start is None else tokens or [start] for tokens in found]


def end_tokens(config: dict[str, Any], folder: Path, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a text: those of `generation_config.json`, else of the config, and the tokenizer's own."""
    try:
        generation = json.loads((folder / "generation_config.json").read_text())
    except (OSError, ValueError):
        generation = {}
    text = config.get("text_config") or {}
    listed = next(
        (part["eos_token_id"] for part in (generation, text, config) if part.get("eos_token_id") is not None), []
    )
    found = set(listed if isinstance(listed, list) else [listed])
    return frozenset(found | ({tokenizer.eos_token_id} - {None}))


def generate_texts(
    engine: Engine,
    tokenizer: Any,
    prompts: Sequence[str],
    tokens: Sequence[Sequence[int]],
    settings: GenerationSettings,
    show: Callable[[int, str], None] = lambda row, text: None,
) -> Generated:
    """Continue prompts; row n draws with the seed `settings.seed + n`.

    Args:
        engine: the model.
        tokenizer: its.
        prompts: texts.
        tokens: of each.
        settings: of all.
        show: told each row's new text as it comes.

    Raises:
        ModelError: a prompt does not fit.
    """
    batch = Batch(engine, tokenizer)
    found: list[Continuation] = []
    for number, (prompt, ids) in enumerate(zip(prompts, tokens, strict=True)):
        batch.add(ids, replace(settings, seed=settings.seed + number))
        found.append(Continuation(prompt, len(ids)))
    start, first = time.perf_counter(), None
    try:
        while batch.unfinished:
            events = batch.advance()
            first = time.perf_counter() if first is None and events else first
            for event in events:
                row = found[event.row]
                row.tokens += event.tokens
                row.text += event.text
                row.reason = event.reason
                if event.text:
                    show(event.row, event.text)
    finally:
        batch.close()
    end = time.perf_counter()
    return Generated(found, (first or end) - start, end - start)
