"""How many channels are kept: the ratio read as the decimal that was typed, aligned to what kernels run well.

Source: the paper keeps `floor(K (1 - ratio))` (arXiv 2602.04852), which is the rule here at alignment 1.
"""

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction

from lapcli.errors import UsageError

# A ratio finer than this says nothing about any width, and its exact fraction would cost memory.
_MOST_DECIMALS = 40


@dataclass(frozen=True)
class KeptWidth:
    """The kept width, and what became of the ratio that was asked for.

    Attributes:
        width: channels kept per head, K'.
        original: channels there were, K.
        align: the multiple that `width` was rounded down to.
        asked: the removed fraction that was asked for; `None` when the width itself was.
    """

    width: int
    original: int
    align: int
    asked: Decimal | None = None

    @property
    def achieved(self) -> float:
        """The removed fraction of the key width, `1 - K'/K`."""
        return (self.original - self.width) / self.original

    def __str__(self) -> str:
        kept = f"{self.width} of {self.original} channels kept ({self.achieved:.2%} removed"
        if self.asked is None or Fraction(self.asked) * self.original == self.original - self.width:
            return f"{kept})"
        return f"{kept}; {self.asked} asked for, K' a multiple of {self.align})"


def default_align(width: int) -> int:
    """The alignment of the kept width when none is asked for: chunked kernels work in tiles, so an odd width buys
    them little.

    Args:
        width: the key width K.

    Returns:
        16 from K = 64, 8 from K = 32, else 1.
    """
    if width >= 64:
        return 16
    return 8 if width >= 32 else 1


def kept_width(width: int, ratio: Decimal | str | float, align: int | None = None) -> KeptWidth:
    """The kept width for a removed fraction: `max(a, a floor(K (1 - ratio) / a))`, in exact arithmetic.

    Args:
        width: the key width K.
        ratio: the removed fraction, as typed; a float counts as its shortest decimal, so 0.3 means three tenths.
        align: the multiple a that the kept width is rounded down to; `default_align(width)` when absent.

    Raises:
        UsageError: the ratio is no decimal or outside (0, 1), leaves no channel or removes none, or the alignment
            is below 1 or above K.
    """
    removed = _parse(ratio)
    step = _check_align(width, align)
    exact = width * (1 - Fraction(removed))
    if exact < 1:
        raise UsageError(
            f"ratio {removed} leaves no channel of {width}",
            f"a head keeps at least one: the ratio may be at most 1 - 1/{width}",
        )
    kept = max(step, step * int(exact / step))
    if kept >= width:
        raise UsageError(
            f"ratio {removed} with K' a multiple of {step} removes no channel of {width}",
            f"pass a larger ratio or a smaller --align (1 is the finest; {step} is in force)",
        )
    return KeptWidth(kept, width, step, removed)


def kept_width_from_keep(width: int, keep: int, align: int | None = None) -> KeptWidth:
    """The kept width when it is named itself. It is taken as it is; an alignment that it breaks is refused.

    Args:
        width: the key width K.
        keep: the kept width K'.
        align: the multiple that `keep` must be; no demand when absent.

    Raises:
        UsageError: `keep` is not in 1..K-1, or no multiple of `align`, or the alignment is below 1 or above K.
    """
    step = 1 if align is None else _check_align(width, align)
    if not 1 <= keep < width:
        raise UsageError(f"keep {keep} of {width} channels", f"the kept width lies in 1..{width - 1}")
    if keep % step:
        raise UsageError(
            f"keep {keep} is no multiple of the alignment {step}",
            f"pass --keep {max(step, keep // step * step)}, or drop --align",
        )
    return KeptWidth(keep, width, step)


def _parse(ratio: Decimal | str | float) -> Decimal:
    text = str(ratio).strip()
    if len(text) > 2 * _MOST_DECIMALS:
        raise UsageError(f"ratio {text[:_MOST_DECIMALS]}… has more than {_MOST_DECIMALS} decimals")
    try:
        value = Decimal(text)
    except InvalidOperation:
        raise UsageError(f"ratio {text!r} is no decimal number", _meant(text)) from None
    if not value.is_finite() or not 0 < value < 1:
        raise UsageError(f"ratio {text} is outside (0, 1)", _meant(text))
    exponent = value.as_tuple().exponent
    if not isinstance(exponent, int) or -exponent > _MOST_DECIMALS:
        raise UsageError(f"ratio {text} has more than {_MOST_DECIMALS} decimals")
    return value


def _meant(text: str) -> str:
    """The hint for a ratio that cannot be used, with the likely value where one can be guessed."""
    contract = "it is the removed fraction of the key width"
    example = f"{contract}, such as 0.5"
    try:
        value = Decimal(text.removesuffix("%").replace(",", "."))
    except InvalidOperation:
        return example
    if not value.is_finite():
        return example
    if text.endswith("%") or value > 1:
        value /= 100
    return f"did you mean {value.normalize():f}? {contract}" if 0 < value < 1 else example


def _check_align(width: int, align: int | None) -> int:
    if width < 1:
        raise UsageError(f"key width {width} is below 1")
    if align is None:
        return default_align(width)
    if not 1 <= align <= width:
        raise UsageError(f"--align {align} is outside 1..{width}, the key width", "pass a smaller --align")
    return align
