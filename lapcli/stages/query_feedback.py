"""Query feedback on the way to a recovery: the student of it is converted, and what is recovered is the Q-Delta."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lapcli.artifacts import RunDirectory
from lapcli.errors import ArtifactError
from lapcli.families.source import ModelSource, resolve_model
from lapcli.recipe import RecoverySettings
from lapcli.reporting import Reporter
from lapcli.stages.conversion import (
    ConversionPlan,
    QDeltaSettings,
    check_output,
    convert_into,
    is_there,
    plan_conversion,
)
from lapcli.stages.giving_way import aside, bring_back, set_aside
from lapcli.stages.recovery import recovers

_MEND = "pass --restart to begin anew, or --run DIR to keep both"


@dataclass(frozen=True)
class FeedbackPlan:
    """The conversion before a recovery.

    Attributes:
        plan: of the conversion.
        place: where the converted model lies.
        recovery: where that of the recovery does.
    """

    plan: ConversionPlan
    place: Path
    recovery: Path

    def document(self) -> dict[str, Any]:
        """The plan, JSON-able."""
        return {**self.plan.document(), "writes": str(self.place)}

    def there(self) -> bool:
        """Whether the converted model is there, whole."""
        return is_there(self.plan, self.place)

    def write(self, *, overwrite: bool = False, mend: str = _MEND, reporter: Reporter | None = None) -> ModelSource:
        """The converted model, made unless it is there.

        Args:
            overwrite: whether a conversion of another model gives way.
            mend: what a user can do about one that may not.
            reporter: where progress goes.

        Raises:
            LapcliError: see `lapcli.stages.conversion.convert_into`.
        """
        convert_into(self.plan, self.place, overwrite=overwrite, mend=mend, reporter=reporter)
        return resolve_model(str(self.place))

    def write_anew(self, *, reporter: Reporter | None = None) -> ModelSource:
        """As `write`, for a recovery that begins anew; another conversion, of which an earlier one was, is kept.

        It lies aside until `recover_into`, told of it, has something in that recovery's place, or fails before.

        Args:
            reporter: where progress goes.

        Raises:
            LapcliError: see `lapcli.stages.conversion.convert_into`; then the earlier conversion is in its place.
        """
        if self.recovery.exists() and self.place.exists() and not is_there(self.plan, self.place):
            check_output(self.plan, self.place, overwrite=True)
            set_aside(self.place)
        try:
            return self.write(overwrite=True, reporter=reporter)
        except BaseException:
            bring_back(self.place)
            raise

    def interrupted(self) -> bool:
        """Whether `write_anew` set a conversion aside, and no recovery was begun since: a process was killed then."""
        return aside(self.place).exists() and self.recovery.exists() and not aside(self.recovery).exists()

    def undo(self) -> None:
        """Bring back what `write_anew` set aside."""
        bring_back(self.place)

    def stand_in(self, student: ModelSource, *, restart: bool) -> tuple[ModelSource, bool]:
        """What a plan can be made with before the conversion is written, and whether recovery begins anew.

        That is the converted model where it is there already, else the one before conversion.

        Raises:
            ArtifactError: something else is where the conversion is to be, or the run holds a recovery of another
                model.
        """
        if is_there(self.plan, self.place):
            return resolve_model(str(self.place)), restart
        check_output(self.plan, self.place, overwrite=restart, mend=_MEND)
        if self.recovery.exists() and not restart and not recovers(self.recovery, self.place):
            raise ArtifactError(f"{self.recovery} holds a recovery of a model without query feedback", _MEND)
        return student, True


def plan_feedback(student: ModelSource, settings: RecoverySettings, run: RunDirectory) -> FeedbackPlan | None:
    """The conversion that a recovery asks for, checked; `None` where it asks for none.

    Args:
        student: before conversion; a slice's base may stand in for it.
        settings: of the recovery.
        run: the run directory.

    Raises:
        ModelError: the student is no Gated DeltaNet.
    """
    if not settings.add_query_feedback:
        return None
    plan = plan_conversion(student, QDeltaSettings(settings.lambda_init))
    folder = run.control_recovery if settings.control else run.recovery
    return FeedbackPlan(plan, run.path / ("converted-control" if settings.control else "converted"), folder)
