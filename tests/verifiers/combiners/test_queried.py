"""Verifiers that were not queried give no evidence."""

import numpy as np
import pytest

from forge_verifiers import combiners


@pytest.mark.parametrize("name", ["mean", "majority", "dawid-skene", "weaver", "default"])
def test_scores_of_unqueried_verifiers_are_ignored(name):
    rng = np.random.default_rng(0)
    right = rng.random(400) < 0.5
    votes = np.where(rng.random((400, 5)) < 0.75, right[:, None], ~right[:, None]).astype(float)
    asked = rng.random(votes.shape) < 0.8
    changed = np.where(asked, votes, 1 - votes)
    one, other = (combiners.get(name).fit(scores, queried=asked) for scores in (votes, changed))
    assert one.predict_proba(votes).tobytes() == other.predict_proba(votes).tobytes()
    with pytest.raises(ValueError, match="queried arrived as"):
        combiners.get(name).fit(votes, queried=asked[:, :4])
