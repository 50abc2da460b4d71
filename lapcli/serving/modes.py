"""How a converted model is served: as one of its configurations, or as whichever a request is best given."""

import json
import math
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

from lapcli.errors import ArtifactError, UsageError
from lapcli.linearising.plan import SUMMARY_FILE, Place
from lapcli.serving.adaptive import PAPER_CAPS, Adaptive, Cap
from lapcli.serving.policy import Configuration, OneConfiguration, Policy

NEVER, STATIC, ADAPTIVE = "never", "static", "adaptive"
DEFAULT_INCREASE = 0.1
"""Of perplexity, as a share, that adapting may cost where nobody says."""


class Mode(NamedTuple):
    """A way to serve.

    Attributes:
        name: as it is typed: `never`, `static:0.5`, `adaptive`.
        fraction: of the layers that are converted for every request; `None` where that is decided for each.
    """

    name: str
    fraction: str | None

    @property
    def options(self) -> list[str]:
        """What `lapcli serve` is told."""
        return ["--adapt"] if self.fraction is None else ["--fraction", self.fraction]


class Conversion(NamedTuple):
    """What `lapcli convert --to dsla` left, as far as serving it is concerned.

    Attributes:
        root: the directory.
        configurations: by how much they convert, the unconverted model first; of their bytes nothing is known here.
    """

    root: Path
    configurations: tuple[Configuration, ...]

    @property
    def layers(self) -> int:
        """Of the model."""
        return self.configurations[0].layers

    @property
    def place(self) -> Place:
        """What lies where in it."""
        return Place(self.root)


def is_conversion(root: Path) -> bool:
    """Whether a directory is what `lapcli convert --to dsla` leaves."""
    return (root / SUMMARY_FILE).is_file() and Place(root).base.is_dir()


def read_conversion(root: Path) -> Conversion:
    """Read what was measured of each prefix.

    Raises:
        ArtifactError: the summary cannot be read, or says nothing of quality.
    """
    file = root / SUMMARY_FILE
    try:
        document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        layers, teacher = int(document["layers"]), float(document["teacher"]["perplexity"])
        found = [Configuration(f"0-of-{layers}", 0, layers)]
        for number, prefix in enumerate(document["prefixes"], 1):
            if int(prefix["number"]) != number:
                raise ValueError(f"prefix {number} is missing")
            increase = float(prefix["perplexity"]) / teacher - 1
            found.append(Configuration(f"{number}-of-{layers}", number, layers, increase=increase))
    except (OSError, ValueError, TypeError, KeyError, ZeroDivisionError) as error:
        raise ArtifactError(
            f"{file} does not say what was converted and how well: {type(error).__name__} {error}",
            f"write it anew: lapcli convert MODEL --to dsla --output {root}",
        ) from error
    return Conversion(root, tuple(found))


def parse_modes(text: str) -> list[Mode]:
    """Modes as `never,static:0.5,adaptive`.

    Raises:
        UsageError: one is none of those, or stands there twice.
    """
    known = "never, static:FRACTION, adaptive; several with commas between"
    found: list[Mode] = []
    for word in (part.strip() for part in text.split(",")):
        kind, colon, fraction = word.partition(":")
        if word == NEVER:
            found.append(Mode(word, "0"))
        elif word == ADAPTIVE:
            found.append(Mode(word, None))
        elif kind == STATIC and colon:
            _fraction(fraction, "--modes static:")
            found.append(Mode(word, fraction))
        else:
            hint = "say how much is converted: static:0.5" if kind == STATIC else known
            raise UsageError(f"--modes: {word!r} is none of {known}", hint)
    names = [mode.name for mode in found]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--modes: {name} stands there twice", "name each once")
    return found


def parse_share(text: str, option: str) -> float:
    """A share as `10%` or `0.1`; above 1 only in percent.

    Raises:
        UsageError: it is none.
    """
    number, percent = (text.strip().removesuffix("%"), 100) if text.strip().endswith("%") else (text.strip(), 1)
    try:
        value = Decimal(number) / percent
        valid = value.is_finite() and value >= 0
    except InvalidOperation:
        value, valid = Decimal(0), False
    if not valid:
        raise UsageError(f"{option} {text}: a share of 0 or more", f"for example {option} 10%, or {option} 0.1")
    if value > 1 and percent == 1:
        raise UsageError(f"{option} {text}: more than the whole of it", f"did you mean {option} {text.strip()}%?")
    return float(value)


