"""The loop: seeds to episodes to rewards to credit to a step. Start at `trainer`.

In: an environment, policies, verifiers, settings. Out: trained policies and a record of the run. Waits for: every
stage, each with a deadline.
"""
