"""How a converted model is served: as one of its configurations, or as whichever a request is best given."""

import math
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

from lapcli.artifacts import artifact_digest, digest_document
from lapcli.errors import ArtifactError, UsageError
from lapcli.families.source import resolve_model
from lapcli.linearising.command import convert_command
from lapcli.linearising.plan import Place, Shape, holds_conversion
from lapcli.linearising.record import stored
from lapcli.linearising.settings import layers_of, share_of_layers
from lapcli.serving.adaptive import PAPER_CAPS, Adaptive, Cap, most_within
from lapcli.serving.policy import Configuration, OneConfiguration, Policy

NEVER, STATIC, ADAPTIVE = "never", "static", "adaptive"
DEFAULT_INCREASE = 0.1
"""Of perplexity, as a share, that adapting may cost where nobody says."""

_LEVELS = 8
"""As fine as the paper's caps."""
_ABSURD = 500.0
"""Nats above the teacher's cross entropy whose perplexity is not worth a number."""


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
        windowed: whether the converted layers attend to a window.
    """

    root: Path
    configurations: tuple[Configuration, ...]
    windowed: bool = False

    @property
    def layers(self) -> int:
        """Of the model."""
        return self.configurations[0].layers

    @property
    def place(self) -> Place:
        """What lies where in it."""
        return Place(self.root)

    @property
    def digest(self) -> str:
        """Names the teacher, the converted layers, and how good their prefixes were found to be."""
        layers = [artifact_digest(artifact) for artifact in stored(self.place)]
        # What overflows has no number in JSON.
        increases = [str(each.increase) for each in self.configurations]
        return digest_document([resolve_model(str(self.place.base)).digest, layers, increases])


def read_conversion(root: Path) -> Conversion:
    """Read what was measured of each prefix, from the layers' artifacts.

    Raises:
        ArtifactError: one is damaged, or does not say how good it is.
        ModelError: the teacher is not there.
    """
    place = Place(root)
    layers = Shape.of(resolve_model(str(place.base)).config).layers
    found, windowed = [Configuration(f"0-of-{layers}", 0, layers)], False
    for number, artifact in enumerate(stored(place), 1):
        record = artifact.lineage.record
        windowed = windowed or (artifact.lineage.settings.get("dual_state") or {}).get("window") is not None
        for name in ("cross_entropy", "teacher_cross_entropy"):
            if type(record.get(name)) not in (int, float) or math.isnan(record[name]):
                said = f"its {name} is {record[name]!r}" if name in record else f"it has no {name}"
                raise ArtifactError(
                    f"{artifact.path} does not say how good the converted model is: {said}, and a number is wanted",
                    f"convert anew: lapcli convert MODEL --to dsla --output {root} --overwrite",
                )
        worse = record["cross_entropy"] - record["teacher_cross_entropy"]
        # Rounded, so that 11 after 10 is 10 %, as it is typed. What overflows is no limit's.
        increase = round(math.expm1(worse), 9) if worse < _ABSURD else math.inf
        found.append(Configuration(f"{number}-of-{layers}", number, layers, increase=increase))
    return Conversion(root, tuple(found), windowed)


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
            plain = _plain(fraction, "--modes static:")
            found.append(Mode(f"{STATIC}:{plain}", plain))
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
                f"convert more: {convert_command(where, mode.fraction)}; or pass a fraction of at most "
                f"{done / layers:.4g}",
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
            convert_command(where, "0.5"),
        )
    limit = DEFAULT_INCREASE if most_increase is None else most_increase
    allowed = Adaptive(caps, limit).within(configurations)
    policy = Adaptive(caps, limit, [each for each in configurations if each not in allowed])
    allowed = _levels(allowed, caps)
    if len(allowed) < 2:
        given = "--max-ppl-increase is" if most_increase is not None else "the limit, without --max-ppl-increase, is"
        best = min(configurations[1:], key=lambda each: each.increase)
        raise UsageError(
            f"no converted model in {where} is good enough to adapt with: {best.name}, the best, has a perplexity "
            f"{best.increase:.1%} above the unconverted model's, and {given} {policy.most_increase:.1%}",
            f"pass --max-ppl-increase {math.ceil(best.increase * 100)}% or more; or convert with more steps (lapcli "
            f"convert --steps); lapcli serve {where} --fraction 0 serves the model unconverted",
        )
    return policy, allowed


def _levels(configurations: Sequence[Configuration], caps: Sequence[Cap]) -> list[Configuration]:
    """Of many configurations those that are worth having at once: of each eighth of the layers, and of each cap.

    Every mixture of configurations is a graph of its own on a GPU. The last one is kept in any case.
    """
    shares = {number / _LEVELS for number in range(_LEVELS + 1)} | {cap.share for cap in caps}
    kept = {most_within(configurations, share) for share in shares} | {configurations[-1]}
    return sorted(kept, key=lambda each: each.converted)


def _advice(configurations: Sequence[Configuration], most_increase: float) -> str:
    good = [each for each in configurations if each.increase <= most_increase]
    best = max(good, key=lambda each: each.converted)
    return f"pass --fraction {best.share:.4g} at most, or a larger --max-ppl-increase"


def _plain(text: str, option: str) -> str:
    """A fraction as a decimal without what does not count: `0.3` for `30%` and `0.30`."""
    return f"{share_of_layers(text, option).normalize():f}"


def _number(fraction: str, layers: int) -> int:
    """How many layers a fraction is: as `lapcli convert` counts, but that 0 is none."""
    return 0 if share_of_layers(fraction, "--fraction") == 0 else layers_of(fraction, layers)


class Wish(NamedTuple):
    """How a conversion is to be served, as it was typed.

    Attributes:
        adapt: whether each request gets the configuration that suits it; `None`: unless there is a fraction.
        fraction: of the layers that are converted for every request; 0 for none.
        max_ppl_increase: see `parse_share`.
        caps: see `parse_caps`.
        offload: whether what most requests do without lies in the host's memory.
    """

    adapt: bool | None = None
    fraction: str | None = None
    max_ppl_increase: str | None = None
    caps: str | None = None
    offload: bool = False

    @property
    def mode(self) -> Mode:
        """The mode that it comes to.

        Raises:
            UsageError: its parts contradict each other.
        """
        if self.adapt and self.fraction is not None:
            raise UsageError(
                f"--adapt and --fraction {self.fraction}: either each request gets what suits it, or all the same",
                "pass one of them",
            )
        if self.fraction is None and self.adapt is not False:
            return Mode(ADAPTIVE, None)
        for option, value in (("--caps", self.caps), ("--offload", self.offload or None)):
            if value is not None:
                raise UsageError(f"{option} is for --adapt: here every request runs as the same", f"drop {option}")
        fraction = _plain(self.fraction or "0", "--fraction")
        return Mode(NEVER, "0") if fraction == "0" else Mode(f"{STATIC}:{fraction}", fraction)

    @property
    def limit(self) -> float | None:
        """The share of perplexity that converted layers may cost; `None` where nobody said.

        Raises:
            UsageError: it is none.
        """
        return None if self.max_ppl_increase is None else parse_share(self.max_ppl_increase, "--max-ppl-increase")

    def refuse(self, model: str) -> None:
        """Refuse it for what is no conversion.

        Raises:
            UsageError: it asks for something that only a conversion has.
        """
        given = {
            "--adapt": self.adapt or None,
            "--fraction": self.fraction,
            "--max-ppl-increase": self.max_ppl_increase,
            "--caps": self.caps,
            "--offload": self.offload or None,
        }
        option = next((name for name, value in given.items() if value is not None), None)
        if option is None:
            return
        above = Path(model).parent.parent
        hint = f"make one: lapcli convert {model} --to dsla --fraction 0.5 --output DIR; then lapcli serve DIR"
        raise UsageError(
            f"{option}: {model} is one model, and what is chosen from is the directory of a conversion",
            f"name that: lapcli serve {above} {option}" if holds_conversion(above) else hint,
        )


class Served(NamedTuple):
    """A conversion that is to be served.

    Attributes:
        conversion: it.
        policy: chooses.
        configurations: that it may choose.
        settings: of the engine, by their names in `EngineSettings`.
    """

    conversion: Conversion
    policy: Policy
    configurations: list[Configuration]
    settings: dict[str, Any]


def find_conversion(model: str | None, wish: Wish) -> Served | None:
    """What a named conversion is to be served as; `None` where the name is not one's.

    Raises:
        ArtifactError: it is damaged.
        UsageError: the wish contradicts itself, or cannot be met.
    """
    mode = wish.mode
    if model is None or not holds_conversion(Path(model)):
        wish.refuse(model or "the model")
        return None
    conversion = read_conversion(Path(model))
    if conversion.windowed and mode.name != NEVER:
        last = conversion.configurations[-1]
        made = conversion.place.model(last.converted, last.layers)
        raise UsageError(
            f"the layers of {model} attend to a window with sinks, a control: there is no mixing them with attention",
            f"serve one configuration by itself: lapcli convert --export {last.share:.4g} --output {model}; then "
            f"lapcli serve {made}; or the unconverted model: lapcli serve {model} --fraction 0",
        )
    policy, chosen = policy_of(
        mode,
        conversion.configurations,
        caps=PAPER_CAPS if wish.caps is None else parse_caps(wish.caps),
        most_increase=wish.limit,
        where=model,
    )
    settings = {
        "conversion": str(Path(model).resolve()),
        "configurations": [each.converted for each in chosen],
        "offload": wish.offload,
    }
    return Served(conversion, policy, chosen, settings)
