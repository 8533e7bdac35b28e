import forge_agents as fa


def played(hint, guess=None):
    env = fa.make("word_duel/WordDuel-v0")
    env.reset(seed=0)
    env.step(hint)
    env.step(guess or env.word)
    return env.rewards


def test_it_keeps_the_contract():
    assert fa.check_env("word_duel/WordDuel-v0").ok


def test_a_right_guess_pays_both_and_an_open_hint_nobody():
    env = fa.make("word_duel/WordDuel-v0")
    env.reset(seed=0)
    assert played("You know it.") == {"giver": 1.0, "guesser": 1.0}
    assert played("You know it.", "?") == {"giver": 0.0, "guesser": 0.0}
    assert played(f"It is {env.word}.") == {"giver": 0.0, "guesser": 0.0}
