"""Results of a benchmark: settings, environments, players and records, with the summary that they give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from pydantic import StrictFloat, StrictInt

from forge_agents.bench.plan import SuiteEnv
from forge_agents.bench.records import Record, Spent, spent_by_player
from forge_agents.bench.summary import Summary, summarize


@dataclass(frozen=True, kw_only=True)
class Results:
    """Results of a benchmark. The same players, suite and seed give the same results, except for `timing`."""

    __pydantic_config__: ClassVar = {"allow_inf_nan": False}

    settings: Mapping[str, Any]
    """``suite``, ``episodes``, ``seed``, ``swap_agents``, ``samples``, ``exploitability_samples``, and ``partners`` if
    some were named. A registered suite adds its ``suite_defaults``."""
    environments: tuple[SuiteEnv, ...] = field(repr=False)
    """Environments, whose arguments are those of `forge_agents.bench.sections.public_arguments`."""
    players: Mapping[str, Mapping[str, Any]] = field(repr=False)
    """Facts by player: type, model, sampling, hash of the weights. ``fingerprint`` is the hash of all."""
    provenance: Mapping[str, Any] = field(repr=False)
    """Versions of Python and packages, and the commit of a checkout."""
    records: tuple[Record, ...] = field(repr=False)
    """Records of the episodes, in the order of the plan."""
    planned: StrictInt
    """Number of planned episodes."""
    stopped: str = ""
    """Why the benchmark stopped early. Empty if it did not."""
    exploitability: Mapping[str, Mapping[str, StrictFloat]] = field(default_factory=dict)
    """Exploitability by environment and player, see `forge_agents.bench.exploitability`."""
    timing: Mapping[str, Any] = field(default_factory=dict)
    """Date, seconds (in total, and of play without the startup of engines), and numbers of played and reused
    episodes."""

    @property
    def complete(self) -> bool:
        """Whether every planned episode was played and none failed."""
        return not self.missing and not any(record.error for record in self.records)

    @property
    def missing(self) -> int:
        """Number of planned episodes that were not played."""
        return self.planned - len(self.records)

    @cached_property
    def summary(self) -> Summary:
        """Estimates with intervals, computed from the records."""
        return summarize(self.records, self.environments, tuple(self.players), self.settings.get("partners", ()))

    @property
    def spent(self) -> dict[str, Spent]:
        """Tokens and cost by player, over all successful episodes of the report."""
        return spent_by_player(self.records, self.players)
