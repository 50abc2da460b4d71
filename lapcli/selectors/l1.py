"""`l1`: channels whose projection rows have the largest absolute sums. Source: arXiv 2602.04852, Sec. 3.4."""

from lapcli.selectors.base import HeadStatistics, Request, Selection, keep_best, statistic


def select(statistics: HeadStatistics, request: Request) -> Selection:
    """Score channel j by `||W_Q,:j||_1 + ||W_K,:j||_1`, summed in fp64.

    Args:
        statistics: `weight_key`, `weight_query` as `score_from` needs them.
        request: kept width and `score_from`.
    """
    sides = [statistic(statistics, name).abs().sum(dim=-1) for name in request.sides("weight")]
    return keep_best(sum(sides[1:], start=sides[0]), request.kept_width)
