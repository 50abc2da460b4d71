"""`grad`: channels whose weights the loss is most sensitive to, to first order. Source: arXiv 2602.04852, Sec. 3.4."""

from lapcli.selectors.base import HeadStatistics, Request, Selection, best_of_sum


def select(statistics: HeadStatistics, request: Request) -> Selection:
    """Score channel j by `sum_i |W_Q,ij dL/dW_Q,ij| + |W_K,ij dL/dW_K,ij|`, which the calibration has summed.

    Args:
        statistics: `saliency_key`, `saliency_query` as `score_from` needs them.
        request: kept width and `score_from`.
    """
    return best_of_sum(statistics, request, "saliency")
