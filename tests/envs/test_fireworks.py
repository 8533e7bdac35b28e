import numpy as np
import pytest
from team_play import begin, with_oracle

import forge_agents as fa
from forge_agents.testing import check_levels
from forge_envs.games.fireworks import Fireworks
from forge_envs.oracles.games import Fireworks as Oracle


class Slips(Oracle):
    def __call__(self, seen):
        cards = seen.rpartition("Your cards: ")[2].count(",") + 1
        return f"play {self.rng.randrange(cards) + 1}" if self.rng.random() < 0.1 else super().__call__(seen)


def dealt(ann, ben, deck=(), **settings):
    """Start a game with fixed hands and a fixed deck, first card on top."""
    env = begin(Fireworks(hand=len(ann), **settings))
    for agent, cards in (("player_0", ann), ("player_1", ben)):
        for held, card in zip(env.hands[agent], cards, strict=True):
            held.card = card
    env.deck = [*reversed(deck)]
    return env


R1, R2, B1, B2 = (("red", 1), ("red", 2), ("blue", 1), ("blue", 2))


def test_player_sees_other_hands_and_hints_about_its_own():
    env = dealt([R1, B2], [B1, R2], [R1], colours=2, ranks=2)
    assert env.observe("player_0").splitlines() == [
        "Piles: red 0, blue 0. Hints: 6. Fuses: 3. Deck: 1.", "Gone: nothing.",
        "ben: blue 1 (knows ?), red 2 (knows ?)", "Your cards: 1 ?, 2 ?.",
    ]  # fmt: skip
    env.step("I say: hint to BEN  blue")
    assert env.observe("player_1").splitlines()[0] == "ann told ben: blue is card 1."
    assert env.observe("player_1").endswith("Your cards: 1 blue, 2 red.") and "Hints: 5" in env.observe("player_0")
    env.step("play 1")
    assert env.piles == {"red": 0, "blue": 1}
    assert env.observe("player_0").splitlines()[0] == "ben played blue 1, which fits."
    assert "ben: red 2 (knows red), red 1 (knows ?)" in env.observe("player_0"), "the new card is the last"


def test_a_hint_says_also_what_the_other_cards_are_not():
    env = dealt([R1], [B1], [R1] * 9, colours=3, ranks=3)
    env.step("hint ben 2"), env.step("play 1")
    assert "illegal" in env.infos["player_0"], "a hint that shows no card"
    env = dealt([R1, R1], [B1, R2], [R1] * 9, colours=3, ranks=3)
    env.step("hint ben 1")
    assert env.observe("player_1").endswith("Your cards: 1 1, 2 2/3.")


def test_cards_that_do_not_fit_burn_fuses_and_the_last_one_burns_all():
    env = dealt([R2, R2], [R1, R2], [R2] * 9, colours=2, ranks=3, fuses=2)
    env.step("play 1")
    assert env.fuses == 1 and env.gone == [R2] and "which does not fit: a fuse burns" in env.observe("player_1")
    env.step("play 1"), env.step("what?")
    assert env.rewards == {"player_0": 0, "player_1": 0}
    assert env.infos["player_0"]["score"] == 1 and env.infos["player_1"]["fuses"] == 0


def test_hints_are_used_up_and_regained():
    env = dealt([R1, R2], [R1, R1], [B1] * 9, colours=2, ranks=2, hints=1)
    env.step("discard 1")
    assert env.fuses == 2, "nothing to regain"
    env.step("hint ann red")
    assert env.hints == 0 and not any(move.startswith("hint") for move in env.legal_actions("player_0"))
    env.step("discard 2")
    assert env.hints == 1 and env.gone == [R2]
    env.step("hint ann 1"), env.step("play 1"), env.step("discard 1")
    env.piles["red"] = 1
    env.hands["player_0"][0].card, env.hints = R2, 0
    env.step("play 1")
    assert env.hints == 1, "a complete pile regains one"


def test_after_the_last_card_everybody_moves_once_more():
    env = dealt([R1], [R2], [B2], colours=2, ranks=2)
    env.step("play 1")
    assert not env.deck and not any(env.terminations.values())
    env.step("play 1"), env.step("play 1")
    assert env.rewards["player_0"] == 0.5 and env.infos["player_0"] | {"success": False} == env.infos["player_0"]


def test_each_level_is_harder_for_a_team_that_slips():
    means = check_levels(with_oracle("forge/Fireworks-v0", Slips), fa.Oracle(), episodes=20)
    assert means[0] > 0.6 and means[-1] < 0.3


def test_observations_do_not_reveal_the_own_hand():
    """Observations are the same for all hands that are consistent with the hints."""
    env = dealt([R1, B2, B1], [R2, R1, R1], [*[R1] * 3, *[B1] * 3], colours=2, ranks=3)
    env.step("hint ben 2"), env.step("hint ann blue")
    hands = set()
    for draw in range(100):
        twin = env.fork()
        twin.swap_secrets("player_0", np.random.default_rng(draw))
        assert twin.observe("player_0") == env.observe("player_0")
        assert twin.legal_actions("player_0") == env.legal_actions("player_0")
        hands.add(tuple(held.card for held in twin.hands["player_0"]))
        assert sorted([*hands_of(twin), *twin.deck]) == sorted([*hands_of(env), *env.deck])
    assert hands == {(R1, B2, B1), (R1, B1, B2), (R1, B1, B1)}


def hands_of(env):
    return [held.card for hand in env.hands.values() for held in hand]


@pytest.mark.parametrize(
    ("text", "legal"),
    [("play card 1", True), ("Play: 1", True), ("play #1", True), ("I **discard** card 2.", False),
     ("hint ben: red", True), ("Let's play it safe: hint Ben red", True), ("play 1, or hint ben red", False),
     ("play", False), ("hint red", False)],
)  # fmt: skip
def test_a_move_may_stand_in_other_words(text, legal):
    env = dealt([R1, B2], [B1, R2], [R1], colours=2, ranks=2)  # where no hint is used up nothing may be discarded
    env.step(text)
    assert ("illegal" not in env.infos["player_0"]) == legal and env.fuses == 3 - (not legal)
