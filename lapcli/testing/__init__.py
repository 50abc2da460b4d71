"""What lapcli's own tests share, and what a family's author needs: tiny real models, oracles, the larger data."""

from pathlib import Path

import lapcli


def shared_data() -> Path | None:
    """The larger data folder (`../shared` beside the repository), or `None` where there is none."""
    place = Path(lapcli.__file__).resolve().parents[2] / "shared"
    return place if (place / "data").is_dir() else None
