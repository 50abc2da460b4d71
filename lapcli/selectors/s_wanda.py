"""`s-wanda`: `l1` with every weight multiplied by the norm of its input. Source: arXiv 2602.04852, Sec. 3.4."""

from lapcli.selectors.base import HeadStatistics, Request, Selection, keep_best, statistic


def select(statistics: HeadStatistics, request: Request) -> Selection:
    """Score channel j by `sum_i (|W_Q,ij| + |W_K,ij|) ||X_:i||_2`, summed in fp64.

    Args:
        statistics: `input_sq`, and `weight_key`, `weight_query` as `score_from` needs them.
        request: kept width and `score_from`.
    """
    length = statistic(statistics, "input_sq").sqrt()
    sides = [statistic(statistics, name).abs() @ length for name in request.sides("weight")]
    return keep_best(sum(sides[1:], start=sides[0]), request.kept_width)
