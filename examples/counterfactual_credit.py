"""Counterfactual credit or group baselines, by sampled tokens, on three teams whose roles differ in influence.

Agents act in turn and share a reward at the end. Each has a table of probabilities: four answers to each of four signs,
one sampled token per decision. Rewards become advantages by `fa.Credit.assign`, as in the trainer, and the gradient is
that of REINFORCE.

- convoy: a leader and four drivers. The leader's right answer is worth 0.8, that of a driver 0.05.
- guest: the same, but the leader is a random player that does not learn.
- expedition: a scout and three climbers, who act twice each. A climber's right answer is worth a sixth, but nothing if
  the scout was wrong: the climbers then have no influence.

Group baselines compare eight episodes with the same signs. Counterfactual arms play each episode once, and decisions of
it again. All arms sample the same number of tokens, alternatives included. The learning rate of each arm and the tokens
of a step are the best of several, chosen with other seeds.

    python examples/counterfactual_credit.py [--seeds 0 1 2] [--tokens 25600] [--out runs/counterfactual_credit]

The script takes twenty minutes on one CPU core and writes a picture for each team. Finished runs are not repeated.
"""

import itertools
from pathlib import Path

import _study
import numpy as np
from rich.console import Console
from rich.table import Table

import forge_agents as fa
from forge_trainers.rl.credit import Scored

CHOICES = 4
"""Number of signs, and of answers. The right answer to a sign is its number."""
TOKENS_PER_STEP = (256, 1024)
RATES = (4, 8, 16, 32, 64, 128)
TUNING_SEEDS = (100, 101, 102)
STEP = {"scale": "batch_std"}
FORKS = {"baseline": "counterfactual", **STEP}
ARMS = {
    "mean / std, by role (GRPO)": fa.Credit(),
    "mean / std, all roles": fa.Credit(by=("seed",)),
    "mean / std, by role and turn": fa.Credit(by=("seed", "role", "turn")),
    "leave one out / std of the step": fa.Credit(baseline="leave_one_out", **STEP),
    "counterfactual, every, k=1 / std of the step": fa.Credit(samples=1, **FORKS),
    "counterfactual, every, k=4 / std of the step": fa.Credit(samples=4, **FORKS),
    "counterfactual, one random, k=1 / std of the step": fa.Credit(samples=1, decisions=1, **FORKS),
    "control, learning rate 0": fa.Credit(),
}
TEAMS = {"convoy": [0, 1, 2, 3, 4], "guest": [0, 1, 2, 3, 4], "expedition": [0, 1, 2, 3, 1, 2, 3]}
"""The agent of each decision."""


def reward(team, right_nt):
    """Return the reward of each episode, given which decisions are right. Multilinear in `right_nt`."""
    if team != "expedition":
        return 0.8 * right_nt[:, 0] + 0.05 * right_nt[:, 1:].sum(axis=1)
    return right_nt[:, 0] * right_nt[:, 1:].mean(axis=1)


def softmax(logits):
    values = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return values / values.sum(axis=-1, keepdims=True)


def sample(probabilities, signs_nt, agents_t, rng):
    """Sample an answer to each sign."""
    cumulative = probabilities[agents_t, signs_nt].cumsum(axis=-1)
    return (rng.random((*signs_nt.shape, 1)) > cumulative[..., :-1]).sum(axis=-1)


