"""A first look at task names, which imports nothing heavy: names that nobody can know are refused within a second.

lm-eval's own index takes ten seconds to make. Its definitions are files of text, though, in which most of its names are
spelled, and the parts between underscores of the rest, which it puts together (so all 14,683 of lm-eval 0.4.13). A name
with a part that stands nowhere in them is certainly none. What stays in doubt is left to `harness.check_names`.
"""

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from lapcli.evaluation.tasks import TASKS, TaskInfo, unknown_tasks

_NAME = re.compile(rb"^\s*(?:-\s*)?(?:task|group|tag)\s*:\s*[\"']?([\w.\-]+)", re.MULTILINE)


def check_spelling(infos: Sequence[TaskInfo]) -> None:
    """Refuse names that neither lapcli nor lm-eval, as far as it is installed, can know.

    Args:
        infos: as `parse_tasks` gives them.

    Raises:
        UsageError: names all of them, each with the nearest that is known.
    """
    others = [info.harness_name for info in infos if info.name not in TASKS and info.harness_name is not None]
    if not others:
        return
    package = find_spec("lm_eval")
    if package is None or not package.submodule_search_locations:
        # Most likely slips in our own names; the hint lists them.
        raise unknown_tasks(others)
    folder = Path(package.submodule_search_locations[0]) / "tasks"
    files = list(folder.rglob("*.yaml"))
    text = b"\n".join(str(path.relative_to(folder)).encode() for path in files)
    text += b"\n".join(path.read_bytes() for path in files)
    known = {name.decode() for name in _NAME.findall(text)}
    doubtful = [name for name in others if name not in known]
    if doubtful and not any(all(part.encode() in text for part in name.split("_")) for name in doubtful):
        raise unknown_tasks(doubtful, sorted(known))
