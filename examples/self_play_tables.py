"""Self-play with tables: which settings converge to an equilibrium, and which ones only move in circles?

A softmax over the legal actions at every information set plays Kuhn poker, Leduc poker or tic-tac-toe. Matches,
snapshots and credit are those of `fa.GRPOTrainer`, only the model is a table. All arms but two play against themselves.
`regularized` has a divergence from a reference that moves (`kl="k2"`, `kl_coef`, `reference`), `mirror`
has none. `league` draws snapshots by PFSP and `regret` by regret. The control has learning rate 0.

    python examples/self_play_tables.py kuhn leduc tictactoe [--arms regularized mirror league regret] [--seeds 0 1 2]
        [--steps 4000] [--out runs/self_play_tables]

The measure is exploitability, the amount that the best opponent wins per game, or that minimax wins in tic-tac-toe. A
run takes a minute on a CPU core. The script writes ``self_play_tables.png``. Finished runs are not repeated.
"""

import argparse
import copy
from dataclasses import dataclass
from pathlib import Path

import _study
import numpy as np
from rich.console import Console
from rich.table import Table

import forge_agents as fa
from forge_agents.bench import GameTree, average_strategy, exploitability
from forge_trainers.selfplay.league import LeagueConfig, draw_matches
from forge_trainers.selfplay.matchmaking import Standings

CREDIT = fa.Credit(by=("seed", "role"), scale="none")
ARMS = {"regularized": "mirror, moving reference", "mirror": "mirror", "league": "league, PFSP",
        "regret": "league, regret", "regularized-control": "learning rate 0"}  # fmt: skip
LEAGUES = {"league": {"opponents": "pfsp", "self_play": 0.35}, "regret": {"opponents": "regret", "self_play": 0.35}}
POINTS = 20
"""Number of points of a curve."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A game and its settings."""

    env_id: str
    steps: int
    groups: int
    group_size: int
    lr: float
    kl_coef: float
    reference: int


SETUPS = {
    "kuhn": Setup(env_id="forge/KuhnPoker-v0", steps=4000, groups=16, group_size=16, lr=0.03, kl_coef=0.5,
                  reference=200),
    "leduc": Setup(env_id="forge/LeducPoker-v0", steps=6000, groups=64, group_size=8, lr=0.02, kl_coef=1.0,
                   reference=1000),
    "tictactoe": Setup(env_id="forge/TicTacToe-v0", steps=1000, groups=8, group_size=16, lr=0.1, kl_coef=0.3,
                       reference=250),
}  # fmt: skip


