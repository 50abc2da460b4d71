"""`lapcli generate`: continue text with a model, as fast as this machine decodes it."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lapcli.cli import options
from lapcli.errors import UsageError

if TYPE_CHECKING:
    from lapcli.families.source import ModelSource
    from lapcli.reporting import Reporter
    from lapcli.runtime import Engine, GenerationSettings
    from lapcli.runtime.generation import Generated

_SAMPLING = "What the numbers depend on"
_MACHINE = "This machine"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("generate", help="Continue text with a model, streamed, by fused steps and CUDA graphs on a GPU.")(run)


def run(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue; - reads it from stdin.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="File of prompts: one a line, or JSONL with the field prompt or text.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model. Default: the run's recovered or sliced one, else demo:gdn.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(help="Tokens of a continuation, at most.", rich_help_panel=_SAMPLING)
    ] = 128,
    temperature: Annotated[
        float, typer.Option(help="Of the draws; 0 takes the likeliest token each time.", rich_help_panel=_SAMPLING)
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(help="Draw from the likeliest tokens that have this probability.", rich_help_panel=_SAMPLING),
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option(help="Draw from so many likeliest tokens; 0: from all.", rich_help_panel=_SAMPLING)
    ] = 0,
    compat: options.Compat = None,
    seed: options.Seed = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End where this text comes, and leave it out. May be repeated.", rich_help_panel=_SAMPLING),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after an end token.", rich_help_panel=_SAMPLING)
    ] = False,
    batch_size: Annotated[
        int | None, typer.Option(help="Rows decoded together. Default: all prompts, at most 64.")
    ] = None,
    run_path: options.Run = options.DEFAULT_RUN,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    kernel: options.DecodeKernel = "auto",
    state_dtype: options.StateDtype = "float32",
    require_fast: options.RequireFast = False,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
    dry_run: options.DryRun = False,
    quiet: options.Quiet = False,
) -> None:
    """Print continuations as they come; several prompts come one after the other, each under its number."""
    from lapcli.cli import context, display
    from lapcli.families.loading import load_tokenizer
    from lapcli.families.source import with_compat
    from lapcli.machine import Machine
    from lapcli.runtime.generation import encode_prompts, end_tokens, read_prompts
    from lapcli.runtime.settings import GenerationSettings

    if (prompt is None) == (prompts is None):
        said = "give a prompt, or --prompts FILE" + ("" if prompt is None else ", not both")
        raise UsageError(said, 'for example: lapcli generate "Once upon a time"')
    settings = GenerationSettings(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop or ()),
    )
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"--batch-size {batch_size}: at least 1")
    texts = read_prompts(prompts) if prompts is not None else [_text(prompt or "")]
    source = with_compat(context.last_model(model, context.run_directory(run_path)), compat)
    machine = Machine(
        device, dtype, context.prompt_kernel(kernel), require_fast=require_fast, trust_remote_code=trust_remote_code
    )
    states = context.state_dtype(state_dtype)
    where, precision = machine.torch_device(), machine.torch_dtype(source.config)
    context.refuse_steps(machine, source)
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    tokens = encode_prompts(tokenizer, texts)
    if not ignore_eos:
        from dataclasses import replace

        settings = replace(settings, eos=end_tokens(source.config, source.path, tokenizer))
    # The last token is never taken in.
    length = max(len(ids) for ids in tokens) + max_new_tokens - 1
    rows = min(len(texts), batch_size or 64)
    room: dict[str, Any] = {"max_rows": rows, "max_length": length, "state_dtype": states}
    reporter = display.DisplayReporter(quiet)
    _warn_of_length(source, length, reporter)
    if dry_run:
        display.would_do(_dry(source, where, precision, tokens, rows, settings), as_json)
        return

    from lapcli.runtime import Engine

    engine = Engine.load(source, where, precision, kernel, trust_remote_code=trust_remote_code, **room)
    engine.warm_up([rows], settings)
    if require_fast:
        engine.path.refuse_slow()
    reporter.notice(str(engine.path))
    _generate(engine, tokenizer, texts, tokens, settings, source=source, as_json=as_json, quiet=quiet)


def _generate(
    engine: "Engine",
    tokenizer: Any,
    texts: list[str],
    tokens: list[list[int]],
    settings: "GenerationSettings",
    *,
    source: "ModelSource",
    as_json: bool,
    quiet: bool,
) -> None:
    from lapcli.cli import display
    from lapcli.runtime.generation import generate_texts

    writer = _Writer(len(texts))
    show = (lambda row, text: None) if as_json else writer.show
    try:
        done = generate_texts(engine, tokenizer, texts, tokens, settings, show)
        if as_json:
            head = {"model": source.name, "path": str(engine.path), "bytes": engine.nbytes()}
            display.emit({**head, **done.document()})
        else:
            writer.finish()
    except BrokenPipeError:
        # Whoever read has enough; what Python still holds back at its end must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    _close(done, quiet=quiet)


class _Writer:
    """Writes rows to stdout: one as it comes, of several each once it is its turn.

    Args:
        rows: how many.
    """

    def __init__(self, rows: int):
        self.held = [""] * rows
        self.turn = -1

    def show(self, row: int, text: str) -> None:
        """Take new text of a row."""
        if self.turn < 0:
            self._next()
        if row == self.turn:
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            self.held[row] += text

    def _next(self) -> None:
        """Begin the next row: its number, where there are several, and what waited."""
        self.turn += 1
        head = f"==> {self.turn + 1} <==\n" if len(self.held) > 1 else ""
        sys.stdout.write(head + self.held[self.turn])

    def finish(self) -> None:
        """Write what waited, and end the last line."""
        while self.turn + 1 < len(self.held):
            if self.turn >= 0:
                sys.stdout.write("\n")
            self._next()
        sys.stdout.write("\n")
        sys.stdout.flush()


def _text(prompt: str) -> str:
    """The prompt, or what stdin holds.

    Raises:
        UsageError: it is not UTF-8.
    """
    try:
        if prompt != "-":
            prompt.encode()
            return prompt
        raw = getattr(sys.stdin, "buffer", None)
        return sys.stdin.read() if raw is None else raw.read().decode("utf-8")
    except UnicodeError as error:
        raise UsageError("the prompt is not UTF-8", "convert it first, for example with iconv -t UTF-8") from error


def _warn_of_length(source: "ModelSource", length: int, reporter: "Reporter") -> None:
    from lapcli.families.packed import longest_sequence

    made_for = longest_sequence(source.config)
    if made_for is not None and made_for < length:
        reporter.warn(f"rows of up to {length} tokens; {source.name} was made for {made_for}")


def _dry(
    source: "ModelSource", device: Any, dtype: Any, tokens: list[list[int]], rows: int, settings: "GenerationSettings"
) -> dict[str, Any]:
    from lapcli.families.loading import skeleton
    from lapcli.runtime.plans import why_no_plan

    why = why_no_plan(skeleton(source))
    return {
        "model": source.name,
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "prompts": len(tokens),
        "prompt_tokens": sum(len(ids) for ids in tokens),
        "new_tokens_at_most": len(tokens) * settings.max_new_tokens,
        "rows_together": rows,
        "steps": "fused" if why is None else f"the library's forward pass, row by row ({why})",
        "writes": "nothing but stdout",
    }


def _close(done: "Generated", *, quiet: bool) -> None:
    """Say what came, and how fast."""
    from lapcli.cli import display

    rate = "" if done.tokens_per_second is None else f", {done.tokens_per_second:.1f} tokens/s after the first"
    reasons = [each.reason for each in done.continuations]
    ended = ", ".join(f"{reasons.count(reason)} x {reason}" for reason in dict.fromkeys(reasons))
    count = "1 token" if done.tokens == 1 else f"{done.tokens} tokens"
    display.closing(
        f"{count} in {done.seconds:.2f} s, the first after {done.first_seconds:.2f} s{rate}; "
        f"ended by: {ended if len(reasons) > 1 else reasons[0]}",
        quiet=quiet,
    )
