"""`l1`: channels whose projection rows have the largest absolute sums. Source: arXiv 2602.04852, Sec. 3.4."""

from jaxtyping import Float, Float64
from torch import Tensor

from lapcli.selectors.base import HeadStatistics, Request, Selection, best_of_sum


def channel_magnitudes(weight: Float[Tensor, "H K D"]) -> Float64[Tensor, "H K"]:
    """The statistic that calibration keeps: `sum_i |W_ij|` of each channel's row, summed in fp64.

    Args:
        weight: a projection, one row of D inputs per channel, any float dtype.
    """
    return weight.double().abs().sum(dim=-1)


def select(statistics: HeadStatistics, request: Request) -> Selection:
    """Score channel j by `||W_Q,:j||_1 + ||W_K,:j||_1`.

    Args:
        statistics: `magnitude_key`, `magnitude_query` as `score_from` needs them.
        request: kept width and `score_from`.
    """
    return best_of_sum(statistics, request, "magnitude")
