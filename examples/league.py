"""Self-play of three kinds: which policy holds against a perfect player of tic-tac-toe?

A transformer with a million weights reads the newest board. It imitates minimax against random moves until it loses two
thirds of its games against minimax. Then it plays 300 steps of 384 games. In the arm `mirror` it plays only against
itself. In the arm `regularized` it does the same, with a divergence from a reference that moves every 60 steps. In the
arm `league` it plays a third of the games against itself and the others against its snapshots, chosen by prioritized
fictitious self-play. All arms are evaluated against minimax, which they do not meet in training: 0 is the best possible
score, and -1 loses always. The control has learning rate 0. At the end the policies of the first seed meet each other,
the policy before training, a snapshot of the first arm, random moves and minimax.

    python examples/league.py [--arms regularized mirror league] [--seeds 0 1 2] [--steps 300] [--out runs/league]

A step takes five to seven seconds on two CPU cores. The script writes ``league.png``. Finished runs are not repeated,
and interrupted ones continue.
"""

import asyncio
import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import _study
import numpy as np
from rich.console import Console
from rich.table import Table

import forge_agents as fa
from forge_agents.models.tiny import tiny_model
from forge_agents.rollout.rollout import Rollout

GAME = "forge/TicTacToe-v0"
SIGNS = (  # only the nine signs of a board reach the model, without the rules before the first board
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}"
    "{{ message['content'].split('\nFree')[0][-17:].replace(' ', '').replace('\n', '') + '<|im_start|>' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{% endfor %}"
)
SAMPLING = fa.Sampling(max_tokens=4)
SELF_PLAY = {"regularized": 1.0, "mirror": 1.0, "league": 0.35}
DIVERGENCE = {"regularized": {"kl": "exact", "kl_coef": 0.4, "reference": 60}}
SNAPSHOTS = 8
LABELS = {
    "league": "league",
    "mirror": "mirror",
    "regularized": "mirror, moving reference",
    "control": "learning rate 0",
}


