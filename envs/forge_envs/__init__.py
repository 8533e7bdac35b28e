"""Environments that come with forge_agents. Importing this package registers them without importing their code."""

from __future__ import annotations

from typing import Any

import forge_envs.adapters  # noqa: F401  # offers the namespaces of other libraries
from forge_agents.envs.registry import register, register_suite


def _register(name: str, target: str, tags: str, *, oracle: str | None = "", **settings: Any) -> None:
    """Register ``forge/name-v0``.

    Args:
        name: Name of the environment.
        target: ``"module:Class"`` in this package.
        tags: Tags, separated by spaces.
        oracle: ``"module:Name"`` in `forge_envs.oracles`. Empty: the class of the same name in ``games`` or ``teams``.
            None: no oracle.
        **settings: Further arguments of `register`.
    """
    if oracle == "":
        module, _, cls = target.partition(":")
        oracle = f"{module.partition('.')[0]}:{cls}"
    register(
        f"forge/{name}-v0",
        entry_point=f"forge_envs.{target}",
        oracle=None if oracle is None else f"forge_envs.oracles.{oracle}",
        tags=tuple(tags.split()),
        **settings,
    )


def _levels(names: str, *rows: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Return levels from rows of values of the arguments `names`, separated by spaces."""
    return [dict(zip(names.split(), row, strict=True)) for row in rows]


# ---- teams and rivals, with levels

_register(
    "Library",
    "teams.library:Library",
    "2p cooperative hidden-information tool",
    oracle="library:Oracle",
    levels=_levels("hops towns", (1, 4), (1, 20), (2, 12), (3, 20), (4, 40), (6, 60)),
)
_register(
    "Tables",
    "teams.tables:Tables",
    "2p cooperative tool",
    levels=_levels("level orders", (1, 20), (2, 20), (3, 40), (4, 60), (5, 80), (6, 120)),
)
_register(
    "Codewords",
    "games.codewords:Codewords",
    "2p cooperative hidden-information",
    levels=_levels(
        "groups size others near traps spare",
        (1, 2, 4, 0, 0, 0), (2, 2, 4, 0, 0, 0), (2, 2, 6, 2, 1, 1), (3, 2, 8, 4, 1, 1), (3, 2, 10, 6, 2, 0),
        (4, 2, 12, 8, 2, 0),
    ),
)  # fmt: skip
_register(
    "CodewordsDuel",
    "games.codewords:Codewords",
    "4p zero-sum hidden-information",
    teams=2, groups=2, size=3, others=6, near=3, traps=1, spare=3,
)  # fmt: skip
_register(
    "Village",
    "games.village:Village",
    "5p hidden-information",
    levels=_levels(
        "num_players wolves seer healer days",
        (6, 1, True, True, 5), (7, 1, True, False, 4), (5, 1, True, False, 3), (7, 2, True, True, 5),
        (7, 2, True, False, 4), (7, 2, False, False, 4),
    ),
)  # fmt: skip
_register(
    "Fireworks",
    "games.fireworks:Fireworks",
    "2p cooperative hidden-information",
    levels=_levels(
        "num_players colours ranks hand hints fuses",
        (2, 2, 2, 2, 5, 2), (2, 2, 3, 3, 5, 2), (2, 4, 3, 3, 6, 3), (3, 4, 4, 4, 7, 3), (3, 5, 5, 4, 8, 3),
        (4, 5, 5, 4, 8, 2),
    ),
)  # fmt: skip
_register(
    "Commons",
    "teams.commons:Commons",
    "3p mixed-motive",
    oracle="teams:commons",
    levels=_levels("num_players regrowth", (2, 3.0), (3, 2.0), (4, 1.6), (5, 1.4), (6, 1.25)),
)
_register(
    "DiningPhilosophers",
    "teams.philosophers:DiningPhilosophers",
    "3p cooperative",
    levels=_levels("num_players meals rounds", (2, 1, 16), (3, 1, 14), (3, 1, 8), (4, 2, 8), (6, 2, 8), (8, 2, 8)),
)
_register(
    "Kitchen",
    "teams.kitchen:Kitchen",
    "2p cooperative",
    oracle="kitchen:Oracle",
    levels=_levels(
        "layout onions orders rounds",
        ("room", 1, 1, 50), ("room", 2, 1, 60), ("wall", 2, 1, 32), ("hatch", 2, 2, 50), ("ring", 2, 2, 84),
        ("hatch", 3, 2, 48),
    ),
)  # fmt: skip
_DESK = {"kinds": 3, "knows_numbers": False, "rules": 3, "approvals": False, "customers": 4}
_register(
    "ServiceDesk",
    "teams.service_desk:ServiceDesk",
    "3p cooperative hidden-information tool",
    oracle="service_desk:Oracle",
    levels=[
        {"kinds": 1, "knows_numbers": True, "rules": 0, "approvals": False, "customers": 2, "examples": True},
        {**_DESK, "rules": 0},
        _DESK,
        {**_DESK, "rules": 4, "approvals": True},
        {**_DESK, "rules": 6, "approvals": True, "alternatives": True, "customers": 8},
        {**_DESK, "rules": 6, "approvals": True, "alternatives": True, "customers": 12, "wishes": 2},
    ],
)
_register(
    "Repair",
    "teams.repair:Repair",
    "3p cooperative hidden-information tool",
    oracle="repair:Oracle",
    isolation="process",  # it runs code, which takes its time
    levels=[
        {"modules": 1, "functions": 1, "faults": 1, "kinds": ["operator"]},
        *_levels("modules functions faults", (1, 2, 1), (2, 5, 1), (2, 6, 2), (3, 9, 3)),
    ],
)

# ---- small games, to try a setup

_POKER = "2p zero-sum hidden-information"
_register("KuhnPoker", "games.poker:KuhnPoker", _POKER, max_turns=3)
_register("LeducPoker", "games.poker:LeducPoker", _POKER, oracle=None, max_turns=8)
_register(
    "TicTacToe",
    "adapters.pettingzoo:tic_tac_toe",
    "2p zero-sum board pettingzoo",
    oracle="games:tic_tac_toe",
    max_turns=9,
)
_register("ConnectFour", "adapters.pettingzoo:connect_four", "2p zero-sum board pettingzoo", oracle=None, max_turns=42)
_register(
    "Relay",
    "teams.relay:Relay",
    "2p cooperative tool",
    levels=[
        *_levels("max_number", (9,), (20,), (99,)),
        *_levels("max_number operators", (99, "+-"), (999, "+-"), (999, "+-*")),
    ],
)
_register(
    "ToolRelay",  # a Relay in which an untrained small model calls the calculator now and then
    "teams.relay:Relay",
    "2p cooperative tool",
    levels=_levels("max_number", (9,), (99,), (999,), (9_999,), (99_999,)),
    max_number=99,
    tool_format="plain",
    call_reward=0.2,
    asker="You write calls.",
    question="Question: 2 + 3\nAnswer: CALL calculator(2 + 3)\n"
    "Question: 7 + 4\nAnswer: CALL calculator(7 + 4)\nQuestion: {a} {op} {b}\nAnswer:",
)
_register(
    "AlphabetSort",
    "games.alphabet_sort:AlphabetSort",
    "1p multi-turn",
    oracle="games:alphabet_sort",
    levels=_levels("num_names num_added turns", (2, 1, 1), (3, 1, 2), (4, 2, 3), (5, 3, 4), (6, 4, 5)),
)
_register(
    "TreasureHunt",
    "teams.treasure_hunt:TreasureHunt",
    "2p cooperative",
    levels=_levels("size rocks", (3, 0.0), (4, 0.2), (6, 0.25), (8, 0.3), (12, 0.35)),
)
_register("Negotiation", "teams.negotiation:Negotiation", "2p mixed-motive hidden-information", oracle=None)
_register(
    "Debate",
    "teams.debate:Debate",
    "3p mixed-motive hidden-information",
    oracle=None,
    levels=_levels("below", (100,), (300,), (1_000,), (3_000,), (10_000,)),
)

# ---- suites


def _suite(name: str, namespace: str, names: str, **settings: Any) -> None:
    register_suite(name, [f"{namespace}/{env}-v0" for env in names.split()], **settings)


_suite("core-v1", "forge", "KuhnPoker Relay AlphabetSort", episodes=32)
_suite("team-v0", "forge", "Relay TreasureHunt Negotiation Debate")
_suite("duel-v0", "forge", "KuhnPoker LeducPoker TicTacToe ConnectFour")
_suite("teams-v1", "forge", "Library Tables Codewords Fireworks Kitchen ServiceDesk Repair")
_suite("duels-v1", "forge", "CodewordsDuel Village Commons", episodes=32)
_suite(
    "diagnostics-v1",
    "forge",
    "KuhnPoker LeducPoker Relay AlphabetSort TreasureHunt Negotiation TicTacToe ConnectFour",
    episodes=32,
)
_suite(
    "text-games-v1",
    "textarena",
    "FrozenLake GuessTheNumber LightsOut Mastermind TowerOfHanoi "
    "ConnectFour IteratedPrisonersDilemma KuhnPoker Nim TicTacToe",
    episodes=12,
)
_suite(
    "reasoning-v1",
    "reasoning-gym",
    "calendar_arithmetic chain_sum countdown family_relationships gcd knights_knaves letter_counting mini_sudoku "
    "number_sequence shortest_path simple_equations spell_backward syllogism word_sorting",
    episodes=16,
    max_tokens=256,  # for reasoning
)
