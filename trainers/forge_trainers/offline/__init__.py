"""Training without play: imitation of conversations and episodes, and preferences.

In: conversations, episodes, pairs. Out: a trained policy. Waits for: the learner.
"""
