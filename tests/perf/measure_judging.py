"""(e) Judging: cheap rules through an Ensemble, the combiner alone, and a judge over its engine fed directly.

In: `Options`. Out: rates. Waits for engines, each in a child with a deadline.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from perf_common import PROMPTS, THREADS, Options, goal, in_child, median

from forge_agents.serving.config import EnginePlan
from forge_agents.types import Trajectory, Turn

if TYPE_CHECKING:
    from forge_agents.serving import EngineConfig
    from forge_agents.serving._wire import Answer, Request
    from forge_verifiers import Judge

DEADLINE_S = 900
GROUP = 8
RUBRIC = "The text is a story, it is about what was asked for, and its sentences are grammatical English."
SEED = 0
"""Of the judge's fences, so that both ways ask the same."""
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_ONE, _TWO = ({name: str(number) for name in _THREADS} for number in (1, THREADS))


def measure(options: Options) -> list[dict[str, Any]]:
    """The record ``judging``."""
    from forge_agents.serving import _vllm

    rules = in_child(run_rules, options, timeout_s=DEADLINE_S, env=_ONE)
    combiner = in_child(run_combiner, options, timeout_s=DEADLINE_S, env=_ONE)
    both = in_child(run_both, options, timeout_s=2 * DEADLINE_S, env={**_vllm.environment(_config(options)), **_TWO})
    return [
        {
            "measure": "judging",
            "rules": rules,
            "combiner": combiner,
            **both,
            "peer": "the same engine fed directly with the same prompts, as tokens; rounds take turns",
            "goals": {
                "rules_per_s_of_a_core": goal(rules["verifications_per_cpu_s"], 20_000, at_most=False),
                "fit_ms_per_1000": goal(combiner["fit_ms_per_1000"], 10, at_most=True),
                "predictions_per_s": goal(combiner["predictions_per_s"], 500_000, at_most=False),
                "judge_over_direct": goal(both["ratio"]["judge_over_direct"], 0.9, at_most=False),
            },
        }
    ]


