"""Environments that come with forge_agents. Importing this package registers them without importing their code."""

from __future__ import annotations

import forge_envs.adapters  # noqa: F401  # offers the namespaces of other libraries
from forge_agents.envs.registry import register, register_suite

register(
    "forge/KuhnPoker-v0",
    entry_point="forge_envs.games.poker:KuhnPoker",
    oracle="forge_envs.oracles.kuhn_poker:Oracle",
    max_turns=3,
    tags=("2p", "zero-sum", "hidden-information"),
)
register(
    "forge/Relay-v0",
    entry_point="forge_envs.teams.relay:Relay",
    oracle="forge_envs.oracles.relay:Oracle",
    tags=("2p", "cooperative", "tool"),
    levels=[
        {"max_number": 9},
        {"max_number": 20},
        {"max_number": 99},
        {"max_number": 99, "operators": "+-"},
        {"max_number": 999, "operators": "+-"},
        {"max_number": 999, "operators": "+-*"},
    ],
)
register(
    "forge/ToolRelay-v0",  # a Relay in which a small model calls the calculator now and then, untrained
    entry_point="forge_envs.teams.relay:Relay",
    oracle="forge_envs.oracles.relay:Oracle",
    tags=("2p", "cooperative", "tool"),
    levels=[{"max_number": most} for most in (9, 99, 999, 9_999, 99_999)],
    max_number=99,
    tool_format="plain",
    call_reward=0.2,
    asker="You write calls.",
    question="Question: 2 + 3\nAnswer: CALL calculator(2 + 3)\n"
    "Question: 7 + 4\nAnswer: CALL calculator(7 + 4)\nQuestion: {a} {op} {b}\nAnswer:",
)
register(
    "forge/AlphabetSort-v0",
    entry_point="forge_envs.games.alphabet_sort:AlphabetSort",
    oracle="forge_envs.oracles.alphabet_sort:oracle",
    tags=("1p", "multi-turn"),
    levels=[
        {"num_names": names, "num_added": added, "turns": turns}
        for names, added, turns in ((2, 1, 1), (3, 1, 2), (4, 2, 3), (5, 3, 4), (6, 4, 5))
    ],
)
register(
    "forge/LeducPoker-v0",
    entry_point="forge_envs.games.poker:LeducPoker",
    max_turns=8,
    tags=("2p", "zero-sum", "hidden-information"),
)
register(
    "forge/TreasureHunt-v0",
    entry_point="forge_envs.teams.treasure_hunt:TreasureHunt",
    oracle="forge_envs.oracles.treasure_hunt:Oracle",
    tags=("2p", "cooperative"),
    levels=[
        {"size": size, "rocks": rocks}
        for size, rocks in ((3, 0.0), (4, 0.2), (6, 0.25), (8, 0.3), (12, 0.35))
    ],
)
register(
    "forge/Negotiation-v0",
    entry_point="forge_envs.teams.negotiation:Negotiation",
    tags=("2p", "mixed-motive", "hidden-information"),
)
register(
    "forge/Debate-v0",
    entry_point="forge_envs.teams.debate:Debate",
    tags=("3p", "mixed-motive", "hidden-information"),
    levels=[{"below": below} for below in (100, 300, 1_000, 3_000, 10_000)],
)
register(
    "forge/TicTacToe-v0",
    entry_point="forge_envs.adapters.pettingzoo:tic_tac_toe",
    oracle="forge_envs.oracles.tic_tac_toe:oracle",
    max_turns=9,
    tags=("2p", "zero-sum", "board", "pettingzoo"),
)
register(
    "forge/ConnectFour-v0",
    entry_point="forge_envs.adapters.pettingzoo:connect_four",
    max_turns=42,
    tags=("2p", "zero-sum", "board", "pettingzoo"),
)
register(
    "forge/Shop-v0",
    entry_point="forge_envs.teams.shop:Shop",
    tags=("3p", "cooperative", "hidden-information", "tool"),
)
register(
    "forge/SoftwareTeam-v0",
    entry_point="forge_envs.teams.software_team:SoftwareTeam",
    tags=("3p", "cooperative", "hidden-information", "tool"),
    isolation="process",  # it runs code, which takes its time
)
register(
    "forge/Library-v0",
    entry_point="forge_envs.teams.library:Library",
    oracle="forge_envs.oracles.library:Oracle",
    tags=("2p", "cooperative", "hidden-information", "tool"),
    levels=[
        {"hops": hops, "towns": towns} for hops, towns in ((1, 4), (1, 20), (2, 12), (3, 20), (4, 40), (6, 60))
    ],
)
register(
    "forge/Tables-v0",
    entry_point="forge_envs.teams.tables:Tables",
    oracle="forge_envs.oracles.tables:Oracle",
    tags=("2p", "cooperative", "tool"),
    levels=[{"level": level, "orders": orders} for level, orders in enumerate((20, 20, 40, 60, 80, 120), 1)],
)
register(
    "forge/Codewords-v0",
    entry_point="forge_envs.games.codewords:Codewords",
    oracle="forge_envs.oracles.codewords:Oracle",
    tags=("2p", "cooperative", "hidden-information"),
    levels=[
        {"groups": groups, "size": size, "others": others, "near": near, "traps": traps, "spare": spare}
        for groups, size, others, near, traps, spare in (
            (1, 2, 4, 0, 0, 0), (2, 2, 4, 0, 0, 0), (2, 2, 6, 2, 1, 1), (3, 2, 8, 4, 1, 1), (3, 2, 10, 6, 2, 0),
            (4, 2, 12, 8, 2, 0),
        )
    ],
)  # fmt: skip
register(
    "forge/CodewordsDuel-v0",
    entry_point="forge_envs.games.codewords:Codewords",
    oracle="forge_envs.oracles.codewords:Oracle",
    tags=("4p", "zero-sum", "hidden-information"),
    teams=2,
    groups=2,
    size=3,
    others=6,
    near=3,
    traps=1,
    spare=3,
)
register(
    "forge/Village-v0",
    entry_point="forge_envs.games.village:Village",
    oracle="forge_envs.oracles.village:Oracle",
    tags=("5p", "hidden-information"),
    levels=[
        {"num_players": players, "wolves": wolves, "seer": seer, "healer": healer, "days": days}
        for players, wolves, seer, healer, days in (
            (6, 1, True, True, 5), (7, 1, True, False, 4), (5, 1, True, False, 3), (7, 2, True, True, 5),
            (7, 2, True, False, 4), (7, 2, False, False, 4),
        )
    ],
)  # fmt: skip
register(
    "forge/Fireworks-v0",
    entry_point="forge_envs.games.fireworks:Fireworks",
    oracle="forge_envs.oracles.fireworks:Oracle",
    tags=("2p", "cooperative", "hidden-information"),
    levels=[
        {"num_players": players, "colours": colours, "ranks": ranks, "hand": hand, "hints": hints, "fuses": fuses}
        for players, colours, ranks, hand, hints, fuses in (
            (2, 2, 2, 2, 5, 2), (2, 2, 3, 3, 5, 2), (2, 4, 3, 3, 6, 3), (3, 4, 4, 4, 7, 3), (3, 5, 5, 4, 8, 3),
            (4, 5, 5, 4, 8, 2),
        )
    ],
)  # fmt: skip
register(
    "forge/Commons-v0",
    entry_point="forge_envs.teams.commons:Commons",
    oracle="forge_envs.oracles.commons:oracle",
    tags=("3p", "mixed-motive"),
    levels=[
        {"num_players": players, "regrowth": regrowth}
        for players, regrowth in ((2, 3.0), (3, 2.0), (4, 1.6), (5, 1.4), (6, 1.25))
    ],
)
register(
    "forge/Kitchen-v0",
    entry_point="forge_envs.teams.kitchen:Kitchen",
    oracle="forge_envs.oracles.kitchen:Oracle",
    tags=("2p", "cooperative"),
    levels=[
        {"layout": layout, "onions": onions, "orders": orders, "rounds": rounds}
        for layout, onions, orders, rounds in (
            ("room", 1, 1, 50), ("room", 2, 1, 60), ("wall", 2, 1, 32), ("hatch", 2, 2, 50), ("ring", 2, 2, 84),
            ("hatch", 3, 2, 48),
        )
    ],
)  # fmt: skip
_DESK = {"kinds": 3, "knows_numbers": False, "rules": 3, "approvals": False, "customers": 4}
register(
    "forge/ServiceDesk-v0",
    entry_point="forge_envs.teams.service_desk:ServiceDesk",
    oracle="forge_envs.oracles.service_desk:Oracle",
    tags=("3p", "cooperative", "hidden-information", "tool"),
    levels=[
        {"kinds": 1, "knows_numbers": True, "rules": 0, "approvals": False, "customers": 2, "examples": True},
        {**_DESK, "rules": 0},
        _DESK,
        {**_DESK, "rules": 4, "approvals": True},
        {**_DESK, "rules": 6, "approvals": True, "alternatives": True, "customers": 8},
        {**_DESK, "rules": 6, "approvals": True, "alternatives": True, "customers": 12, "wishes": 2},
    ],
)
register(
    "forge/Repair-v0",
    entry_point="forge_envs.teams.repair:Repair",
    oracle="forge_envs.oracles.repair:Oracle",
    tags=("3p", "cooperative", "hidden-information", "tool"),
    isolation="process",  # it runs code, which takes its time
    levels=[
        {"modules": 1, "functions": 1, "faults": 1, "kinds": ["operator"]},
        {"modules": 1, "functions": 2, "faults": 1},
        {"modules": 2, "functions": 5, "faults": 1},
        {"modules": 2, "functions": 6, "faults": 2},
        {"modules": 3, "functions": 9, "faults": 3},
    ],
)
register_suite("core-v1", ["forge/KuhnPoker-v0", "forge/Relay-v0", "forge/AlphabetSort-v0"], episodes=32)
register_suite("team-v0", ["forge/Relay-v0", "forge/TreasureHunt-v0", "forge/Negotiation-v0", "forge/Debate-v0"])
register_suite(
    "duel-v0", ["forge/KuhnPoker-v0", "forge/LeducPoker-v0", "forge/TicTacToe-v0", "forge/ConnectFour-v0"]
)
register_suite(
    "teams-v1",
    [
        "forge/Library-v0",
        "forge/Tables-v0",
        "forge/Codewords-v0",
        "forge/Fireworks-v0",
        "forge/Kitchen-v0",
        "forge/ServiceDesk-v0",
        "forge/Repair-v0",
    ],
)
register_suite(
    "duels-v1",  # a pair of players has 2, 10 and 6 line-ups
    ["forge/CodewordsDuel-v0", "forge/Village-v0", "forge/Commons-v0"],
    episodes=32,
)
_SMALL = "KuhnPoker LeducPoker Relay AlphabetSort TreasureHunt Negotiation TicTacToe ConnectFour"
register_suite("diagnostics-v1", [f"forge/{game}-v0" for game in _SMALL.split()], episodes=32)
register_suite(
    "tools-v1",  # in a team of three, swapped seats are four times the games
    ["forge/Relay-v0", "forge/Shop-v0", "forge/SoftwareTeam-v0"],
    episodes=12,
    swap_seats=False,
)
_GAMES = (  # TextArena: five for one seat, five duels
    "FrozenLake GuessTheNumber LightsOut Mastermind TowerOfHanoi "
    "ConnectFour IteratedPrisonersDilemma KuhnPoker Nim TicTacToe"
)
register_suite("text-games-v1", [f"textarena/{game}-v0" for game in _GAMES.split()], episodes=12)
_GENERATORS = (  # reasoning-gym, at the generators' own settings
    "calendar_arithmetic chain_sum countdown family_relationships gcd knights_knaves letter_counting mini_sudoku "
    "number_sequence shortest_path simple_equations spell_backward syllogism word_sorting"
)
register_suite(
    "reasoning-v1",
    [f"reasoning-gym/{generator}-v0" for generator in _GENERATORS.split()],
    episodes=16,
    max_tokens=256,  # room to think
)
