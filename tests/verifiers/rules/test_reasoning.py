"""Rules read the reasoning of episodes of a script and of a model."""

import asyncio

import pytest

import forge_agents as fa
import forge_verifiers as fv
from forge_agents.envs.reasoning import in_think_tags, split_response
from forge_agents.rollout.episode import decision_fields
from forge_agents.rollout.players import ModelPlayer
from forge_agents.rollout.policy_engine import PolicyEngine
from forge_agents.rollout.rendering import Renderer
from forge_agents.types import Completion, Trajectory, Turn, VersionSpan

GPT_OSS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>"


def played(response):
    """The answerer's trajectory of an episode of Relay in which every response is the same."""
    script = fa.Scripted(lambda observation, agent: response)
    episode = fa.play("forge/Relay-v0", script, seed=3, env_args={"tool": False})
    assert episode.error is None
    return episode.trajectories["answerer"]


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>6 * 7</think><answer>42</answer>", 1.0),
        ("<think>\n6 * 7\n</think>\n\n<answer>42</answer>\n", 1.0),
        ("<think></think><answer>42</answer>", 1.0),
        ("[THINK]6 * 7[/THINK]<answer>42</answer>", 1.0),
        (f"{GPT_OSS}<answer>42</answer>", 1.0),
        ("<answer>42</answer>", 0.0),
        ("<think>6 * 7</think>42", 0.0),
        ("<think>6 * 7</think>so <answer>42</answer>", 0.0),
        ("<think>6 * 7</think><answer>42</answer> bye", 0.0),
        ("<think>6 * 7</think><think>again</think><answer>42</answer>", 0.0),
        ("<think>6 * 7 <answer>42</answer>", 0.0),
        ("well <think>6 * 7</think><answer>42</answer>", 0.0),
    ],
)
def test_format_scores_a_played_response_with_its_reasoning(response, score):
    assert fv.Format().score([played(response)]).tolist() == [score]


def test_format_without_think_allows_reasoning_before_the_answer():
    answer_only = fv.Format(tags=("answer",))
    good, bare = played("<think>6 * 7</think><answer>42</answer>"), played("<answer>42</answer>")
    assert answer_only.score([good, bare, played("<think>6 * 7</think>42")]).tolist() == [1.0, 1.0, 0.0]


def test_regex_sees_the_reasoning_only_if_its_pattern_names_the_tag():
    good, bare = played("<think>7 * 6</think><answer>yes</answer>"), played("<answer>yes</answer>")
    whole = fv.Regex(pattern=r"<think>.*?</think>\s*<answer>.*?</answer>", full=True)
    assert whole.score([good, bare]).tolist() == [1.0, 0.0]
    assert fv.Regex(pattern=r"\d").score([good]).tolist() == [0.0]  # a digit in the reasoning is no answer


def test_repetition_sees_reasoning_that_goes_in_circles():
    looping, varied = played(f"<think>{'wait, no. ' * 40}</think>42"), played("<think>six times seven</think>42")
    repeated, fresh = fv.Repetition().score([looping, varied]).tolist()
    assert repeated < 0.2 and fresh == 1.0


@pytest.mark.parametrize("unit", ["chars", "words"])
def test_length_counts_reasoning_by_default(unit):
    trajectory = played(f"<think>{'hm ' * 50}</think>42")
    assert fv.Length(high=20, unit=unit).score([trajectory]).tolist() == [0.0]
    assert fv.Length(high=20, unit=unit, reasoning=False).score([trajectory]).tolist() == [1.0]


def test_functions_of_completions_get_the_whole_response():
    trajectory = played("<think>6 * 7</think><answer>42</answer>")
    one = fa.Rule(lambda completion: completion.startswith("<think>"), name="one")
    many = fa.Rule(lambda completions: ["</think>" in text for text in completions], name="many")
    assert [one.score([trajectory])[0], many.score([trajectory])[0]] == [1.0, 1.0]


def test_answer_rules_do_not_read_the_reasoning():
    trajectory = played("<think>The answer is 42.</think>I do not know.")
    gold = Trajectory(**{**{n: getattr(trajectory, n) for n in trajectory.__slots__}, "info": {"answer": 42}})
    assert fv.Numeric().score([gold])[0] == 0.0
    assert fv.Language(language="en").score([played("<think>да нет</think>yes")]).tolist() == [1.0]


class Engine:
    """Answers with one text, whatever it is asked."""

    max_model_len = 10_000

    def __init__(self, tokenizer, text):
        self.ids = (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id)

    async def generate(self, prompt_ids, sampling, **asked):
        span = VersionSpan(version=0, start=0, end=len(self.ids))
        return Completion(token_ids=self.ids, logprobs=(-1.0,) * len(self.ids), finish_reason="stop", versions=(span,))


@pytest.mark.parametrize("opened", [False, True])
def test_format_scores_what_a_model_sampled(tiny_llama, opened):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    if opened:
        generation = "{{ '<|im_start|>assistant\n' }}"
        assert generation in tokenizer.chat_template or "add_generation_prompt" in tokenizer.chat_template
        tokenizer.chat_template = tokenizer.chat_template + "{% if add_generation_prompt %}<think>\n{% endif %}"
    text = "6 * 7</think><answer>42</answer>" if opened else "<think>6 * 7</think><answer>42</answer>"
    policy = fa.Policy("m", sampling=fa.Sampling(max_tokens=200))
    player = ModelPlayer(PolicyEngine(Engine(tokenizer, text), Renderer(tokenizer)), policy, "")
    decision = asyncio.run(player.decide("6 * 7?", {}))
    turn = Turn(agent="a", index=0, observation="", reward=0.0, **decision_fields(decision))
    assert (turn.reasoning, turn.action) == ("6 * 7", "<answer>42</answer>")
    assert turn.response == "<think>6 * 7</think><answer>42</answer>"
    assert fv.Format().score([Trajectory(agent="a", policy="p", turns=(turn,))]).tolist() == [1.0]


@pytest.mark.parametrize(
    ("text", "opening", "written"),
    [
        ("<think>a</think>  b", "", "<think>a</think>  "),
        ("a</think> b", "<think>", "<think>a</think> "),
        ("a[/THINK]b", None, "[THINK]a[/THINK]"),
        ("<think>a", "", "<think>a"),
        ("b", "", ""),
        ("b </think>", "", ""),
    ],
)
def test_the_reasoning_text_is_what_was_written(text, opening, written):
    assert split_response(text, opening=opening)[1] == written


def test_reasoning_in_other_tags_is_shown_in_think_tags():
    assert in_think_tags(f"{GPT_OSS}b") == "<think>hm</think>b"
    assert in_think_tags("[THINK]a") == "<think>a"
    assert in_think_tags("no reasoning") == "no reasoning"
