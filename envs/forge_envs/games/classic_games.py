"""PettingZoo's own tic-tac-toe and connect four as text, through `forge_agents.wrap`.

In: the number of a square or column. Out: PettingZoo's rewards: 1 won, -1 lost, 0 drawn. Waits for nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
from gymnasium.spaces import Space

from forge_agents.envs.wrappers import WrappedEnv, wrap
from forge_agents.errors import ForgeError

_NUMBER = re.compile(r"(?<![\w.-])\d(?!\w|\.\d)", re.ASCII)


def tic_tac_toe(*, illegal_reward: float = -1.0) -> WrappedEnv:
    """Tic-tac-toe; seats ``player_1`` and ``player_2``.

    A text is the square whose number, 0 to 8, is the last digit that stands alone in it.

    Args:
        illegal_reward: Reward of a text without such a digit and of a square that is taken; the other gets 0.
    """
    return wrap(
        _module("tictactoe").raw_env(),
        obs_to_text=_squares,
        text_to_action=_last_number,
        legal_actions=_legal,
        instructions="You play tic-tac-toe. You are X, your opponent is O. Answer with the number of a free square.",
        illegal_reward=illegal_reward,
    )


def connect_four(*, illegal_reward: float = -1.0) -> WrappedEnv:
    """Connect four; seats ``player_0`` and ``player_1``.

    A text is the column whose number, 0 to 6, is the last digit that stands alone in it.

    Args:
        illegal_reward: Reward of a text without such a digit and of a full column; the other gets 0.
    """
    return wrap(
        _module("connect_four").raw_env(),
        obs_to_text=_columns,
        text_to_action=_last_number,
        legal_actions=_legal,
        instructions="You play connect four. You are X, your opponent is O. Answer with the number of a free column.",
        illegal_reward=illegal_reward,
    )


def _squares(seen: Mapping[str, Any], agent: str) -> str:
    signs = _signs(seen["observation"], free=np.arange(9).reshape(3, 3))
    return f"{_drawn(signs.T)}\n{_free(seen, agent)}"  # PettingZoo numbers the squares column by column


def _columns(seen: Mapping[str, Any], agent: str) -> str:
    signs = _signs(seen["observation"], free=np.full((6, 7), "."))
    return f"{_drawn(signs)}\n{' '.join('0123456')}\n{_free(seen, agent)}"


def _last_number(text: str, agent: str, space: Space[Any]) -> int:
    return int(_NUMBER.findall(text)[-1])


def _signs(planes: np.ndarray[Any, Any], free: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    own, other = planes[..., 0], planes[..., 1]
    return np.where(own == 1, "X", np.where(other == 1, "O", free.astype(str)))


def _drawn(signs: np.ndarray[Any, Any]) -> str:
    return "\n".join(" ".join(row) for row in signs)


def _legal(seen: Mapping[str, Any], agent: str) -> list[str]:
    return [str(move) for move in np.flatnonzero(seen["action_mask"])]


def _free(seen: Mapping[str, Any], agent: str) -> str:
    moves = _legal(seen, agent)
    return f"Free: {', '.join(moves)}" if moves else "Not your turn."


def _module(name: str) -> ModuleType:
    """PettingZoo's module of a game, which imports pygame, which greets."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return importlib.import_module(f"pettingzoo.classic.{name}.{name}")
    except ModuleNotFoundError as missing:
        raise ForgeError(
            f"PettingZoo's {name} needs {missing.name}: pip install pygame-ce, or 'pettingzoo[classic]' for all games"
        ) from None
