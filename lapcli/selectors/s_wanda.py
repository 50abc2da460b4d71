"""`s-wanda`: `l1` with every weight multiplied by the norm of its input. Source: arXiv 2602.04852, Sec. 3.4."""

from jaxtyping import Float, Float64
from torch import Tensor

from lapcli.selectors.base import HeadStatistics, Request, Selection, best_of_sum


def channel_wanda(weight: Float[Tensor, "H K D"], input_sq: Float64[Tensor, " D"]) -> Float64[Tensor, "H K"]:
    """The statistic that calibration keeps: `sum_i |W_ij| ||X_:i||_2` of each channel's row, summed in fp64.

    Args:
        weight: a projection, one row of D inputs per channel, any float dtype.
        input_sq: per input, the sum over tokens of its square.
    """
    return weight.double().abs() @ input_sq.sqrt()


def select(statistics: HeadStatistics, request: Request) -> Selection:
    """Score channel j by `sum_i (|W_Q,ij| + |W_K,ij|) ||X_:i||_2`.

    Args:
        statistics: `wanda_key`, `wanda_query` as `score_from` needs them.
        request: kept width and `score_from`.
    """
    return best_of_sum(statistics, request, "wanda")
