"""The means of groups of tasks, made from the scores of their members, wherever those came from."""

from collections.abc import Sequence

from lapcli.artifacts.digest import digest_document
from lapcli.evaluation.estimates import average
from lapcli.evaluation.results import Score
from lapcli.evaluation.tasks import TaskInfo


def group_scores(infos: Sequence[TaskInfo], scores: Sequence[Score]) -> tuple[Score, ...]:
    """The means of the groups among the tasks, each task counting the same; none where a member is not measured yet.

    Of tasks with several lengths there is a mean at each length that all of them were measured at.

    Args:
        infos: tasks and groups.
        scores: of the members, among others.
    """
    there = {score.key: score for score in scores}
    lengths = sorted({score.length for score in scores}, key=lambda length: length or 0)
    found: list[Score] = []
    for info in infos:
        for metric, names in info.means.items():
            for length in lengths:
                parts = [there.get((*name, length)) for name in names]
                if all(parts):
                    found.append(_mean(info.name, metric, [part for part in parts if part is not None]))
    return tuple(found)


def _mean(group: str, metric: str, parts: Sequence[Score]) -> Score:
    return Score(
        task=group,
        metric=metric,
        higher_is_better=parts[0].higher_is_better,
        estimate=average([part.estimate for part in parts]),
        settings={
            "parts": ", ".join(f"{part.task} {part.metric}" for part in parts),
            "limit": parts[0].settings.get("limit"),
            # Whatever else the parts were measured with, in one word: means compare only where all of it is alike.
            "settings": digest_document([dict(part.settings) for part in parts]),
        },
        length=parts[0].length,
        counts={"tasks": len(parts), "documents": sum(part.estimate.n for part in parts)},
        of=tuple(part.request for part in parts if part.request is not None),
    )
