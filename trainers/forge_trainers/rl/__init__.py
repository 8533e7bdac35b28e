"""The loop: seeds to episodes to rewards to credit to a step. Start at `trainer`, with `GRPOTrainer._step`.

    tasks, seating --> rewards --> credit, update --> learner --> weights
    what is played,    what it     advantages,        (`forge_trainers.learner`, `forge_agents.weights`)
    who sits where     earned      samples, batches

`pipeline` plays and judges ahead of the learner; `endings` sees when nothing is left to learn; `config` has the
settings.

In: an environment, policies, verifiers, settings. Out: trained policies and a record of the run. Waits for: every
stage, each with a deadline.
"""