def played(n: int, *, seed: int) -> list[Trajectory]:
    """Trajectories in groups, every answer different."""
    rng = np.random.default_rng(seed)
    words = ("the keeper", "a storm", "climbed", "the stairs", "and saw", "a light", "far away", "at night")

    def one(number: int) -> Trajectory:
        text = " ".join(words[k] for k in rng.integers(len(words), size=60))
        answer = int(rng.integers(100))
        turn = Turn(
            agent="writer",
            index=0,
            observation=PROMPTS[number // GROUP % len(PROMPTS)],
            action=f"Story {seed}.{number}: {text}. Answer: {answer}",
            reward=0.0,
        )
        info = {"answer": str(int(rng.integers(100)))}
        return Trajectory(
            agent="writer", policy="p", turns=(turn,), env_id="perf/Story", seed=seed * n + number // GROUP, info=info
        )

    return [one(number) for number in range(n)]


def run_rules(options: Options) -> dict[str, float]:
    """Eight rules through an Ensemble with its defaults, fits included; one thread."""
    from forge_agents import Ensemble
    from forge_verifiers import Exact, Format, Language, Length, Numeric, Regex, Repetition, SelfConsistency

    rules = [
        Exact(),
        Numeric(),
        Regex(pattern=r"Answer: \d+$"),
        Format(),
        Length(low=100, high=800),
        Language(language="en"),
        Repetition(),
        SelfConsistency(),
    ]
    ensemble = Ensemble(rules)
    n = 256 if options.quick else 2048
    rows = []
    for seed in range(options.warm_ups + options.rounds):
        trajectories = played(n, seed=seed)
        wall, cpu = time.perf_counter(), time.process_time()
        ensemble.score(trajectories)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        work = n * len(rules)
        rows.append({"verifications_per_s": work / wall, "verifications_per_cpu_s": work / cpu})
    return {**median(rows[options.warm_ups :]), "trajectories": float(n), "verifiers": float(len(rules))}


def run_combiner(options: Options) -> dict[str, float]:
    """The default combiner fitted to graded scores of 12 verifiers, right with .6 to .9, in groups; one thread."""
    from forge_verifiers import combiners

    n, verifiers, rng = 1_000 if options.quick else 10_000, 12, np.random.default_rng(0)
    right = rng.random(n) < 0.4
    votes = np.where(rng.random((n, verifiers)) < rng.uniform(0.6, 0.9, verifiers), right[:, None], ~right[:, None])
    scores = np.clip(votes * 0.6 + 0.2 + rng.normal(0, 0.12, (n, verifiers)), 0, 1)
    rows = []
    for _ in range(options.warm_ups + options.rounds):
        combiner = combiners.get("default")
        begun = time.process_time()
        combiner.fit(scores, groups=np.arange(n) // GROUP)
        fitted = time.process_time()
        combiner.predict_proba(scores)
        predicted = time.process_time()
        rows.append({"fit_ms_per_1000": 1e6 * (fitted - begun) / n, "predictions_per_s": n / (predicted - fitted)})
    return {**median(rows[options.warm_ups :]), "responses": float(n), "verifiers": float(verifiers)}


def _config(options: Options) -> EngineConfig:

    return EnginePlan(
        model=options.model, max_model_len=4096 if options.quick else 1024, max_num_seqs=64, kv_cache_gb=1.0,
        threads=THREADS, enforce_eager=options.quick,
    )  # fmt: skip


def _num_judged(options: Options) -> int:
    return 16 if options.quick else 128


def _judge(options: Options) -> Judge:
    from forge_verifiers import Judge

    return Judge(options.model, RUBRIC, engine=_config(options), timeout_s=600, start_timeout_s=600, seed=SEED)


def run_both(options: Options) -> dict[str, dict[str, float]]:
    """Trajectories to scores, and the same prompts through an engine's thread in this process, in turns."""
    direct = _Direct(_config(options))
    rows = []
    with _judge(options) as judge:
        for seed in range(1 + options.rounds):
            trajectories = played(_num_judged(options), seed=seed)
            requests = _requests(options, seed)
            started = time.perf_counter()
            judge.score(trajectories)
            judge_s = time.perf_counter() - started
            direct_s = direct.answer(requests)
            rows.append(
                {
                    "judge_per_s": len(requests) / judge_s,
                    "direct_per_s": len(requests) / direct_s,
                    "judge_over_direct": direct_s / judge_s,
                }
            )
        used = judge.usage
    direct.thread.close(10)
    middle = median(rows[1:])
    return {
        "judgements_per_s": {"judge": middle["judge_per_s"], "direct": middle["direct_per_s"]},
        "ratio": {"judge_over_direct": middle["judge_over_direct"]},
        "tokens": {
            "prompt": used.prompt_tokens / used.questions,
            "completion": used.completion_tokens / used.questions,
            "abstained": float(used.nonsense + used.failed),
        },
    }


class _Direct:
    """An engine's thread in this process, fed at once."""

    def __init__(self, config: EngineConfig) -> None:
        from forge_agents.serving._loop import EngineThread

        self._answers: list[Answer] = []
        self._failures: list[BaseException] = []
        self._wanted = 0
        self._news = threading.Event()
        self.thread = EngineThread(config, deliver=self._deliver, on_death=self._died)
        self.thread.ready.result(600)

    def answer(self, requests: list[Request]) -> float:
        """Seconds until all are answered."""
        self._answers.clear()
        self._news.clear()
        self._wanted = len(requests)
        started = time.perf_counter()
        self.thread.add(requests)
        if not self._news.wait(300) or self._failures:
            raise RuntimeError(f"{len(self._answers)} of {self._wanted} answers; failures: {self._failures}")
        seconds = time.perf_counter() - started
        refused = [answer.error for answer in self._answers if answer.completion is None]
        if refused:
            raise RuntimeError(f"the engine refused {len(refused)} requests: {refused[0]}")
        return seconds

    def _deliver(self, arrived: list[Answer]) -> None:
        self._answers.extend(arrived)
        if len(self._answers) == self._wanted:
            self._news.set()

    def _died(self, error: BaseException) -> None:
        self._failures.append(error)
        self._news.set()


def _requests(options: Options, seed: int) -> list[Request]:
    """What the judge sends for the same trajectories."""
    from forge_agents.policy import Sampling
    from forge_agents.rollout.rendering import Renderer
    from forge_agents.serving._wire import Request
    from forge_verifiers import YesNo
    from forge_verifiers.judge.prompts import documents, fence_key, instructions_for, question_of

    renderer = Renderer.of(Path(options.model))
    form = YesNo()
    texts = [
        question_of(documents(trajectory, "answer", 8000)[0][0], form.ask, key=fence_key(SEED))
        for trajectory in played(_num_judged(options), seed=seed)
    ]
    return [
        Request(
            request_id=seed * len(texts) + number,
            prompt_ids=renderer.start(instructions_for(RUBRIC), text),
            sampling=Sampling(temperature=0.0, max_tokens=form.max_tokens),
            choices=form.choices,
            top_logprobs=20,
        )
        for number, text in enumerate(texts)
    ]
