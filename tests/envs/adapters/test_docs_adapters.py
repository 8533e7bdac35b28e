import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "adapters.md"
SNIPPETS = re.findall(r"<!-- run -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_what_the_page_shows_runs(number, capsys):
    for module in ("textarena", "reasoning_gym", "rlcard", "verifiers.envs"):
        pytest.importorskip(module)
    exec(compile(SNIPPETS[number], f"{PAGE.name}[{number}]", "exec"), {})
    assert capsys.readouterr().out


def test_the_page_has_its_snippets():
    assert len(SNIPPETS) == 4