class Game:
    """All positions of a game as arrays. Boards that several orders of moves reach are one position.

    A decision has a place, the information set of its player: a row of a table. A position without a decision ends the
    game.
    """

    def __init__(self, env_id):
        env = fa.make(env_id)
        env.reset(seed=0)
        self.agents, self.is_board = tuple(env.possible_agents), not hasattr(env.unwrapped, "openings")
        openings = [(1.0, env)] if self.is_board else list(env.unwrapped.openings())
        self.tree = None if self.is_board else GameTree(env_id)
        self.rows, self.moves, self._boards = {}, [], {}
        self._place, self._pay, self._children, self._depth = [], [], [], []
        self.roots = np.array([self._add(opening, 0) for _, opening in openings])
        self.chances = np.array([chance for chance, _ in openings])
        self.place, self.pay, self.depth = map(np.array, (self._place, self._pay, self._depth))
        width = max(map(len, self.moves))
        self.children = np.array([[*each, *[0] * (width - len(each))] for each in self._children])
        self.legal = np.array([[column < len(moves) for column in range(width)] for moves in self.moves])
        self.player = np.array([self.agents.index(agent) for agent, _ in self.rows])

    def _add(self, env, depth):
        """Add a position and all that follow. Returns its number."""
        agent = env.agent_selection
        ended = not env.agents or any(env.terminations.values())
        key = (agent, str(env.observe(agent)))
        if self.is_board and not ended and key in self._boards:
            return self._boards[key]
        number = len(self._place)
        moves = () if ended else tuple(map(str, env.infos[agent]["legal_actions"]))
        self._place.append(-1 if ended else self.rows.setdefault(key, len(self.rows)))
        self._pay.append(float(env.rewards[self.agents[0]]) if ended else 0.0)
        self._depth.append(depth)
        self._children.append([])
        if not ended:
            self._boards[key] = number
            if len(self.moves) < len(self.rows):
                self.moves.append(moves)
        for move in moves:
            after = copy.deepcopy(env)
            after.step(move)
            self._children[number].append(self._add(after, depth + 1))
        return number

    def strategy(self, logits):
        """Return the probability of each action at each place."""
        values = np.where(self.legal, logits, -np.inf)
        values = np.exp(values - values.max(axis=-1, keepdims=True))
        return values / values.sum(axis=-1, keepdims=True)

    def play(self, tables, table_of, roots, rng):
        """Play games at once. `table_of` has the table of each game and player.

        Returns arrays of decisions (game, place, action) and the first agent's reward of each game.
        """
        at, live, decisions = roots.copy(), np.arange(len(roots)), []
        while len(live):
            places = self.place[at[live]]
            chances = tables[table_of[live, self.player[places]], places]
            actions = (chances.cumsum(axis=1) < rng.random((len(live), 1))).sum(axis=1)
            actions = np.minimum(actions, self.legal[places].sum(axis=1) - 1)  # the sum may be just below 1
            decisions.append((live, places, actions))
            at[live] = self.children[at[live], actions]
            live = live[self.place[at[live]] >= 0]
        return [np.concatenate(parts) for parts in zip(*decisions, strict=True)], self.pay[at]

    def shares(self, first, second):
        """Return the shares of games that `first` wins, draws and loses as the first agent against `second`."""
        outcomes = np.stack([self.pay > 0, self.pay == 0, self.pay < 0], axis=1) * (self.place < 0)[:, None]
        tables = np.where((self.player == 0)[:, None], first, second)
        return self.chances @ self._backward(outcomes.astype(float), lambda places: tables[places])[self.roots]

    def optimal(self):
        """Return the strategy that draws one of the best moves of minimax. Only for boards."""
        values = self._backward(self.pay[:, None], None)[:, 0]
        numbers = np.flatnonzero(self.place >= 0)
        table = np.zeros(self.legal.shape)
        sign = np.where(self.player[self.place[numbers]] == 0, 1, -1)[:, None]
        after = np.where(self.legal[self.place[numbers]], sign * values[self.children[numbers]], -np.inf)
        table[self.place[numbers]] = after == after.max(axis=1, keepdims=True)
        return table / table.sum(axis=1, keepdims=True)

    def _backward(self, values, chances_of):
        """Return the values of all positions, for a strategy, or for the best actions if `chances_of` is None."""
        values = values.copy()
        for depth in range(self.depth.max(), -1, -1):
            numbers = np.flatnonzero((self.depth == depth) & (self.place >= 0))
            if not len(numbers):
                continue
            places, after = self.place[numbers], values[self.children[numbers]]
            if chances_of is not None:
                values[numbers] = (chances_of(places)[..., None] * after).sum(axis=1)
                continue
            sign = np.where(self.player[places] == 0, 1, -1)[:, None]
            scores = np.where(self.legal[places], sign * after[..., 0], -np.inf)
            values[numbers, 0] = sign[:, 0] * scores.max(axis=1)
        return values

    def measure(self, tables):
        """Return the exploitability of tables of which one is drawn for each game, or what minimax wins on a board."""
        if self.is_board:
            return -float(np.mean([score(self, table, self.optimal()) for table in tables]))
        return exploitability(self.tree, average_strategy(self.tree, [self._function(table) for table in tables]))

    def _function(self, table):
        def strategy(agent, observation, legal):
            return dict(zip(legal, table[self.rows[agent, observation]].tolist(), strict=False))

        return strategy


def score(game, table, other):
    """Return the mean reward of a table on a board against another one, as both agents."""
    signs = np.array([1, 0, -1])
    return float(game.shares(table, other) @ signs - game.shares(other, table) @ signs) / 2


def results(game, table, other):
    """Return the shares of games that a table wins, draws and loses against another one, over both agents."""
    return ((game.shares(table, other) + game.shares(other, table)[::-1]) / 2).tolist()


def advantages_of(rewards, own, size):
    """Return the advantage of each game and player, NaN where another table plays or the group's rewards are equal."""
    advantages = np.full(own.shape, np.nan)
    for start in range(0, len(rewards), size):
        group = slice(start, start + size)
        for player, sign in enumerate((1, -1)):
            if own[start, player] and (values := CREDIT.advantages(sign * rewards[group])) is not None:
                advantages[group, player] = values
    return advantages


def gradient_of(chances, place, action, weight):
    """Return the gradient of the mean over decisions of weight times log-probability."""
    gradient = np.zeros_like(chances)
    np.add.at(gradient, (place, action), weight)
    np.subtract.at(gradient, place, weight[:, None] * chances[place])
    return gradient / max(1, len(weight))


