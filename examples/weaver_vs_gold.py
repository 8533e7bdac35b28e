"""Can weak verifiers replace gold labels? The same GRPO run with four rewards, three seeds each.

A 135M model learns to add (``--task sums``), or two agents learn to search a library and to cite their sources
(``--task library``). Weak verifiers score their texts: the same model with several prompts, agreement and similarity
within the group, and features such as form and length. No verifier knows the answer, and each alone is often wrong. The
arms differ in the reward only: (a) the best single verifier, chosen with gold labels, (b) the mean of all verifiers,
(c) our ensemble, which uses no labels, with P(correct) as the reward, (d) the same ensemble with log-odds as the
reward, (e) the gold answer. All arms are evaluated by the gold answer on held-out seeds.

    python examples/weaver_vs_gold.py [--task sums] [--seeds 0 1 2] [--steps 20] [--out runs/weaver]

The script takes two hours on two CPU cores (one for the library), mostly for the judges, and writes
``weaver_vs_gold.png``. Finished runs are not repeated. Interrupted ones start again.
"""

import contextlib
import functools
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _study
import numpy as np
from rich.console import Console
from rich.table import Table

import forge_agents as fa
from forge_agents import Ensemble, EnvReward, Rule
from forge_envs.teams.signs import calls_work
from forge_verifiers import EmbeddingSimilarity, Judge, Length, Regex, Scale, SelfConsistency

ARMS = {"single": "(a) best single verifier", "mean": "(b) plain mean", "ours": "(c) ensemble, no labels",
        "log_odds": "(d) ensemble, log-odds", "gold": "(e) gold answers"}  # fmt: skip


# ---- sums


class Sums(fa.TurnEnv):
    """One agent adds two numbers. The last integer of its text counts. Reward: 1 if right, else 0."""

    possible_agents = ["solver"]

    def setup(self, rng):
        self.a, self.b = (int(n) for n in rng.integers(1, 21, size=2))
        self.infos["solver"] = {"a": self.a, "b": self.b}

    def instructions(self, agent):
        return "You are a calculator. You only write numbers."

    def observe_text(self, agent):
        return f"Calculate {self.a} + {self.b}. Write the result as a number."

    def act(self, agent, action):
        return fa.Outcome(rewards={agent: float(last_integer(action) == self.a + self.b)}, done=True)


def last_integer(text):
    result = re.findall(r"\d{1,9}", text, re.ASCII)
    return int(result[-1]) if result else None


def noisy_test(trajectory):
    """Test that expects a wrong answer in three of ten questions, and accepts results that are two off."""
    number, a, b = last_integer(trajectory.turns[-1].action), trajectory.info["a"], trajectory.info["b"]
    luck = random.Random(1000 * a + b)
    expected = a + b + (luck.choice([-10, -3, 3, 10]) if luck.random() < 0.3 else 0)
    return number is not None and abs(number - expected) <= 2


@functools.cache
def weak_verifiers(model):
    """Eight weak verifiers. No verifier adds. The three judges share one engine, and so their errors."""
    engine = fa.EngineConfig(max_model_len=2048)
    judge = functools.partial(Judge, max_chars=400, seed=0)
    correct = judge(model, "The answer is the correct result of the task.", name="judge: correct", engine=engine)
    return [
        correct,
        judge(correct, "A strict teacher who calculates it herself accepts the answer.", name="judge: teacher"),
        judge(correct, "The number in the answer is right.", answer=Scale(), name="judge: marks"),
        SelfConsistency(extract=lambda t: str(last_integer(t.turns[-1].action) or "")),
        EmbeddingSimilarity(model, against="group", floor=0.5, threads=1, name="embedding"),
        Rule(noisy_test, name="noisy test"),
        Regex(pattern=r"\D*\d{1,9}\D*", full=True, name="one number"),
        Length(high=6, slack=6, unit="words", name="brief"),
    ]


# ---- a library: the pages that an agent read, and its answer, tell how likely the answer is right


def read_by(trajectory):
    """Return all that an agent read: the question, and pages or a note."""
    return "\n".join(turn.observation for turn in trajectory.turns)


def given(trajectory):
    """Return the team's answer without citations, in lower case; empty if it gave none."""
    return trajectory.info.get("given", "")


def cited(trajectory):
    return [f"[{number}]" for number in trajectory.info.get("cited", ())]


def holds(text, words):
    return bool(words) and bool(re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text, re.IGNORECASE))


