"""Training without play: imitation of conversations and episodes, and preferences between them.

In: rows, files, run folders. Out: a trained policy and a run folder. Waits for the learner, each time with a deadline.
Start with `trainer.OfflineTrainer.fit`; `sft` and `dpo` say what a step learns, `data` what is read.
"""