def train(name, arm, seed, game, args):
    """Train one run. Its curve has rows of step and exploitability."""
    setup, folder = SETUPS[name], args.out / f"{name}-{arm}-{seed}"
    if result := _study.saved(folder):
        return result
    rng, steps = np.random.default_rng(seed), args.steps or setup.steps
    lr, kl_coef = setup.lr * (arm != "regularized-control"), setup.kl_coef * (arm == "regularized")
    steps = max(1, steps // 10) if arm == "regularized-control" else steps
    every = max(1, steps // POINTS)
    league = LeagueConfig(snapshot_every=max(1, steps // 200), **LEAGUES.get(arm, {"self_play": 1.0}))
    standings, past = Standings(start="table-000000", pool=league.pool), {}
    logits = np.zeros(game.legal.shape)
    reference = past["table-000000"] = game.strategy(logits)
    moments, curve, points = [np.zeros_like(logits), np.zeros_like(logits)], [], [reference]
    curve.append([0, game.measure(points)])
    for step in range(steps):
        matches = draw_matches(standings, league, game.agents, setup.groups, key=(seed, step, 0))
        names = ["", *past]
        tables = np.stack([game.strategy(logits), *past.values()])
        table_of = [[names.index(m.opponent) * (a != m.agent) for a in game.agents] for m in matches]
        table_of = np.repeat(table_of, setup.group_size, axis=0)
        roots = np.repeat(rng.choice(game.roots, size=setup.groups, p=game.chances), setup.group_size)
        (number, place, action), rewards = game.play(tables, table_of, roots, rng)
        weight = advantages_of(rewards, table_of == 0, setup.group_size)[number, game.player[place]]
        used = ~np.isnan(weight)
        place, action, weight = place[used], action[used], weight[used]
        if kl_coef:  # the gradient of k2 at a sampled action
            weight = weight + kl_coef * np.log(reference[place, action] / tables[0, place, action])
        gradient = gradient_of(tables[0], place, action, weight)
        for number, (decay, value) in enumerate(((0.9, gradient), (0.999, gradient**2))):  # Adam
            moments[number] = decay * moments[number] + (1 - decay) * value
        mean, square = moments[0] / (1 - 0.9 ** (step + 1)), moments[1] / (1 - 0.999 ** (step + 1))
        logits = logits + lr * (1 - step / steps) * mean / (np.sqrt(square) + 1e-8)
        if (step + 1) % setup.reference == 0:
            reference = game.strategy(logits)
        record(standings, matches, rewards.reshape(len(matches), -1), game.agents)
        if league.self_play < 1 and (step + 1) % league.snapshot_every == 0:
            snapshot = f"table-{step + 1:06d}"
            past[snapshot] = game.strategy(logits)
            for removed in standings.add(snapshot, step + 1):
                del past[removed.name]
        if (step + 1) % every == 0:
            points.append(game.strategy(logits))
            curve.append([step + 1, game.measure(points[-1:])])
    result = {"arm": f"{name}-{arm}", "seed": seed, "before": [curve[0][1], None], "after": [curve[-1][1], None]}
    folder.mkdir(parents=True, exist_ok=True)
    return _study.save(folder, {**result, **summary(game, curve, points), "points": curve})


def record(standings, matches, rewards, agents):
    """Record the margins of a step's games against snapshots."""
    margins = {}
    for match, each in zip(matches, rewards, strict=True):
        if match.opponent:
            margins.setdefault(match.opponent, []).extend(2 * each * (1 if match.agent == agents[0] else -1))
    standings.record(margins)


def summary(game, curve, points):
    """Return the average of the later points, the best one, and on a board the results by opponent."""
    result = {"average": game.measure(points[len(points) // 2 :]), "best": min(value for _, value in curve)}
    if not game.is_board:
        return result
    opponents = {"random": game.legal / game.legal.sum(axis=1, keepdims=True), "minimax": game.optimal()}
    opponents |= {"half": points[len(points) // 2]}
    games = {who: results(game, points[-1], table) for who, table in opponents.items()}
    return result | {"games": games, "worst": min(score(game, points[-1], table) for table in points[:-1])}


def draw(runs, picture):
    """Draw the curves of runs: a panel for each game, a color for each arm."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(run["game"] for run in runs))
    figure = Figure(figsize=(4.5 * len(names), 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for number, (arm, label) in enumerate(ARMS.items()):
            curves = [run["points"] for run in runs if run["arm"] == f"{name}-{arm}"]
            for curve in curves:
                axes.plot(*zip(*curve, strict=True), color=f"C{number}", label=label if curve is curves[0] else None)
        axes.set(title=SETUPS[name].env_id, xlabel="step", ylabel="exploitability per game", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(picture, dpi=120)
    print(f"plot {picture}")


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("game", nargs="+", choices=SETUPS)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=0, help="optimizer steps; 0: those of the game")
    parser.add_argument("--out", type=Path, default=Path("runs/self_play_tables"), help="folder of the runs")
    args = parser.parse_args(words)
    runs = []
    for name in args.game:
        game = Game(SETUPS[name].env_id)
        runs += [{**train(name, arm, seed, game, args), "game": name} for arm in args.arms for seed in args.seeds]
    table = Table("arm", "seed", "before", "last", "average", "best", "wins/draws/losses", title="exploitability")
    for run in runs:
        values = (f"{value:.3f}" for value in (run["before"][0], run["after"][0], run["average"], run["best"]))
        games = [
            f"{who} {'/'.join(f'{share:.2f}' for share in shares)}" for who, shares in run.get("games", {}).items()
        ]
        table.add_row(run["arm"], str(run["seed"]), *values, "\n".join(games))
    Console().print(table)
    draw(runs, args.out / "self_play_tables.png")


if __name__ == "__main__":
    main()
