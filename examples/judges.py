"""How good is a judge? Judges choose among answers whose truth a program knows.

Each group has one sum and several answers, some of them right. The arms score all answers: a single judge that reads
one text at a time, RULER (one question ranks a group), the mean of five judges with different rubrics, and two
combiners of these five that learn without labels how reliable each is: Weaver as published, and the default. The table
has the accuracy of the best-scored answer of a group (equal scores share it), the accuracy on pairs of a right and a
wrong answer (equal scores count half, 0.5 is chance), both with 95 % intervals over groups, and the costs.

    python examples/judges.py [--model smollm2-135m-instruct] [--url http://HOST/v1 --api-key-env VARIABLE]

With ``--url`` the judge is a model of any OpenAI-compatible endpoint, otherwise a model on this machine. The default
model is there to try the script: SmolLM2-135M cannot add, so expect all arms to be close to random choice. Combiners
need judges that are better than chance.
"""

import argparse

import numpy as np
from rich.console import Console
from rich.table import Table

import forge_agents as fa
import forge_verifiers as fv
from forge_verifiers.core.verifier import group_ids

RUBRICS = (
    "The answer is the correct result of the task.",
    "The number in the answer is right.",
    "A strict teacher who calculates it herself accepts the answer.",
    "The answer contains no mistake.",
    "A cashier who relies on this answer hands out the right amount.",
)
FORMS = ("{}", "It is {}.", "The result is {}.", "I get {}.", "The sum equals {}.", "{} is the answer.", "Answer: {}")
ERRORS = (-20, -10, -2, -1, 1, 2, 10, 20)


def answers(num_groups, size, seed=0):
    """Return groups of different answers to the same sum, at least one right and one wrong in each."""
    rng, rows = np.random.default_rng(seed), []
    for group in range(num_groups):
        a, b = (int(number) for number in rng.integers(11, 90, 2))
        is_right = rng.permutation(size) < rng.integers(1, size)
        for form, right in zip(rng.permutation(FORMS), is_right, strict=False):
            text = str(form).format(a + b + (0 if right else int(rng.choice(ERRORS))))
            turn = fa.Turn(agent="solver", index=0, observation=f"What is {a} + {b}?", action=text, reward=0.0)
            facts = {"env_id": "judges/Sums-v0", "seed": group, "info": {"answer": a + b}}
            rows.append(fa.Trajectory(agent="solver", policy="solver", turns=(turn,), **facts))
    return rows


def by_group(scores, truth, groups):
    """Return for each group the accuracy of the best answer, and the accuracy on pairs. Abstentions rank last."""
    scores, result = np.nan_to_num(scores, nan=-1.0), []
    for group in np.unique(groups):
        right, wrong = (scores[(groups == group) & (truth == value)] for value in (True, False))
        best = max(right.max(), wrong.max())
        num_best = [np.sum(side == best) for side in (right, wrong)]
        won = (right[:, None] > wrong) + 0.5 * (right[:, None] == wrong)
        result.append((num_best[0] / sum(num_best), won.mean()))
    return np.array(result)


def compare(model, rows):
    """Return the table's rows: arm, accuracies by group ``[groups, 2]``, number of calls, and number of tokens."""
    truth, groups = fv.Numeric().score(rows) > 0.5, group_ids(rows)
    engine = fa.EngineConfig(max_model_len=1024, enforce_eager=True) if isinstance(model, fa.Policy) else None
    first = fv.Judge(model, RUBRICS[0], engine=engine, name="judge 1", seed=0)
    others = [fv.Judge(first, rubric, name=f"judge {n}", seed=0) for n, rubric in enumerate(RUBRICS[1:], 2)]
    ruler = fv.Judge(first, RUBRICS[0], answer=fv.Ruler(), name="RULER", seed=0)
    with first:  # all share its model
        panel = np.column_stack([judge.score(rows) for judge in (first, *others)])
        ranks = ruler.score(rows)
    combiners = (fv.combiners.get(name) for name in ("mean", "weaver", "default"))
    mean, weaver, default = (combiner.fit_predict(panel, groups) for combiner in combiners)
    arms = [
        ("random choice", np.zeros(len(rows)), ()),
        ("single judge", panel[:, 0], (first,)),
        ("RULER", ranks, (ruler,)),
        ("mean of 5 judges", mean, (first, *others)),
        ("Weaver of 5 judges", weaver, (first, *others)),
        ("default ensemble of 5", default, (first, *others)),
    ]
    return [
        (
            name,
            by_group(scores, truth, groups),
            sum(judge.usage.questions for judge in judges),
            sum(judge.usage.prompt_tokens + judge.usage.completion_tokens for judge in judges),
        )
        for name, scores, judges in arms
    ]


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name or folder of the judge's model")
    parser.add_argument("--url", help="address of an OpenAI-compatible endpoint that serves the model")
    parser.add_argument("--api-key-env", default="", help="environment variable with the key of the endpoint")
    parser.add_argument("--groups", type=int, default=64, help="number of sums")
    parser.add_argument("--size", type=int, default=6, choices=range(2, len(FORMS) + 1), help="answers to each sum")
    args = parser.parse_args(words)
    if args.url:
        model = fa.Endpoint(args.url, args.model, api_key_env=args.api_key_env)
    else:
        model = fa.Policy(args.model, name="judge")
    rows = compare(model, answers(args.groups, args.size))
    table = Table("judge", f"best of {args.size}", "pairs", "calls", "tokens", title=f"{args.model}, 95 %")
    for name, accuracies, calls, tokens in rows:
        errors = 1.96 * accuracies.std(axis=0, ddof=1) / np.sqrt(len(accuracies))
        cells = (f"{mean:.3f} ± {error:.3f}" for mean, error in zip(accuracies.mean(axis=0), errors, strict=True))
        table.add_row(name, *cells, str(calls), str(tokens))
    Console().print(table)
    return rows


if __name__ == "__main__":
    main()
