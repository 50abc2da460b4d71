"""What replays of a conversion in its modes came to: by a server's metrics, or simulated."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from lapcli.errors import UsageError
from lapcli.serving.adaptive import PAPER_CAPS
from lapcli.serving.costs import StepCosts
from lapcli.serving.memory import Limits, RowBytes, beside, rows_that_fit, usual_length
from lapcli.serving.modes import Mode, Wish, parse_caps, policy_of
from lapcli.serving.policy import Configuration, Policy
from lapcli.serving.replay_results import Outcome, adapting_figures, summary
from lapcli.serving.replay_trace import Fitted
from lapcli.serving.simulation import PAGE, Counted, counted_figures, simulate


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


class ModePlan(NamedTuple):
    """What engines of a mode have.

    Attributes:
        policy: which configuration a request gets; `None` for the only one.
        configurations: that it may choose.
        rows: requests together.
        row_bytes: of pages; 0 for any number.
        piece: prompt tokens between two steps, at most.
    """

    policy: Policy | None
    configurations: list[Configuration]
    rows: int
    row_bytes: int
    piece: int


def plan_mode(
    mode: Mode | None, costs: StepCosts, wish: Wish, memory: int | None = None, max_rows: int | None = None
) -> ModePlan:
    """What engines of a mode have.

    Arguments and errors are those of `simulate_mode`.
    """
    policy, allowed = None, list(costs.configurations)
    if mode is not None:
        if len(allowed) < 2:
            raise UsageError(
                f"the step costs are of {costs.model}, which comes in one configuration",
                "measure those of a conversion: --simulate FILE --model DIR",
            )
        policy, allowed = policy_of(
            mode,
            allowed,
            caps=PAPER_CAPS if wish.caps is None else parse_caps(wish.caps),
            # As where servers are started: what every request runs as is not chosen by its quality.
            most_increase=wish.limit if mode.fraction is None else None,
            where=costs.model,
        )
    if policy is not None and costs.state_bytes and not any(each.token_bytes for each in allowed):
        # Without a layer of attention, whose pages they would lie in, states are pages.
        allowed = [each._replace(fixed_bytes=each.converted * costs.state_bytes) for each in allowed]
        costs = replace(costs, page_bytes=costs.state_bytes)
    return ModePlan(policy, allowed, *_room(costs, allowed, memory, max_rows))


def simulate_mode(
    mode: Mode | None,
    fitted: Fitted,
    costs: StepCosts,
    wish: Wish,
    *,
    memory: int | None = None,
    max_rows: int | None = None,
    replicas: int = 1,
    waiting: int = 1024,
) -> tuple[dict[str, Any], list[Outcome]]:
    """Replay by measured costs.

    Args:
        mode: of serving; `None` for the costs' first configuration, whatever it is.
        fitted: the requests.
        costs: of each engine's work.
        wish: the adaptive mode's caps and limit.
        memory: bytes of each engine, of all that it holds; `None`: as where costs were measured.
        max_rows: requests that an engine decodes together; `None`: as many as a server makes room for.
        replicas: engines.
        waiting: requests that may wait at each.

    Raises:
        UsageError: the costs are not of a conversion; the mode cannot be had of it.
        ModelError: memory holds no request.
    """
    policy, allowed, rows, total, piece = plan_mode(mode, costs, wish, memory, max_rows)
    counted = Counted()
    outcomes = simulate(
        fitted.turns,
        replace(costs, rows=rows, piece=piece),
        replicas=replicas,
        waiting=waiting,
        policy=policy,
        total_bytes=total,
        counted=counted,
        configurations=allowed,
    )
    found = summary(outcomes, mode="simulated" if mode is None else mode.name)
    return {"replicas": replicas, **found, **counted_figures(counted, costs.configurations, total)}, outcomes


def _room(
    costs: StepCosts, allowed: Sequence[Configuration], memory: int | None, max_rows: int | None
) -> tuple[int, int, int]:
    """Rows, bytes for keys and values (0 for any number), and a piece, of an engine with some of the configurations."""
    slot, page = costs.slot_bytes, costs.page_bytes or 1

    def row_bytes(tokens: int, configuration: Configuration) -> int:
        pages = configuration.token_bytes * PAGE * -(-tokens // PAGE)
        return slot + configuration.fixed_bytes + pages

    longest, longest_of_all = (
        max(row_bytes(costs.window, each) for each in some) for some in (allowed, costs.configurations)
    )
    # Layers that are states in some of them and attention in others are there twice.
    first, last = allowed[0].converted, allowed[-1].converted
    spared = costs.layer_bytes * (costs.configurations[-1].converted - (last - first)) - costs.gate_bytes * first
    if memory is None:
        rows, piece = max_rows or costs.rows, costs.piece
        whole = costs.total_bytes >= costs.rows * (longest_of_all - slot) and (
            costs.device == "cpu" or rows <= costs.rows
        )
        spared += sum(beside(costs.needs, longest_of_all, costs.rows, piece))
        spared -= sum(beside(costs.needs, longest, rows, piece, states=last > 0))
        left = costs.total_bytes + spared + (costs.rows - rows) * slot
        if whole or not costs.total_bytes:
            # Nothing set an end to them but what rows may take.
            left = rows * (longest - slot) if costs.total_bytes else 0
    else:
        usual = min(row_bytes(usual_length(costs.window), each) for each in allowed)
        limits = Limits(memory, costs.weights_bytes - spared, max_rows, costs.piece)
        room = rows_that_fit(limits, RowBytes(slot, usual, longest), costs.needs, states=last > 0)
        rows, piece, left = room.rows, room.piece, room.row_bytes or 0
    return rows, max(0, min(left, rows * (longest - slot)) // page * page), piece
