"""Every loss against plain loops in float64, values and gradients, on random ragged batches cut into chunks."""

from __future__ import annotations

import dataclasses
import functools
import math
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_helpers import sample_of

import forge_trainers.losses.registry as algorithms
from forge_agents.policy import Policy
from forge_agents.types import EpisodeBatch
from forge_trainers.batch.packing import pack
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.learner.plan import LearnerPlan
from forge_trainers.losses.correction import kl_estimate, loss_columns, reduction_weights, sequence_numbers
from forge_trainers.losses.policy_loss import PolicyLoss
from forge_trainers.losses.registry import (
    Correction,
    Loss,
    TokenInputs,
    TokenLoss,
    add_loss,
    find_loss,
    list_losses,
    register_loss,
)
from forge_trainers.rl.config import GRPOConfig
from forge_trainers.rl.credit import Credit

VOCAB = 12


def ragged(seed: int) -> EpisodeBatch:
    """Trajectories of one to three turns, some split into two samples. Each token has the advantage of its turn."""
    rng = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=rng))

    samples = []
    for trajectory in range(6):
        turns = [[whole(1, 4), whole(1, 7)] for _ in range(whole(1, 4))]  # new prompt tokens, response tokens
        cut = whole(0, len(turns) + 1)
        for part in (range(cut), range(cut, len(turns))):
            mask: list[bool] = []
            number: list[int] = []
            advantage: list[float] = []
            for t in part:
                num_new, num_sampled = turns[t]
                mask += [False] * num_new + [True] * num_sampled
                number += [-1] * num_new + [t] * num_sampled
                advantage += [0.0] * num_new + [float(torch.randn((), generator=rng))] * num_sampled
            if mask:
                ids = torch.randint(0, VOCAB, (len(mask),), generator=rng).tolist()
                fields = {"group": trajectory // 3, "trajectory": trajectory, "turns": tuple(number)}
                samples.append(sample_of(ids, mask, advantage=tuple(advantage), **fields))
    return pack(samples)


@dataclasses.dataclass
class Case:
    """A batch, the learner's logits of its loss tokens, and what others gave those tokens."""

    batch: EpisodeBatch
    place_S: torch.Tensor
    logits_SV: torch.Tensor
    reference_S: torch.Tensor

    def __init__(self, seed: int, gap: float = 0.3) -> None:
        rng = torch.Generator().manual_seed(100 + seed)
        self.batch = ragged(seed)
        place = self.batch["tokens"]["loss_mask"].nonzero().squeeze(1)
        self.place_S = place[torch.randperm(len(place), generator=rng)]  # rows come in any order
        self.logits_SV = torch.randn(len(place), VOCAB, generator=rng) * 1.5
        now_S = self.logprobs(self.logits_SV).float()
        noise = torch.randn(2, len(place), generator=rng)
        self.batch["tokens"]["logprobs"][self.place_S] = (now_S + gap * noise[0]).clamp(max=0)
        self.reference_S = (now_S + gap * noise[1]).clamp(max=0)

    def logprobs(self, logits_SV: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        labels = self.batch["tokens"]["ids"][self.place_S]
        return torch.log_softmax(logits_SV.double() / temperature, -1).gather(1, labels[:, None]).squeeze(1)


def ours(case: Case, config: LearnerConfig, chunks: int = 3) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, gradient with respect to the logits, and metrics: the way of the learner, chunk by chunk."""
    tokens, n = case.batch["tokens"], len(case.place_S)

    def before() -> torch.Tensor:
        out_T = torch.zeros(tokens["ids"].shape)
        out_T[case.place_S] = case.logprobs(case.logits_SV, config.loss_settings.temperature).float()
        return out_T

    columns = {"sampler_logprobs": tokens["logprobs"], "advantages": tokens["advantages"]}
    columns |= loss_columns(config.loss_settings, case.batch, before)
    inputs = {name: column[case.place_S] for name, column in columns.items()}
    if config.kl_coef:
        inputs["reference_logprobs"] = case.reference_S
    logits = case.logits_SV.clone().requires_grad_()
    loss_of = PolicyLoss(config.loss_settings)
    total, metrics = torch.zeros(()), {}
    for part in torch.arange(n).chunk(chunks):
        loss, result = loss_of(
            logits[part][None],
            tokens["ids"][case.place_S[part]][None],
            float(n),
            valid=torch.ones(1, len(part), dtype=torch.bool),
            **{name: value[part][None] for name, value in inputs.items()},
        )
        total = total + loss
        for name, value in result.items():
            metrics[name] = metrics.get(name, 0.0) + float(value)
    (grads,) = torch.autograd.grad(total, logits)
    return float(total.detach()), grads, metrics


def policy_terms(  # noqa: PLR0917
    name: str, x: list[torch.Tensor], old: list[float], a: list[float], low: float, high: float
) -> list[torch.Tensor]:
    """The published loss of every token of one sequence, in float64."""
    terms = []
    if name == "gspo":
        value = math.exp(sum(float(xi.detach()) - oi for xi, oi in zip(x, old, strict=True)) / len(x))
        for xi, ai in zip(x, a, strict=True):  # GSPO-token, eq. 14
            s = value * torch.exp(xi) / torch.exp(xi).detach()
            terms.append(-torch.min(s * ai, torch.clamp(s, 1 - low, 1 + high) * ai))
        return terms
    for xi, oi, ai in zip(x, old, a, strict=True):
        r = torch.exp(xi - oi)
        if name in ("cispo", "rloo"):
            terms.append(-min(max(float(r.detach()), 1 - low), 1 + high) * ai * xi)
        else:
            terms.append(-torch.min(r * ai, torch.clamp(r, 1 - low, 1 + high) * ai))
    return terms


REDUCED: dict[str, Callable[[list[list[torch.Tensor]], float], torch.Tensor]] = {
    "token": lambda rows, c: sum(map(sum, rows)) / sum(map(len, rows)),
    "sequence_mean": lambda rows, c: sum(sum(row) / len(row) for row in rows) / len(rows),
    "sequence_sum": lambda rows, c: sum(map(sum, rows)) / len(rows),
    "constant": lambda rows, c: sum(map(sum, rows)) / (len(rows) * c),
}
PUBLISHED = {
    "grpo": ("sequence_mean", 0.2, 0.2),
    "dr_grpo": ("constant", 0.2, 0.2),
    "dapo": ("token", 0.2, 0.28),
    "gspo": ("sequence_mean", 3e-4, 4e-4),
    "cispo": ("token", 1.0, 4.0),
    "rloo": ("sequence_sum", 1.0, math.inf),
    "reinforce_pp": ("token", 0.2, 0.2),
}


def test_every_built_in_loss_has_a_reference_and_a_row_in_the_docs():
    page = Path(__file__).parents[3] / "docs" / "algorithms.md"
    rows = re.findall(r"^\| `(\w+)` \| \[\d{4}\.\d+\]", page.read_text(), re.MULTILINE)
    # `sft` is for offline trainers, and test_teachers.py compares `distill`
    assert set(rows) == {*PUBLISHED, "distill"} == algorithms._OURS - {"sft"}


def reference(case: Case, config: LearnerConfig) -> tuple[float, torch.Tensor]:
    """Loss and gradient by plain loops over sequences."""
    reduction, low, high = PUBLISHED[config.loss]
    rule = config.loss_settings.correction
    low, high = config.clip or (low, high)
    logits = case.logits_SV.double().requires_grad_()
    temperature = config.loss_settings.temperature
    logprobs = case.logprobs(logits, temperature)
    tokens, samples = case.batch["tokens"], case.batch["samples"]
    owner = [
        int(samples["trajectory"][i]) for i in range(len(samples["length"])) for _ in range(int(samples["length"][i]))
    ]
    sequences: dict[Any, list[int]] = {}
    for s, place in enumerate(case.place_S.tolist()):
        key = (owner[place], int(tokens["turn"][place]) if config.sequence == "turn" else 0)
        sequences.setdefault(key, []).append(s)
    rows = []
    for members in sequences.values():
        places = [int(case.place_S[s]) for s in members]
        x = [logprobs[s] for s in members]
        now, sampler = [float(v.detach()) for v in x], [float(tokens["logprobs"][p]) for p in places]
        advantages = [float(tokens["advantages"][p]) for p in places]
        terms = policy_terms(config.loss, x, sampler if rule.how == "ratio" else now, advantages, low, high)
        gaps = [n - m for n, m in zip(now, sampler, strict=True)]
        if rule.level == "sequence":
            gaps = [sum(gaps)] * len(gaps)
        elif rule.level == "geometric":
            gaps = [sum(gaps) / len(gaps)] * len(gaps)
        for i, gap in enumerate(gaps):
            w = math.exp(gap)
            if rule.how == "truncate":
                terms[i] = terms[i] * min(w, rule.high)
            elif rule.how == "mask":
                terms[i] = terms[i] * (w if rule.low <= w <= rule.high else 0.0)
            if config.kl_coef:
                d = float(case.reference_S[members[i]]) - x[i]
                k3 = torch.exp(d) - d - 1
                straight = d * d / 2 - (d * d / 2).detach() - d.detach()  # k1 with the gradient of k2
                terms[i] = terms[i] + config.kl_coef * {"k1": straight, "k2": d * d / 2, "k3": k3}[config.kl]
        rows.append(terms)
    loss = REDUCED[reduction](rows, 2048.0)
    if config.entropy_coef:
        p = torch.softmax(logits / temperature, -1)
        loss = loss + config.entropy_coef * (p * p.log()).sum(1).mean()
    (grads,) = torch.autograd.grad(loss, logits)
    return float(loss.detach()), grads


def check(case: Case, config: LearnerConfig) -> dict[str, float]:
    value, grads, metrics = ours(case, config)
    expected, wanted_grads = reference(case, config)
    assert value == pytest.approx(expected, rel=2e-5, abs=2e-6)
    assert (grads - wanted_grads).norm() < 2e-5 * wanted_grads.norm() + 1e-9
    return metrics


@pytest.mark.parametrize("name", sorted(PUBLISHED))
@pytest.mark.parametrize("seed", range(3))
def test_losses_and_gradients_equal_the_published_formula(name, seed):
    metrics = check(Case(seed), LearnerConfig(loss=name, correction="ratio"))
    assert metrics["correction/mean"] == pytest.approx(1.0, rel=1e-6)
    if name in ("grpo", "dapo", "gspo"):  # a case that no clip touches would show little
        assert metrics["clip_fraction/mean"] > 0.05


def test_gspo_of_one_advantage_per_sequence_is_the_sequence_loss():
    """arXiv 2507.18071, eq. 5: the gradient of the whole sequence's ratio, and not of its tokens'."""
    case, config = Case(2, gap=0.02), LearnerConfig(loss="gspo", clip=(0.01, 0.01))
    tokens = case.batch["tokens"]
    sequence_T = sequence_numbers(case.batch, "trajectory")
    advantages = torch.randn(int(sequence_T.max()) + 1)
    tokens["advantages"] = torch.where(sequence_T >= 0, advantages[sequence_T], 0.0)
    logits = case.logits_SV.double().requires_grad_()
    logprobs, terms, clipped = case.logprobs(logits), [], 0
    for number, a in enumerate(advantages.double()):
        own = sequence_T[case.place_S] == number
        s = (logprobs[own] - tokens["logprobs"][case.place_S[own]].double()).mean().exp()
        terms.append(-torch.min(s * a, s.clamp(0.99, 1.01) * a))
        clipped += int(not 0.99 < float(s.detach()) < 1.01)
    expected = sum(terms) / len(terms)
    value, grads, _ = ours(case, config)
    assert 0 < clipped < len(terms)
    assert value == pytest.approx(float(expected.detach()), rel=1e-5)
    (wanted_grads,) = torch.autograd.grad(expected, logits)
    assert (grads - wanted_grads).norm() < 2e-5 * wanted_grads.norm()


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_loss_brings_its_correction(name):
    """None but GSPO's moves the ratio from the sampler, and what is set goes before what is brought."""
    check(Case(0), LearnerConfig(loss=name))
    own = LearnerConfig(loss=name).loss_settings.correction
    assert own == (Correction(how="truncate", level="geometric", high=2.0) if name == "gspo" else Correction())
    # a clip that bounds nothing is none
    assert LearnerConfig(loss=name, clip=(0.2, 0.1)).loss_settings.correction == Correction()
    masked = Correction(how="mask", low=0.0)
    assert LearnerConfig(loss=name, correction=masked).loss_settings.correction == masked
    assert LearnerConfig(loss=name, correction="mask").loss_settings.correction == Correction(how="mask")
    assert LearnerConfig(loss="gspo", correction="truncate").loss_settings.correction == Correction(
        how="truncate", level="geometric", high=2.0
    )


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_clip_range_of_old_samples_is_centred_on_the_learner(name):
    """Unless user or loss say what is done about them."""
    own = LearnerConfig(loss=name).loss_settings.correction
    old = LearnerConfig(loss=name).for_old_samples().loss_settings.correction
    clips_gradients = name in {"grpo", "dr_grpo", "dapo", "reinforce_pp"}
    assert old == (Correction(how="truncate") if clips_gradients else own)
    for chosen in ({"correction": "ratio"}, {"correction": "mask"}, {"clip": (0.1, 0.2)}, {"clip": (0.2, 0.1)}):
        config = LearnerConfig(loss=name, **chosen)
        assert config.for_old_samples() == config


def test_a_loss_of_the_users_is_truncated_for_old_samples_where_it_leaves_that_open():
    """Else its ratio would be 1 where it expects that to the sampler."""
    for name, given, expected in (("plain", {}, "ratio"), ("open", {"correction": None}, "truncate")):

        @register_loss(f"old_samples_{name}", clip=(0.1, 0.1), **given)
        def loss(inputs: TokenInputs) -> TokenLoss:
            return TokenLoss(-inputs.log_ratio_S.exp() * inputs.advantages_S, torch.zeros_like(inputs.log_ratio_S))

        config = LearnerConfig(loss=f"old_samples_{name}")
        assert config.loss_settings.correction == Correction()
        assert config.for_old_samples().loss_settings.correction.how == expected


@pytest.mark.parametrize("noise", [0.02, 0.04])
def test_rounding_takes_the_gradient_from_hardly_any_sequence(noise):
    """Engine and learner in bfloat16 differ by 0.02 to 0.04 per token. GSPO's published clip range is narrower."""
    rng = torch.Generator().manual_seed(0)
    count, length = 100, 40
    logits_SV = torch.randn(count * length, VOCAB, generator=rng)
    ids = torch.randint(0, VOCAB, (count * length,), generator=rng)
    now_S = torch.log_softmax(logits_SV, -1).gather(1, ids[:, None]).squeeze(1)
    sampler_S = (now_S + noise * torch.randn(now_S.shape, generator=rng)).clamp(max=0)
    samples = []
    for at in range(0, count * length, length):
        logprobs, advantage = (0.0, *sampler_S[at : at + length].tolist()), float(torch.randn((), generator=rng))
        fields = {"logprobs": logprobs, "advantage": advantage, "group": at, "trajectory": at}
        samples.append(sample_of((1, *ids[at : at + length].tolist()), length, **fields))
    batch = pack(samples)
    mask_T, tokens = batch["tokens"]["loss_mask"], batch["tokens"]
    before_T = torch.zeros(mask_T.shape)
    before_T[mask_T] = now_S

    def moved(config: LearnerConfig) -> float:
        """Share of sequences with a gradient."""
        columns = loss_columns(config.loss_settings, batch, lambda: before_T)
        columns |= {"sampler_logprobs": tokens["logprobs"], "advantages": tokens["advantages"]}
        logits = logits_SV.clone().requires_grad_()
        loss, _ = PolicyLoss(config.loss_settings)(
            logits[None],
            ids[None],
            float(len(ids)),
            valid=torch.ones(1, len(ids), dtype=torch.bool),
            **{name: column[mask_T][None] for name, column in columns.items()},
        )
        (grads,) = torch.autograd.grad(loss, logits)
        return float((grads.reshape(count, -1).abs().amax(1) > 0).float().mean())

    assert moved(LearnerConfig(loss="gspo", correction="ratio")) < 0.65
    for name in sorted(PUBLISHED):
        assert moved(LearnerConfig(loss=name)) > 0.99, name


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_turn_can_be_the_sequence(name):
    case, turn = Case(1), LearnerConfig(loss=name, sequence="turn")
    check(case, turn)
    whole = ours(case, dataclasses.replace(turn, sequence="trajectory"))[0]
    assert (ours(case, turn)[0] == whole) == (PUBLISHED[name][0] == "token")


@pytest.mark.parametrize("name", ["dapo", "grpo", "gspo", "rloo"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("how", ["truncate", "mask", "none"])
def test_corrections_equal_the_formula(name, how, level):
    correction = Correction(how=how, level=level, low=0.9, high=1.1)
    metrics = check(Case(2), LearnerConfig(loss=name, correction=correction))
    assert metrics["clip_fraction/mean"] == 0.0
    assert (metrics["corrected_fraction/mean"] > 0.05) == (how != "none")


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", ["dapo", "grpo", "dr_grpo"])
def test_divergence_and_entropy_equal_the_formula(name, kl):
    check(Case(3), LearnerPlan(loss=name, kl=kl, kl_coef=0.3, entropy_coef=0.2, temperature=0.7, clip=(0.2, 0.1)))


def test_the_default_is_dapo_as_it_was():
    """The token loss of PPO with DAPO's clip, divided by the batch's loss tokens. It does not depend on sequences."""
    case, config = Case(0), LearnerConfig()
    assert loss_columns(config.loss_settings, case.batch, lambda: pytest.fail("one forward pass is enough")) == {}
    check(case, config)


def test_samples_of_the_learner_itself_make_all_ratio_losses_agree():
    case = Case(4, gap=0.0)
    grads = [ours(case, LearnerConfig(loss=name))[1] for name in ("dapo", "reinforce_pp", "cispo")]
    corrected = ours(case, LearnerConfig(correction="mask"))[1]
    for other in (*grads[1:], corrected):
        assert (other - grads[0]).norm() < 1e-5 * grads[0].norm()


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_estimates_have_the_mean_and_the_gradient_of_the_divergence(kl):
    """Exactly, by summing over a small vocabulary: k1 and k3 have the mean, k1 (as used here) and k2 the gradient."""
    torch.manual_seed(0)
    logits, other = torch.randn(9, dtype=torch.float64, requires_grad=True), torch.randn(9, dtype=torch.float64)
    logp, ref = torch.log_softmax(logits, -1), torch.log_softmax(other, -1)
    exact = (logp.exp() * (logp - ref)).sum()
    result = (logp.detach().exp() * kl_estimate(logp, ref, kl)).sum()
    (expected,), (grads,) = torch.autograd.grad(exact, logits, retain_graph=True), torch.autograd.grad(result, logits)
    assert (abs(float((result - exact).detach())) < 1e-9) == (kl != "k2")
    assert (float((grads - expected).norm()) < 1e-9) == (kl != "k3")


@pytest.mark.parametrize("name", sorted(set(PUBLISHED) - {"gspo"}))  # its value holds the sequence's ratio fixed
def test_token_functions_pass_gradcheck(name):
    torch.manual_seed(0)
    n, loss = 7, find_loss(name)
    old, advantages, weight = torch.randn(3, n, dtype=torch.float64)
    start = old + 0.3 * torch.randn(n, dtype=torch.float64)

    def total(logprobs: torch.Tensor) -> torch.Tensor:
        ratio_of = start if name in ("cispo", "rloo") else logprobs  # these two hold the ratio fixed
        result = loss.function(
            TokenInputs(
                logprobs_S=logprobs, log_ratio_S=ratio_of - old, sequence_log_ratio_S=torch.zeros(n),
                advantages_S=advantages, clip_low=0.2, clip_high=0.3,
            )
        )  # fmt: skip
        return (result.loss_S * weight).sum()

    assert torch.autograd.gradcheck(total, (start.clone().requires_grad_(),))


@pytest.mark.parametrize("name", sorted(algorithms._OURS - {"distill"}))  # which has loss 0 for all tokens
def test_tokens_without_an_advantage_have_no_loss_and_no_gradient(name):
    """The learner leaves such trajectories out. See `needed_samples`."""
    torch.manual_seed(0)
    logprobs = torch.randn(7, dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([0.0, 1.0, 0.0, -1.0, 0.0, 0.0, 2.0], dtype=torch.float64)
    inputs = TokenInputs(
        logprobs_S=logprobs, log_ratio_S=logprobs - torch.randn(7), sequence_log_ratio_S=torch.zeros(7),
        advantages_S=advantages, clip_low=0.2, clip_high=0.3,
    )  # fmt: skip
    losses = find_loss(name).function(inputs).loss_S
    losses.sum().backward()
    assert losses[advantages == 0].abs().max() == 0 == logprobs.grad[advantages == 0].abs().max()
    assert losses[advantages != 0].abs().max() > 0


def test_sequences_are_trajectories_or_turns():
    alone = sample_of((1, 2, 3), 2, logprobs=(0.0, -1.0, -1.0), advantage=1.0)
    samples = [
        dataclasses.replace(alone, trajectory=5, turns=(-1, 0, 1)),
        alone,
        dataclasses.replace(alone, trajectory=5, turns=(-1, 1, 1)),
    ]
    batch = pack(samples)
    assert batch["samples"]["trajectory"].tolist() == [5, 6, 5]
    assert sequence_numbers(batch, "trajectory").tolist() == [-1, 0, 0, -1, 1, 1, -1, 0, 0]
    assert sequence_numbers(batch, "turn").tolist() == [-1, 0, 1, -1, 2, 2, -1, 1, 1]
    weights = reduction_weights(sequence_numbers(batch, "trajectory"), "sequence_mean", constant=1.0)
    assert weights.tolist() == [0.0, 0.75, 0.75, 0.0, 1.5, 1.5, 0.0, 0.75, 0.75]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithms, "_losses", dict(algorithms._losses))


@pytest.mark.usefixtures("registry")
def test_a_registered_loss_is_known_by_name():
    @register_loss("plain", reduction="sequence_sum", clip=(0.5, 0.5), credit=Credit(scale="none"))
    def plain(inputs: TokenInputs) -> TokenLoss:
        return TokenLoss(-inputs.advantages_S * inputs.logprobs_S, torch.zeros_like(inputs.advantages_S))

    assert "plain" in list_losses() and find_loss("plain").credit.scale == "none"
    case = Case(0, gap=0.0)
    assert torch.allclose(ours(case, LearnerConfig(loss="plain"))[1], ours(case, LearnerConfig(loss="rloo"))[1])
    register_loss("plain")(plain)  # a module may be imported twice
    with pytest.raises(ValueError, match="'plain' is already"):
        register_loss("plain")(find_loss("dapo").function)

    def dapo(inputs: TokenInputs) -> TokenLoss:
        return plain(inputs)

    dapo.__qualname__ = find_loss("dapo").function.__qualname__
    with pytest.raises(ValueError, match=r"'dapo' is already forge_trainers\."):
        register_loss("dapo")(dapo)


@pytest.mark.usefixtures("registry")
def test_a_loss_travels_to_another_process_and_is_registered_there():
    sent = pickle.loads(pickle.dumps(dataclasses.replace(find_loss("cispo"), name="sent")))
    add_loss(sent)
    assert LearnerConfig(loss="sent").loss == "sent"
    add_loss(pickle.loads(pickle.dumps(find_loss("grpo"))))


def test_a_loss_may_be_named_with_its_module():
    assert find_loss("forge_trainers.losses.registry:gspo") is find_loss("gspo")
    with pytest.raises(ValueError, match="cannot be imported"):
        LearnerConfig(loss="no_such_module_here:mine")
    with pytest.raises(ValueError, match=r"'mine:gspo': 'gspo' belongs to forge_trainers\.losses.* Rename"):
        LearnerConfig(loss="mine:gspo")  # it would be ours that trains


@pytest.mark.usefixtures("registry")
def test_the_loss_of_another_module_is_never_taken_for_the_one_that_was_asked_for(monkeypatch, tmp_path):
    head = "from forge_trainers.losses.registry import register_loss"
    mine = head + "\n@register_loss('theirs')\ndef theirs(x): return {}"
    again = "from forge_trainers.losses import registry as r\nr.register_loss('wide', clip=(0.2, 0.5))(r.dapo)"
    files = {"loss_a": mine.format(1), "loss_b": mine.format(2), "loss_c": "import loss_a", "loss_d": "x = 1"}
    files["loss_f"] = again
    files |= {"loss_g": "import loss_h", "loss_h": "import loss_i", "loss_i": mine.replace("theirs", "far")}
    files |= {"loss_j": "import loss_a\ndef theirs(x): return {}"}  # which nobody has registered
    files |= {"losses": "", "losses.a": mine.replace("theirs", "near"), "losses.b": ""}
    files["losses.c"] = "from losses import a"
    for name, text in files.items():
        file = tmp_path / f"{name.replace('.', '/')}{'/__init__' * (name == 'losses')}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        result = find_loss("loss_c:theirs")
        assert result is find_loss("loss_a:theirs") is find_loss("loss_c:theirs") and result.function(0) == 1
        with pytest.raises(ValueError, match=r"loss 'theirs' is already loss_a\.theirs"):
            find_loss("loss_b:theirs")
        with pytest.raises(ValueError, match="'loss_d:theirs': 'theirs' belongs to loss_a. Rename your loss"):
            find_loss("loss_d:theirs")
        with pytest.raises(ValueError, match="cannot be imported"):
            find_loss("loss_e:theirs")
        assert find_loss("theirs") is result
        with pytest.raises(ValueError, match=r"'loss_j:theirs': 'theirs' belongs to loss_a. .* or write loss_a:theirs"):
            find_loss("loss_j:theirs")
        far = find_loss("loss_g:far")  # through a module between
        assert find_loss("loss_g:far") is far
        add_loss(pickle.loads(pickle.dumps(far)), requested_name="loss_h:far")
        assert find_loss("loss_h:far").function is far.function
        near = find_loss("losses.a:near")
        assert find_loss("losses.c:near") is near
        with pytest.raises(ValueError, match=r"'losses\.b:near': 'near' belongs to losses\.a\."):
            find_loss("losses.b:near")  # of the same package, and no more
        wide = find_loss("loss_f:wide")  # one of ours under a name and with a range of one's own
        assert find_loss("loss_f:wide") is wide and wide.clip == (0.2, 0.5) and find_loss("dapo").clip == (0.2, 0.28)
        monkeypatch.setattr(result.function, "__module__", "__main__")  # loss_a.py is the script that runs
        assert find_loss("loss_a:theirs") is result
        with pytest.raises(ValueError, match="'loss_d:theirs': 'theirs' belongs to __main__"):
            find_loss("loss_d:theirs")
    finally:
        for name in files:
            sys.modules.pop(name, None)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("read", [torch.exp, lambda ratio: ratio < 1.0, lambda ratio: 1.0 + ratio])
def test_sequence_ratio_that_was_not_requested_raises(read):
    def curious(inputs: TokenInputs) -> TokenLoss:
        weight_S = read(inputs.sequence_log_ratio_S)
        return TokenLoss(-inputs.logprobs_S * weight_S, torch.zeros_like(inputs.advantages_S))

    register_loss("asks", sequence_ratio=True)(curious)
    register_loss("curious")(curious)
    for correction in ("ratio", "none"):
        loss, *_ = ours(Case(0, gap=0.1), LearnerConfig(loss="asks", correction=correction))
        assert math.isfinite(loss) and loss != 0
        with pytest.raises(ValueError, match="sequence_log_ratio_S.* Register the loss with sequence_ratio=True"):
            ours(Case(0, gap=0.1), LearnerConfig(loss="curious", correction=correction))


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda i: -i.logprobs_S, r"'odd' returned Tensor \[(\d+)\] for \1 tokens\. Return TokenLoss"),
        (lambda i: TokenLoss(-i.logprobs_S.mean(), i.advantages_S), r"Tensor \[\], Tensor \[(\d+)\] for \1 tokens"),
        (lambda i: TokenLoss(-i.logprobs_S, 0.0), r"Tensor \[\d+\], float \[\]"),
        (lambda i: TokenLoss(i.advantages_S, i.advantages_S), r"'odd' has no gradient\. Compute it from logprobs_S"),
    ],
)
def test_a_loss_that_returns_anything_but_a_number_a_token_is_named(returned, said):
    register_loss("odd")(returned)
    with pytest.raises(ValueError, match=said):
        ours(Case(0, gap=0.0), LearnerConfig(loss="odd"))


def test_a_loss_needs_two_bounds_and_a_credit_that_is_one():
    with pytest.raises(TypeError, match=r"clip=0\.2 of loss 'one' must be two numbers"):
        register_loss("one", clip=0.2)(lambda inputs: inputs)
    with pytest.raises(TypeError, match=r"credit=<class .*Credit'> of loss 'one' must be a forge_agents\.Credit"):
        register_loss("one", credit=Credit)(lambda inputs: inputs)
    with pytest.raises(TypeError, match=r"correction='truncate' of loss 'one' must be a Correction\(how="):
        register_loss("one", correction="truncate")(lambda inputs: inputs)
    with pytest.raises(ValueError, match=r"how='truncat'. Choose one of 'ratio', 'truncate'"):
        register_loss("one", correction=Correction(how="truncat"))(lambda inputs: inputs)


def test_a_loss_needs_a_name():
    with pytest.raises(TypeError, match=r"Write @register_loss\('name'\)"):
        register_loss(lambda inputs: inputs)
    with pytest.raises(TypeError, match=r"'half' is functools\.partial.* defined with def"):
        register_loss("half")(functools.partial(lambda inputs, share: inputs, share=0.5))


def test_a_loss_takes_its_inputs_only():
    with pytest.raises(TypeError, match=r"loss 'two' .* must take \(inputs\): missing a required argument: 'share'"):
        register_loss("two")(lambda inputs, share: inputs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LearnerConfig(loss="grop"), "unknown loss 'grop'.*grpo.*as in 'my_module:grop'"),
        (lambda: GRPOConfig(learner=LearnerConfig(loss="sft")), r"'sft' is the loss of SFTTrainer.*such as 'rloo'"),
        (lambda: GRPOConfig().learner_of(Policy("tiny-random", learner={"loss": "sft"})), "'sft' is the loss of"),
        (lambda: LearnerConfig(clip=(0.2, -1.0)), r"clip=\(0\.2, -1\.0\)"),
        (lambda: LearnerConfig(correction="tis"), "correction='tis'"),
        (lambda: LearnerConfig(correction={"level": "word"}), "level='word'"),
        (lambda: Correction(low=1.5), "low=1.5"),
        (lambda: Correction(high=0.5), "high=0.5"),
        (lambda: LearnerConfig(kl="k4"), "kl='k4'"),
        (lambda: LearnerConfig(entropy_coef=-1.0), "entropy_coef"),
        (lambda: LearnerConfig(sequence="word"), "sequence='word'"),
        (lambda: Loss(name="a b", function=lambda x: x), "must be a word"),
        (lambda: Loss(name="a", function=lambda x: x, reduction="sum"), "reduction='sum'"),
        (lambda: Loss(name="a", function=lambda x: x, clip=(2.0, 1.0)), "clip="),
    ],
)
def test_invalid_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_loss_brings_its_credit():
    for name in set(list_losses()) - {"sft"}:
        teacher = {"reference": "m", "kl_coef": 1.0} if name == "distill" else {}
        config = GRPOConfig(learner=LearnerConfig(loss=name, **teacher))
        assert config.credit_rule == Credit(**find_loss(name).credit)
    assert GRPOConfig(learner=LearnerConfig(loss="rloo")).credit_rule.baseline == "leave_one_out"
    assert GRPOConfig(learner=LearnerConfig(loss="rloo"), credit=Credit()).credit_rule == Credit()
    with pytest.raises(ValueError, match="group_size=1"):
        GRPOConfig(group_size=1)
    assert GRPOConfig(group_size=1, learner=LearnerConfig(loss="reinforce_pp")).credit_rule.by == ("role",)
    assert GRPOConfig(group_size=1, credit=Credit(baseline="rae", scale="none")).group_size == 1
