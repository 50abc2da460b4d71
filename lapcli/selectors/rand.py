"""`rand`: channels drawn at random, the simplest control. Source: arXiv 2602.04852, Sec. 3.4."""

import numpy as np
import torch

from lapcli.selectors.base import HeadStatistics, Request, Selection, keep_best


def select(statistics: HeadStatistics, request: Request) -> Selection:
    """Score every channel by a uniform number that depends on seed, layer, head and channel alone.

    The kept sets of a smaller width are therefore subsets of those of a larger one. `score_from` changes nothing.

    Args:
        statistics: any, for the number of heads and channels.
        request: kept width, seed and layer.
    """
    heads, width = statistics.shape
    # RandomState's stream is frozen for good; that of a Generator may change with NumPy.
    draws = [
        np.random.RandomState(
            np.random.MT19937(np.random.SeedSequence([request.seed, request.layer, head]))
        ).random_sample(width)
        for head in range(heads)
    ]
    return keep_best(torch.as_tensor(np.stack(draws)), request.kept_width)