def parse_caps(text: str) -> tuple[Cap, ...]:
    """Caps by length as `0:12.5%,2048:25%`.

    Raises:
        UsageError: they are none.
    """
    caps: list[Cap] = []
    for part in text.split(","):
        tokens, colon, share = part.strip().partition(":")
        if not colon or not tokens.isdecimal():
            raise UsageError(f"--caps: {part.strip()!r} is no TOKENS:SHARE", "for example --caps 0:12.5%,2048:25%")
        caps.append(Cap(int(tokens), parse_share(share, "--caps")))
    return Adaptive(caps).caps


def policy_of(
    mode: Mode,
    configurations: Sequence[Configuration],
    *,
    caps: Sequence[Cap] = PAPER_CAPS,
    most_increase: float | None = None,
    where: str = "DIR",
) -> tuple[Policy, list[Configuration]]:
    """The policy of a mode.

    Args:
        mode: which.
        configurations: that there are, by how much they convert.
        caps: of the adaptive one.
        most_increase: of perplexity, as a share; `None`: none for `static`, `DEFAULT_INCREASE` for `adaptive`.
        where: the directory of the conversion, for what is said when it does not do.

    Returns:
        It, and the configurations that it may choose.

    Raises:
        UsageError: the fraction was not converted; the quality limit allows none that the mode needs.
    """
    layers = configurations[0].layers
    if mode.fraction is not None:
        number = _number(mode.fraction, layers)
        chosen = next((each for each in configurations if each.converted == number), None)
        if chosen is None:
            done = max(each.converted for each in configurations)
            raise UsageError(
                f"{mode.fraction} of {layers} layers are {number}, and {done} are converted in {where}",
                f"convert more: lapcli convert MODEL --to dsla --fraction {mode.fraction} --output {where}; or pass a "
                f"fraction of at most {done / layers:.4g}",
            )
        if number and most_increase is not None and not chosen.increase <= most_increase:
            raise UsageError(
                f"{chosen.name} has a perplexity {chosen.increase:.1%} above the unconverted model's, and "
                f"--max-ppl-increase is {most_increase:.1%}",
                _advice(configurations, most_increase),
            )
        return OneConfiguration(chosen.name, "one for all"), [chosen]
    if len(configurations) < 2:
        raise UsageError(
            f"nothing is converted in {where}, so there is nothing to adapt",
            f"lapcli convert MODEL --to dsla --fraction 0.5 --output {where}",
        )
    policy = Adaptive(caps, DEFAULT_INCREASE if most_increase is None else most_increase)
    allowed = policy.within(configurations)
    if len(allowed) < 2:
        given = "--max-ppl-increase is" if most_increase is not None else "the limit, without --max-ppl-increase, is"
        best = min(configurations[1:], key=lambda each: each.increase)
        raise UsageError(
            f"no converted model in {where} is good enough to adapt with: {best.name}, the best, has a perplexity "
            f"{best.increase:.1%} above the unconverted model's, and {given} {policy.most_increase:.1%}",
            f"pass --max-ppl-increase {math.ceil(best.increase * 100)}% or more, serve without --adapt "
            "(--fraction 0), or convert with more --steps",
        )
    return policy, allowed


def _advice(configurations: Sequence[Configuration], most_increase: float) -> str:
    good = [each for each in configurations if each.increase <= most_increase]
    best = max(good, key=lambda each: each.converted)
    return f"pass --fraction {best.share:.4g} at most, or a larger --max-ppl-increase"


def _fraction(text: str, option: str) -> Decimal:
    try:
        share = Decimal(text)
        valid = 0 <= share <= 1
    except InvalidOperation:
        share, valid = Decimal(0), False
    if not valid:
        hint = f"did you mean {share / 100}?" if share.is_finite() and 1 < share <= 100 else None
        raise UsageError(f"{option} {text}: a share of the layers, 0 to 1", hint)
    return share


def _number(fraction: str, layers: int) -> int:
    """How many layers a fraction is: as `lapcli convert` counts, but that 0 is none."""
    from lapcli.linearising.settings import layers_of

    return 0 if _fraction(fraction, "--fraction") == 0 else layers_of(fraction, layers)
