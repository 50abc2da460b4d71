"""How much a model minds the conversion of each of its layers, and the order that follows.

`entropy` and `outlier` look at the teacher alone, in one pass over the text; attention is made a few rows at a time,
and no map of it is kept. `loss` and `task:NAME` replace one layer after the other, untrained, which is the costlier
truth. The layer that is minded least comes first.

Source: arXiv 2506.09316, Sec. 4.3 and App. F. Its equation 11 lacks the sign of an entropy; with it, a low entropy is
an attention to few tokens, which is what the text says is easy to replace.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lapcli.errors import ModelError
from lapcli.families.remote.lapcli_dual_state import DualStateSettings, convert_layers, decoder_of, restore_layer
from lapcli.linearising.start import fit_scale, fold_scale
from lapcli.linearising.watching import attending_by, attention_of, output_projection, watched
from lapcli.reporting import Reporter, SilentReporter

OUTLIER = 6.0
"""A number of a layer's output counts as an outlier above so many times the root mean square of its token's."""
_ROWS_AT_ONCE = 64
_NAME = "lapcli_sensitivity"


def entropies(weights: Tensor) -> Tensor:
    """`-sum A log A` in nats over the last axis, in fp32; 0 for a row of one weight."""
    return torch.special.entr(weights.float()).sum(-1)


@torch.no_grad()
def look_at_attention(
    model: Any, ids: Tensor, *, rows: str, batch: int = 1, reporter: Reporter | None = None
) -> dict[str, Tensor]:
    """Entropy and outliers of every layer, in one pass over text.

    Args:
        model: the teacher, on its device.
        ids: `[samples, T]`.
        rows: `last`: the attention of the last token of each window, in nats, as in the paper. `all`: that of every
            token but the first, each over the logarithm of the tokens it sees, so that 1 is attention to all alike.
        batch: windows of a pass.
        reporter: hears of progress.

    Returns:
        `entropy` `[layers, HQ]`, the mean over windows (and rows), and `outlier` `[layers]`, the share of the numbers
        of the layer's output above `OUTLIER` times the root mean square of their token's; fp64 on the CPU.

    Raises:
        ModelError: the model is no decoder whose attention can be looked at, or gives NaN.
    """
    count = len(decoder_of(model).layers)
    found: dict[int, Tensor] = {}
    outliers, numbers = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)

    def look(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scaling: float, **kwargs: Any
    ) -> Any:
        total = _row_entropies(query, key, scaling, rows, kwargs.get("sliding_window"))
        found[module.layer_idx] = found.get(module.layer_idx, 0.0) + total.double().cpu()
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, scaling=scaling, **kwargs)

    def count_outliers(number: int) -> Callable[..., None]:
        def after(_module: Any, _args: Any, _kwargs: Any, output: Any) -> None:
            sizes = output[0].float().abs()
            bound = OUTLIER * sizes.square().mean(-1, keepdim=True).sqrt()
            outliers[number] += (sizes > bound).sum().item()
            numbers[number] += sizes.numel()

        return after

    handles = [
        attention_of(model, number).register_forward_hook(count_outliers(number), with_kwargs=True)
        for number in range(count)
    ]
    tokens = ids.shape[0] if rows == "last" else ids.shape[0] * (ids.shape[1] - 1)
    try:
        with (
            attending_by(model, range(count), _NAME, look),
            (reporter or SilentReporter()).task("looking at attention", total=ids.numel(), unit="tokens") as task,
        ):
            for part in ids.split(batch):
                model.get_decoder()(input_ids=part.to(model.device), use_cache=False)
                task.advance(part.numel())
    finally:
        for handle in handles:
            handle.remove()
    entropy = torch.stack([found[number] for number in range(count)]) / tokens
    if not entropy.isfinite().all():
        bad = int((~entropy.isfinite().all(1)).nonzero()[0])
        raise ModelError(f"the attention of layer {bad} is NaN or infinite", "try --dtype float32")
    return {"entropy": entropy, "outlier": outliers / numbers}


def _row_entropies(query: Tensor, key: Tensor, scaling: float, rows: str, window: int | None) -> Tensor:
    """Sums over windows (and rows) by head, `[HQ]`, of attention that is made a few rows at a time."""
    heads, time = query.shape[1:3]
    key = key.repeat_interleave(heads // key.shape[1], dim=1)
    total = query.new_zeros(heads, dtype=torch.float32)
    first = time - 1 if rows == "last" else 1
    for start in range(first, time, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, time)
        now = torch.arange(start, stop, device=query.device).unsqueeze(1)
        then = torch.arange(stop, device=query.device)
        hidden = then > now
        if window is not None:
            hidden |= then <= now - window
        scores = (query[:, :, start:stop] @ key[:, :, :stop].transpose(2, 3)).float() * scaling
        found = entropies(scores.masked_fill(hidden, -torch.inf).softmax(-1))
        if rows == "all":
            found = found / (~hidden).sum(1).log().clamp(min=math.log(2))
        total += found.sum((0, 2))
    return total


@torch.no_grad()
def mean_loss(model: Any, ids: Tensor, batch: int = 1) -> float:
    """Cross entropy of the next token in nats, over all but the first of each window."""
    total, count = 0.0, 0
    for part in ids.split(batch):
        part = part.to(model.device)
        logits = model(input_ids=part, use_cache=False).logits[:, :-1].float()
        total += F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
        count += part[:, 1:].numel()
    return total / count


def one_by_one(
    model: Any,
    measure: Callable[[Any], float],
    settings: DualStateSettings,
    fit_on: Tensor,
    *,
    seed: int,
    title: str,
    kernel: str = "auto",
    reporter: Reporter | None = None,
) -> tuple[Tensor, float]:
    """What a measure makes of the model with each layer converted alone, untrained but for the size of its output.

    Args:
        model: the teacher; it is as before when this returns.
        measure: of the model as it is.
        settings: of the new layer.
        fit_on: `[samples, T]`, text on which the sizes are fitted (`fit_scale`).
        seed: of the new weights.
        title: of the progress.
        kernel: which implementation of `lapkernels.dual_state` runs in the new layer.
        reporter: hears of it.

    Returns:
        By layer, `[layers]` in fp64; and of the teacher itself.
    """
    count = len(decoder_of(model).layers)
    found = torch.empty(count, dtype=torch.float64)
    whole = measure(model)
    with (reporter or SilentReporter()).task(title, total=count, unit="layers") as task:
        for layer in range(count):
            projection = output_projection(attention_of(model, layer))
            before = projection.weight.detach().clone()
            with torch.no_grad(), watched(model, layer) as teacher:
                model.get_decoder()(input_ids=fit_on.to(model.device), use_cache=False)
            convert_layers(model, settings, [layer])
            attention_of(model, layer).kernel = kernel
            try:
                attention_of(model, layer).start_states(torch.Generator().manual_seed(seed + layer))
                with torch.no_grad(), watched(model, layer) as student:
                    model.get_decoder()(input_ids=fit_on.to(model.device), use_cache=False)
                if settings.window is None:
                    attention = attention_of(model, layer)
                    fold_scale(attention, fit_scale(attention, student.heads, teacher.outputs))
                found[layer] = measure(model)
            finally:
                restore_layer(model, layer)
                with torch.no_grad():
                    projection.weight.copy_(before)
            task.advance()
    return found, whole


def order_of(values: Tensor) -> list[int]:
    """The layers from the least minded to the most; of those alike the later ones come first.

    Early layers feed all others, so that among equals a late one is the smaller risk.
    """
    return sorted(range(len(values)), key=lambda layer: (float(values[layer]), -layer))


def rank_correlations(measures: Mapping[str, Tensor]) -> dict[str, float]:
    """Spearman's rank correlation of every two measures of the layers, as `a ~ b`; ties share their mean rank.

    NaN where one of the two has one value alone.
    """
    ranks = {name: _ranks(values) for name, values in measures.items()}
    names = sorted(ranks)
    found: dict[str, float] = {}
    for place, one in enumerate(names):
        for other in names[place + 1 :]:
            a, b = (ranks[name] - ranks[name].mean() for name in (one, other))
            size = float((a.norm() * b.norm()).item())
            found[f"{one} ~ {other}"] = float((a @ b).item()) / size if size else math.nan
    return found


def _ranks(values: Tensor) -> Tensor:
    values = values.double()
    below = (values.unsqueeze(0) < values.unsqueeze(1)).sum(1)
    alike = (values.unsqueeze(0) == values.unsqueeze(1)).sum(1)
    return below + (alike - 1) / 2