def untaught(folder):
    """Write a random model of a million weights that reads a board as nine letters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tiny_model(folder)
    torch.manual_seed(0)
    settings = json.loads((folder / "config.json").read_text())
    sizes = {"intermediate_size": 512, "num_hidden_layers": 4}
    LlamaForCausalLM(LlamaConfig(**settings | sizes)).save_pretrained(folder)
    tokenizer_config = folder / "tokenizer_config.json"
    tokenizer_config.write_text(json.dumps(json.loads(tokenizer_config.read_text()) | {"chat_template": SIGNS}))
    return folder


def games(count):
    """Return games of minimax against random moves."""
    chance, oracle = fa.Random(), fa.Oracle(name="player")
    pairs = [{"player_1": first, "player_2": second} for first, second in ((chance, oracle), (oracle, chance))]
    rollouts = [Rollout(make_env=partial(fa.make, GAME), env_id=GAME, policies=players) for players in pairs]

    async def play():
        return [(await rollouts[seed % 2].group(seed, 1)).episodes[0] for seed in range(count)]

    return asyncio.run(play())


def taught(args):
    """Return the policy after it has imitated minimax."""
    folder = args.out / "taught"
    start = folder / "start"
    if not (folder / "export").exists():
        untaught(start)
    learner = fa.LearnerConfig(lr=1e-3, warmup_steps=5, lr_decay="linear", compute_dtype="float32", threads=1)
    player = fa.Policy(str(start), name="player", sampling=SAMPLING, context="newest")
    config = fa.SFTConfig(batch_size=256, learner=learner)
    return _study.after_sft(player, folder, config, lambda: games(args.games), epochs=args.epochs)


def train(arm, player, seed, args, *, control=False):
    """Train one run. Its curve has rows of step, reward against minimax and entropy of a token."""
    folder = args.out / ("control" if control else f"{arm}-{seed}")
    if result := _study.saved(folder):
        return result
    learner = fa.LearnerConfig(
        lr=0.0 if control else args.lr,
        warmup_steps=2,
        lr_decay="linear",
        compute_dtype="float32",
        threads=1,  # two would wait for each other at products as small as these
        **DIVERGENCE.get(arm, {}),
    )
    config = fa.GRPOConfig(
        seed=seed,
        group_size=16,
        groups_per_step=24,
        max_resamples=0,  # all arms play the same number of games
        loss_normalization="sampled" if arm in DIVERGENCE else None,  # zero-variance groups have a divergence, too
        credit=fa.Credit(by=("seed", "role"), scale="none"),
        learner=learner,
        engine=fa.EngineConfig(max_model_len=128, threads=1),
        eval_every=args.eval_every,
        eval_episodes=args.episodes,
        checkpoint_every=args.eval_every,
        max_empty_steps=args.steps,  # a policy that has collapsed is a result
    )
    options = {"snapshot_every": max(1, args.steps // SNAPSHOTS), "pool": SNAPSHOTS, "held_out": (fa.Oracle(),)}
    league = fa.League(player, self_play=SELF_PLAY[arm], opponents="pfsp", **options)
    with fa.GRPOTrainer(league, config=config, out_dir=folder) as trainer:
        before, _ = _study.reward_before(trainer, GAME, folder, episodes=args.episodes)
        rows = trainer.fit(GAME, steps=args.control_steps if control else args.steps).metrics
    names = ("eval/reward", "learner/entropy")
    curve = [[0, before, None]]
    curve += [[row["step"], *(row.get(name) for name in names)] for row in rows if names[0] in row]
    seconds = sum(row["time/step_s"] for row in rows)
    facts = {"arm": "control" if control else arm, "seed": seed}
    facts |= {"before": curve[0][1:], "after": curve[-1][1:]}
    return _study.save(folder, {**facts, "curve": curve, "seconds": seconds})


def meetings(player, args):
    """Return the shares of games that each player won, drew and lost against each other one, in percent."""
    players = {"random": fa.Random(), "minimax": fa.Oracle(), "before": player}
    runs = {arm: args.out / f"{arm}-{args.seeds[0]}" for arm in args.arms}
    first = next(iter(runs.values()))
    models = {f"step-{int(path.name[-6:])}": path for path in sorted(first.glob("league/player-*"))[:1]}
    models |= {arm: run / "export" for arm, run in runs.items()}
    for name, model in models.items():
        players[name] = replace(player, model=str(model.absolute()), name=name)
    engine = fa.EngineConfig(max_model_len=128, threads=1)
    report = fa.benchmark(players, GAME, episodes=args.episodes, engine=engine, out_dir=args.out / "bench")
    ends = {pair: [0, 0, 0] for pair in itertools.permutations(players, 2)}
    for record in report.records:
        for seat, other in itertools.permutations(record.seats.values(), 2):
            if seat.player != other.player:
                ends[seat.player, other.player][int(np.sign(other.reward - seat.reward)) + 1] += 1
    table = Table("player", *players, title="won, drawn and lost games in percent")
    for name in players:
        cells = (ends.get((name, other), [0, 0, 0]) for other in players)
        table.add_row(name, *(" ".join(f"{100 * n / max(1, sum(cell)):.0f}" for n in cell) for cell in cells))
    return table


def main(words=None):
    defaults = {"seeds": [0, 1, 2], "steps": 300, "control_steps": 20, "lr": 5e-4, "games": 12000, "epochs": 4}
    parser = _study.parser(__doc__, **defaults, eval_every=20, episodes=256, out=Path("runs/league"))
    parser.add_argument("--arms", nargs="+", choices=SELF_PLAY, default=list(SELF_PLAY))
    args = parser.parse_args(words)
    player = taught(args)
    results = [train(arm, player, seed, args) for arm in args.arms for seed in args.seeds]
    if args.control_steps:
        results.append(train(args.arms[0], player, args.seeds[0], args, control=True))
    table = Table("arm", "seed", *("start", "best", "at step", "last", "entropy", "seconds"), title="against minimax")
    for result in results:
        steps, rewards, entropies = zip(*result["curve"], strict=True)
        best = int(np.argmax(rewards))
        row = [f"{rewards[0]:.3f}", f"{rewards[best]:.3f}", str(steps[best]), f"{rewards[-1]:.3f}"]
        row.append("" if entropies[-1] is None else f"{entropies[-1]:.2f}")
        table.add_row(LABELS[result["arm"]], str(result["seed"]), *row, f"{result['seconds']:.0f}")
        result["curve"] = [row[:2] for row in result["curve"]]
    Console().print(table)
    Console().print(meetings(player, args))
    labels = {"title": f"{GAME}, self-play of three kinds", "value": "reward against minimax"}
    _study.draw(results, LABELS, args.out / "league.png", **labels)


if __name__ == "__main__":
    main()
