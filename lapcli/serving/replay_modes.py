"""What replays of a conversion in its modes came to: by a server's metrics, or simulated."""

import re
from collections.abc import Mapping
from typing import Any

from lapcli.errors import UsageError
from lapcli.serving.adaptive import PAPER_CAPS
from lapcli.serving.costs import StepCosts
from lapcli.serving.modes import Mode, Wish, parse_caps, parse_share, policy_of
from lapcli.serving.policy import Configuration
from lapcli.serving.replay_results import Outcome, adapting_figures, summary
from lapcli.serving.replay_trace import Fitted
from lapcli.serving.simulation import Counted, counted_figures, simulate

_ROOM_FOR_ROWS = 0.9
"""Of the memory that weights leave; as `lapcli.serving.worker` reserves."""


def served_figures(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
    """What a server's metrics say of the time between two looks at them.

    Args:
        before: as `Client.metrics` gives them.
        after: likewise.
    """

    def came(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    def by(name: str, label: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for line in after:
            if line.startswith(name + "{") and (value := _label(line, label)) is not None and came(line):
                found[value] = found.get(value, 0.0) + came(line)
        return found

    increases = {_label(line, "configuration"): line for line in after if "_configuration_ppl_increase{" in line}
    configurations = [
        # Of how many layers the share is, does not matter here.
        Configuration(name, round(after[line.replace("ppl_increase", "share")] * 10**6), 10**6, increase=after[line])
        for name, line in increases.items()
        if name is not None
    ]
    figures = adapting_figures(
        configurations,
        tokens_as={
            name: tokens
            for name, tokens in by("lapcli_configuration_tokens_total", "configuration").items()
            if name in {each.name for each in configurations}
        },
        began_as=by("lapcli_configurations_total", "configuration"),
        switches=by("lapcli_switches_total", "reason"),
        replays=came("lapcli_switch_seconds_count"),
        switch_tokens=came("lapcli_switch_tokens_total"),
        switch_seconds=came("lapcli_switch_seconds_sum"),
        steps=came("lapcli_steps"),
        mixed_steps=came("lapcli_mixed_steps"),
        mixed_seconds=came("lapcli_mixed_seconds"),
        split_seconds=came("lapcli_split_seconds"),
        set_back=came("lapcli_set_back"),
        peak_bytes=after.get("lapcli_memory_for_rows_peak_bytes", 0.0),
        total_bytes=after.get("lapcli_memory_for_rows_bytes", 0.0),
    )
    return {**figures, "peak_memory_bytes": after.get("lapcli_peak_memory_bytes")}


def _label(line: str, label: str) -> str | None:
    found = re.search(rf'[{{,]{label}="((?:[^"\\]|\\.)*)"', line)
    return None if found is None else found[1]


def simulate_mode(
    mode: Mode | None, fitted: Fitted, costs: StepCosts, wish: Wish, memory: int | None, replicas: int, waiting: int
) -> tuple[dict[str, Any], list[Outcome]]:
    """Replay by measured costs.

    Args:
        mode: of serving; `None` for the costs' first configuration, whatever it is.
        fitted: the requests.
        costs: of each engine's work.
        wish: the adaptive mode's caps and limit.
        memory: bytes of weights, keys and values of each engine; `None`: as where costs were measured.
        replicas: engines.
        waiting: requests that may wait at each.

    Raises:
        UsageError: the costs are not of a conversion; the mode cannot be had of it; memory holds no request.
    """
    policy, most = None, costs.configurations[-1].converted
    if mode is not None:
        if len(costs.configurations) < 2:
            raise UsageError(
                f"the step costs are of {costs.model}, which comes in one configuration",
                "measure those of a conversion: --simulate FILE --model DIR",
            )
        policy, allowed = policy_of(
            mode,
            costs.configurations,
            caps=PAPER_CAPS if wish.caps is None else parse_caps(wish.caps),
            most_increase=None
            if wish.max_ppl_increase is None
            else parse_share(wish.max_ppl_increase, "--max-ppl-increase"),
            where=costs.model,
        )
        most = 0 if len(allowed) == 1 else allowed[-1].converted
    total = _total_bytes(costs, most, memory)
    least = max(each.row_bytes(costs.window) for each in costs.configurations)
    if total and total < least:
        raise UsageError(f"{total} bytes hold no request of {costs.window} tokens, which takes {least}", "--memory")
    counted = Counted()
    outcomes = simulate(
        fitted.turns,
        costs,
        replicas=replicas,
        waiting=waiting,
        policy=policy,
        total_bytes=total,
        counted=counted,
    )
    found = summary(outcomes, mode="simulated" if mode is None else mode.name)
    return {"replicas": replicas, **found, **counted_figures(counted, costs.configurations, total)}, outcomes


def _total_bytes(costs: StepCosts, twice: int, memory: int | None) -> int:
    """Bytes for keys and values where so many layers are there as both kinds."""
    spared = costs.layer_bytes * (costs.configurations[-1].converted - twice)
    if memory is None:
        return costs.total_bytes + spared if costs.total_bytes else 0
    left = int(_ROOM_FOR_ROWS * (memory - costs.weights_bytes + spared)) - costs.rows * costs.slot_bytes
    if left < 1:
        raise UsageError(
            f"--memory {memory} bytes: the weights take {costs.weights_bytes - spared}, and slots of {costs.rows} rows "
            f"{costs.rows * costs.slot_bytes}",
            "give more, or lower --max-rows",
        )
    return left
