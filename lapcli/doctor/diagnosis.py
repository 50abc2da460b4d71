"""The whole look at a machine: packages, kernels, rates, what will run, and whether all of that is right."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lapcli.doctor.facts import Facts, gather
from lapcli.doctor.findings import Finding, findings, rate_findings
from lapcli.doctor.kernels import Check, check_kernels, verdicts_of
from lapcli.reporting import Reporter, SilentReporter
from lapkernels import verdicts
from lapkernels.timing import copy_bandwidth, free, product_rate

LIMIT = 40.0
"""Seconds after which no further kernel is checked."""

_USES = {"prefill": {"time": 2048}, "training": {"time": 2048, "needs_gradient": True}}


@dataclass(frozen=True)
class Rates:
    """What the device can do.

    Attributes:
        copy_bytes: a second, read and written.
        product_flops: floating-point operations a second of a large product.
        product_dtype: in which dtype: bf16 on a GPU, fp32 elsewhere, as `--dtype auto` takes.
    """

    copy_bytes: float
    product_flops: float
    product_dtype: str


@dataclass(frozen=True)
class Use:
    """What `auto` takes for one kind of work.

    Attributes:
        work: `prefill`, `training` or `decode`.
        name: of the implementation.
        reason: why that one.
        fast: whether it is a kernel made for a GPU.
    """

    work: str
    name: str
    reason: str
    fast: bool


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes:
        device: what was looked at.
        facts: machine and packages.
        checks: the kernels.
        rates: the device's.
        uses: what `auto` takes now, verdicts regarded.
        findings: what a user should know, the worst first.
        verdicts: the file that keeps what is wrong; `None` where nothing is.
    """

    device: str
    facts: Facts
    checks: tuple[Check, ...]
    rates: Rates
    uses: tuple[Use, ...]
    findings: tuple[Finding, ...]
    verdicts: Path | None

    @property
    def sound(self) -> bool:
        """Whether all that will be used here is right."""
        return all(finding.level != "wrong" for finding in self.findings)

    @property
    def fast(self) -> bool:
        """Whether everything runs on kernels made for a GPU."""
        return all(use.fast for use in self.uses)

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "sound": self.sound,
            "fast": self.fast,
            "device": self.device,
            "findings": [asdict(finding) for finding in self.findings],
            "uses": [asdict(use) for use in self.uses],
            "kernels": [asdict(check) for check in self.checks],
            "rates": asdict(self.rates),
            "machine": asdict(self.facts),
            "verdicts": None if self.verdicts is None else str(self.verdicts),
        }


def diagnose(
    device: torch.device,
    *,
    thorough: bool = False,
    limit: float | None = LIMIT,
    reporter: Reporter | None = None,
) -> Diagnosis:
    """Look at this machine, and remember which kernels are wrong on it (`lapkernels.verdicts`).

    Args:
        device: whose kernels and rates.
        thorough: check kernels at more widths, and as their autotuners choose them.
        limit: seconds after which no further kernel is checked; `None` for no limit.
        reporter: told of the progress.
    """
    reporter = reporter or SilentReporter()
    facts = gather()
    found = findings(facts)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with reporter.task("rates", total=2, unit="rates") as task:
        bandwidth = copy_bandwidth(device)
        task.advance()
        rates = Rates(bandwidth, product_rate(device, dtype), str(dtype).removeprefix("torch."))
        task.advance()
    free(device)
    if device.type == "cuda":
        found += rate_findings(torch.cuda.get_device_name(device), rates.copy_bytes, rates.product_flops)
    checks = check_kernels(device, thorough=thorough, limit=limit, reporter=reporter)
    kept, unkept = _remember(device, checks)
    found += [*kernel_findings(checks), *unkept]
    return Diagnosis(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        facts=facts,
        checks=tuple(checks),
        rates=rates,
        uses=uses(device, dtype),
        findings=tuple(sorted(found, key=lambda finding: ("wrong", "slow", "note").index(finding.level))),
        verdicts=kept,
    )


def uses(device: torch.device, dtype: torch.dtype) -> tuple[Use, ...]:
    """What `auto` takes here for a gated layer."""
    from lapkernels.delta_rule import select_impl
    from lapkernels.delta_step import select_impl as select_step

    found: list[Use] = []
    for work, call in _USES.items():
        options: dict[str, Any] = {"key_width": 128, "gated": True, **call}
        choice = select_impl(device, dtype, **options)
        found.append(Use(work, choice.name, choice.reason, choice.name not in ("reference", "chunked")))
    step = select_step(device, dtype)
    found.append(Use("decode", step.name, step.reason, step.name != "reference"))
    return tuple(found)


def kernel_findings(checks: Sequence[Check]) -> list[Finding]:
    """What the checks mean for a user: one for each implementation that is wrong, and one for all that had no time."""
    found: list[Finding] = []
    for operator, impl in dict.fromkeys((check.operator, check.impl) for check in checks if check.bad):
        bad = [check for check in checks if check.bad and (check.operator, check.impl) == (operator, impl)]
        where = ", ".join(dict.fromkeys(f"{check.way} ({check.variant})" for check in bad))
        worst = max(bad, key=lambda check: float("inf") if check.share is None else check.share)
        found.append(Finding("wrong", f"{operator} {impl} is wrong here in {where}: {worst.detail}", _remedy(impl)))
    missed = [check for check in checks if check.status == "not checked"]
    if missed:
        names = ", ".join(dict.fromkeys(f"{check.operator} {check.impl} {check.way}" for check in missed))
        found.append(Finding("note", f"not checked, for want of time or memory: {names}", "lapcli doctor --limit 600"))
    return found


def _remedy(impl: str) -> str:
    if impl == "reference":
        return "this is the definition itself: look at torch's installation, and at the machine's memory"
    asked = f"--kernel {impl} is an error here from now on, and auto takes another"
    if impl == "fla":
        return (
            f"{asked}; try another triton, or tilelang, then run `lapcli doctor` again. Scripts of yours that call fla "
            "are not held back"
        )
    return f"{asked}; try another triton or driver, then run `lapcli doctor` again, and please report it"


def _remember(device: torch.device, checks: Sequence[Check]) -> tuple[Path | None, list[Finding]]:
    """Keep what is wrong; what could not be checked keeps the verdict that it had."""
    found = verdicts_of(checks)
    unseen = {(each.operator, each.impl, each.variant, each.way == "backward") for each in checks} - {
        (each.operator, each.impl, each.variant, each.way == "backward")
        for each in checks
        if each.status in ("right", "wrong", "failed")
    }
    found += [
        verdict
        for verdict in verdicts.remembered(device)
        if (verdict.operator, verdict.impl, verdict.variant, verdict.backward) in unseen
    ]
    try:
        return verdicts.remember(device, found), []
    except OSError as error:
        if not found:
            return None, []
        return None, [
            Finding(
                "wrong",
                f"what is wrong here could not be kept for other commands: {error}",
                f"set {verdicts.FILE_VARIABLE} to a file that can be written",
            )
        ]