def was_read(trajectory):
    """Whether the agent read the answer outside the question."""
    question = trajectory.info.get("question", "")
    return holds(read_by(trajectory).replace(question, ""), given(trajectory))


def cites_what_was_read(trajectory):
    """Return the share of the cited pages that the agent read about; 0 without citations."""
    numbers, text = cited(trajectory), read_by(trajectory)
    return sum(number in text for number in numbers) / len(numbers) if numbers else 0.0


def on_a_cited_page(trajectory):
    """Whether a line with a cited number contains the answer. The number itself counts: a hole that training finds."""
    lines = read_by(trajectory).splitlines()
    return any(holds(line, given(trajectory)) for number in cited(trajectory) for line in lines if number in line)


def fits_the_question(trajectory):
    """Whether the answer is a year if the question asks for one, else words without digits."""
    form = r"\d{4}" if "year" in trajectory.info.get("question", "") else r"[^\W\d]+( [^\W\d]+)?"
    return bool(re.fullmatch(form, given(trajectory)))


def with_what_was_read(trajectory):
    """Return the text that a judge reads."""
    return f"{read_by(trajectory)}\nAnswer: {given(trajectory)} {' '.join(cited(trajectory))}"


@functools.cache
def library_verifiers(model):
    """Ten weak verifiers. The two judges share one engine, and so their errors."""
    engine = fa.EngineConfig(max_model_len=2048)
    judge = functools.partial(Judge, max_chars=1600, view=with_what_was_read, seed=0)
    correct = judge(model, "The answer is the correct answer to the question.", name="judge: correct", engine=engine)
    return [
        correct,
        judge(correct, "What was read says that the answer is right.", name="judge: supported"),
        SelfConsistency(extract=given, name="agreement"),
        EmbeddingSimilarity(model, against="group", floor=0.5, threads=1, name="likeness"),
        Rule(was_read, name="was read"),
        Rule(cites_what_was_read, name="cites what was read"),
        Rule(on_a_cited_page, name="on a cited page"),
        Rule(fits_the_question, name="fits the question"),
        Rule(calls_work, name="calls work"),
        Length(high=8, slack=8, unit="words", name="brief"),
    ]


# ---- the experiment


@dataclass(frozen=True, kw_only=True)
class Task:
    """The task, its verifiers and the training settings."""

    env: Any
    verifiers: Callable[[str], list]
    title: str
    steps: int
    lr: float
    max_tokens: int
    max_model_len: int
    games: int = 0
    """Number of the oracle's games that all arms imitate first."""
    epochs: int = 1


TASKS = {
    "sums": Task(
        env=Sums, verifiers=weak_verifiers, title="sums", steps=20, lr=3e-5, max_tokens=16, max_model_len=256,
    ),
    "library": Task(
        env="forge/Library-v0@1", verifiers=library_verifiers, title="a library", steps=8, lr=2e-5,
        max_tokens=32, max_model_len=1024, games=64,
    ),
}  # fmt: skip


def reward_of(arm, single, verifiers):
    """The reward of an arm; `single` names the verifier of (a)."""
    if arm == "gold":
        return EnvReward()
    if arm == "single":
        return next(v for v in verifiers if v.name == single)
    if arm == "mean":
        return Ensemble(verifiers, combine="mean")
    return Ensemble(verifiers, scale="log_odds" if arm == "log_odds" else "probability")


def auroc(scores, gold):
    """Probability that a better answer scores above a worse one; ties count half, abstention as 0. NaN without both."""
    scores = np.nan_to_num(scores, nan=0.0)
    won = (scores[:, None] > scores) + 0.5 * (scores[:, None] == scores)
    better = gold[:, None] > gold
    return float(won[better].mean()) if better.any() else np.nan


def survey(episodes, verifiers):
    """Return AUROC, and accuracy at a threshold of 0.5, of every verifier that can score one answer alone."""
    trajectories = [t for episode in episodes if episode.error is None for t in episode.trajectories.values()]
    gold = np.array([t.reward for t in trajectories])
    result = {}
    for verifier in verifiers:
        scores = verifier.score(trajectories)
        if not np.isnan(scores).all():
            right = float(np.mean((np.nan_to_num(scores) > 0.5) == (gold > 0.5)))
            result[verifier.name] = {"auroc": auroc(scores, gold), "accuracy": right}
    return result


