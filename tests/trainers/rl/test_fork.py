"""Trainers that take the engines of another."""

import fake_run
import pytest
from fake_run import Draws, trainer

import forge_agents as fa
from forge_agents.errors import RunFolderError


def test_a_fork_continues_no_run_of_other_policies(tiny_llama, tmp_path, monkeypatch):
    async def fork(self, config, folder):
        """Keep the engines."""

    monkeypatch.setattr(fake_run.Processes, "fork", fork, raising=False)
    policy = fa.Policy(str(tiny_llama), name="team", sampling=fa.Sampling(max_tokens=4))
    adapter = fa.Policy(str(tiny_llama), name="team", sampling=fa.Sampling(max_tokens=4), lora=fa.LoRA(rank=4))
    with trainer(tmp_path / "other", policies=adapter) as other:
        other.fit(Draws, steps=2)
    with trainer(tmp_path / "parent", policies=policy) as parent:
        parent.fit(Draws, steps=1)
        with parent.fork(tmp_path / "other") as new:
            for use in (lambda: new.fit(Draws, steps=4), lambda: new.evaluate(Draws)):
                with pytest.raises(RunFolderError, match=r"policies\.team\.lora is"):
                    use()
            with new.fork(tmp_path / "control") as control:
                assert control.fit(Draws, steps=2).steps == 2
                assert control.fit(Draws, steps=3).steps == 3