def trajectories(rewards_n, agents_t, group_size, alternatives):
    """Return each agent's trajectory in each episode, for `fa.Credit`, and the decisions of the trajectory."""
    scored, places = [], []
    for number, value in enumerate(rewards_n.tolist()):
        for agent in sorted(set(agents_t)):
            decisions = np.flatnonzero(np.equal(agents_t, agent)).tolist()
            lengths = [1] * len(decisions)
            again = {
                place: [
                    Scored(group=0, role=str(agent), reward=other, response_tokens=lengths)
                    for other in alternatives[number, decision]
                ]
                for place, decision in enumerate(decisions)
                if (number, decision) in alternatives
            }
            facts = {"group": number // group_size, "role": str(agent), "response_tokens": lengths}
            scored.append(Scored(reward=value, alternatives=again, **facts))
            places.append((number, decisions))
    return scored, places


def collect(team, credit, probabilities, step_tokens, rng):
    """Sample the episodes of a step and compute their advantages. Returns signs, answers, advantages, tokens."""
    agents_t = TEAMS[team]
    num, learning = len(agents_t), range(team == "guest", len(agents_t))
    forks, every = credit.baseline == "counterfactual", credit.decisions == "every"
    num_again = (len(learning) if every else credit.decisions) * np.mean([num - t for t in learning])
    size = 1 if forks else 8
    count = round(step_tokens / (num + forks * credit.samples * num_again) / size) * size
    signs_nt = rng.integers(CHOICES, size=(count // size, num)).repeat(size, axis=0)
    answers_nt = sample(probabilities, signs_nt, agents_t, rng)
    rewards_n, tokens, alternatives = reward(team, answers_nt == signs_nt), answers_nt.size, {}
    for number in range(count if forks else 0):
        for decision in learning if every else rng.choice(learning, credit.decisions, replace=False).tolist():
            others = answers_nt[number].repeat(credit.samples).reshape(num, -1).T
            signs = signs_nt[number][None].repeat(credit.samples, axis=0)
            others[:, decision:] = sample(probabilities, signs[:, decision:], agents_t[decision:], rng)
            alternatives[number, decision] = reward(team, others == signs).tolist()
            tokens += others[:, decision:].size
    scored, places = trajectories(rewards_n, agents_t, size, alternatives)
    advantages_nt = np.zeros(signs_nt.shape)
    for (number, decisions), row in zip(places, credit.assign(scored), strict=True):
        if row is not None:
            advantages_nt[number, decisions] = row
    return signs_nt, answers_nt, advantages_nt, tokens


def train(team, credit, setting, *, seed, tokens):
    """Train one team. Returns its curve: rows of sampled tokens and the exact expected reward.

    `setting` is the number of tokens of a step and the learning rate.
    """
    (step_tokens, rate), rng, agents_t = setting, np.random.default_rng(seed), TEAMS[team]
    logits = np.zeros((max(agents_t) + 1, CHOICES, CHOICES))
    every_sign = np.arange(CHOICES)[:, None].repeat(len(agents_t), axis=1)
    curve, count = [], 0
    for step in range(tokens // step_tokens + 1):
        probabilities = softmax(logits)
        right_t = probabilities[agents_t, every_sign, every_sign].mean(axis=0)  # decisions are independent
        curve.append([step * step_tokens, float(reward(team, right_t[None])[0])])
        signs_nt, answers_nt, advantages_nt, sampled = collect(team, credit, probabilities, step_tokens, rng)
        count += sampled
        gradient = np.zeros_like(logits)
        agents_nt = np.broadcast_to(agents_t, signs_nt.shape)
        np.add.at(gradient, (agents_nt, signs_nt, answers_nt), advantages_nt)
        np.add.at(gradient, (agents_nt, signs_nt), -advantages_nt[..., None] * probabilities[agents_nt, signs_nt])
        gradient[: team == "guest"] = 0.0
        logits += rate * gradient / len(signs_nt)
    scale = count / (tokens + step_tokens)  # a step has a whole number of episodes
    return [[round(scale * place), value] for place, value in curve]


def run(team, arm, setting, seed, args):
    """Train one arm with one seed, unless its result is in a file."""
    folder = args.out / team / arm.replace(" ", "").replace("/", "-").replace(",", "-")
    folder /= "{}-{:g}-{}".format(*setting, seed)
    if result := _study.saved(folder):
        return result
    folder.mkdir(parents=True, exist_ok=True)
    curve = train(team, ARMS[arm], setting, seed=seed, tokens=args.tokens)
    return _study.save(folder, {"arm": arm, "seed": seed, "setting": setting, "curve": curve})


def area(result):
    """Return the mean of a curve. A high mean needs a team that learns early and stays good."""
    return float(np.mean([value for _, value in result["curve"]]))


def study(team, args):
    """Train all arms of one team. Returns the results."""
    results = []
    for arm in ARMS:
        settings = [(TOKENS_PER_STEP[0], 0.0)]
        if "control" not in arm:
            settings = list(itertools.product(TOKENS_PER_STEP, RATES))
        tuning = {each: [area(run(team, arm, each, seed, args)) for seed in TUNING_SEEDS] for each in settings}
        best = max(settings, key=lambda each: np.mean(tuning[each]))
        results += [run(team, arm, best, seed, args) for seed in args.seeds]
    return results


def show(team, results, args):
    """Print a table of one team and draw its curves."""
    points = [args.tokens // 10, args.tokens // 3, args.tokens]
    table = Table("credit", "tokens a step", "rate", *(f"{point:,} tokens" for point in points), "mean", title=team)
    for arm in ARMS:
        of_arm = [result for result in results if result["arm"] == arm]
        cells = [f"{value:g}" for value in of_arm[0]["setting"]]
        for point in points:
            rewards = [np.interp(point, *np.array(result["curve"]).T) for result in of_arm]
            cells.append(f"{np.mean(rewards):.3f} ({min(rewards):.3f} to {max(rewards):.3f})")
        table.add_row(arm, *cells, f"{np.mean([area(result) for result in of_arm]):.3f}")
    Console(width=170).print(table)
    options = {"title": f"{team}, tabular policies", "value": "expected reward", "over": "sampled tokens"}
    _study.draw(results, {arm: arm for arm in ARMS}, args.out / f"{team}.png", **options)


def main(words=None):
    defaults = {"seeds": [0, 1, 2]}
    parser = _study.parser(__doc__, **defaults, out=Path("runs/counterfactual_credit"))
    parser.add_argument("--tokens", type=int, default=25600, help="number of sampled tokens of a run")
    parser.add_argument("--teams", nargs="+", choices=list(TEAMS), default=list(TEAMS))
    args = parser.parse_args(words)
    for team in args.teams:
        show(team, study(team, args), args)


if __name__ == "__main__":
    main()