def run(arm, seed, single, args):
    """Train one arm with one seed. The curve is the gold reward, whatever reward the arm learns from."""
    folder = args.out / f"{arm}-{seed}"
    if result := _study.saved(folder):
        return result
    shutil.rmtree(folder, ignore_errors=True)  # the survey of an interrupted run is lost
    task = TASKS[args.task]
    policy = fa.Policy(args.model, name="solver", sampling=fa.Sampling(temperature=1.0, max_tokens=task.max_tokens))
    if task.games:
        imitation = {"games": task.games, "epochs": task.epochs, "seed": seed}
        policy = _study.imitated(policy, task.env, args.out / f"imitated-{seed}", **imitation)
    verifiers = task.verifiers(args.model)
    config = fa.GRPOConfig(
        seed=seed,
        max_resamples=0,  # all arms play the same number of episodes
        learner=fa.LearnerConfig(lr=task.lr, warmup_steps=2),
        engine=fa.EngineConfig(max_model_len=task.max_model_len),
        eval_every=args.eval_every,
        eval_episodes=args.episodes,
        checkpoint_every=args.steps,
        keep_checkpoints=1,
    )
    with fa.GRPOTrainer(policy, reward=reward_of(arm, single, verifiers), config=config, out_dir=folder) as trainer:
        before = trainer.evaluate(task.env, episodes=args.episodes, reward=EnvReward())
        rows = trainer.fit(task.env, steps=args.steps).metrics
        after = trainer.evaluate(task.env, episodes=4 * args.episodes, reward=EnvReward())
    curve = [[0, before.reward]]
    curve += [[row["step"], row["eval/env_reward"]] for row in rows if "eval/env_reward" in row]
    rewards = {"before": [before.reward, before.ci], "after": [after.reward, after.ci]}
    result = {"arm": arm, "seed": seed, **rewards, "curve": curve}
    if arm == "gold":
        result |= {"survey_before": survey(before.episodes, verifiers)}
        result |= {"survey_after": survey(after.episodes[: args.episodes], verifiers)}
    return _study.save(folder, result)


def main(words=None):
    others = [arm for arm in ARMS if arm != "gold"]
    defaults = {"seeds": [0, 1, 2], "eval_every": 5, "episodes": 128}
    parser = _study.parser(__doc__, **defaults, out=Path("runs/weaver"))
    parser.add_argument("--task", choices=list(TASKS), default="sums")
    parser.add_argument("--arms", nargs="+", choices=others, default=others, help="in addition to gold, which is first")
    parser.add_argument("--steps", type=int, help="optimizer steps of each run; default: 20 for sums, 8 for library")
    args = parser.parse_args(words)
    task = TASKS[args.task]
    args.steps = task.steps if args.steps is None else args.steps
    with contextlib.closing(task.verifiers(args.model)[0]):  # the judges' engine serves all runs
        study(args)


def study(args):
    """Run all arms one after the other. Prints and draws the results."""
    results = [run("gold", seed, None, args) for seed in args.seeds]
    first = results[0]
    if any(np.isnan(numbers["auroc"]) for numbers in first["survey_before"].values()):
        raise SystemExit(
            f"the answers to {args.episodes} held-out seeds before training are all right or all wrong, so no "
            "verifier is the best; choose more with --episodes, in another folder"
        )
    single = max(first["survey_before"], key=lambda name: first["survey_before"][name]["auroc"])
    results += [run(arm, seed, single, args) for arm in args.arms for seed in args.seeds]
    table = Table("verifier", "AUROC", "accuracy", "after training", title="verifiers on held-out answers of seed 0")
    for name, numbers in first["survey_before"].items():
        accuracies = numbers["accuracy"], first["survey_after"][name]["accuracy"]
        table.add_row(name, f"{numbers['auroc']:.3f}", *(f"{accuracy:.3f}" for accuracy in accuracies))
    console = Console()
    console.print(table)
    title = f"GRPO on {TASKS[args.task].title}, SmolLM2-135M-Instruct"
    value = "gold reward on held-out seeds"
    _study.show(results, ARMS, args.out / "weaver_vs_gold.png", title=title, value=value)
    after = {arm: np.mean([r["after"][0] for r in results if r["arm"] == arm]) for arm in (*args.arms, "gold")}
    if after.get("single", 1.0) < after["gold"]:
        gap = after["gold"] - after["single"]
        combined = [arm for arm in after if arm not in ("single", "gold")]
        shares = [f"{ARMS[arm]} {(after[arm] - after['single']) / gap:.0%}" for arm in combined]
        console.print(f"(a) is {single!r}; it falls {gap:.3f} short of gold. Of that gap recover: {', '.join(shares)}.")


if __name__ == "__main__":
    main()
