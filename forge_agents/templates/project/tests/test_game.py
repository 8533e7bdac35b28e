import forge_agents as fa


def play(hint, guess=None):
    env = fa.make("word_duel/WordDuel-v0")
    env.reset(seed=0)
    env.step(hint)
    env.step(guess or env.word)
    return env.rewards


def test_contract():
    assert fa.check_env("word_duel/WordDuel-v0").ok


def test_right_guess_pays_both_agents_unless_the_hint_has_the_word():
    env = fa.make("word_duel/WordDuel-v0")
    env.reset(seed=0)
    assert play("You know it.") == {"giver": 1.0, "guesser": 1.0}
    assert play("You know it.", "?") == {"giver": 0.0, "guesser": 0.0}
    assert play(f"It is {env.word}.") == {"giver": 0.0, "guesser": 0.0}
