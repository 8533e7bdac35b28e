"""Runs the code of the pages in docs/: every ```python block of a page, in order, as one program.

A block with the word ``no-run`` after ``python`` is left out; an HTML comment right before it must say why.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
FENCE = re.compile(r"^(`{3,})\s*([^\s`]*)[ \t]*([^`]*)$")
LIMIT_S = 500


def program(text):
    """The page as Python: its code on the lines where it stands, everything else blank.

    Raises:
        ValueError: a block is never closed, or left out without a reason.
    """
    out, fence, runs, before = [], "", False, ""
    for number, line in enumerate(text.splitlines(), 1):
        result = FENCE.match(line)
        if fence:
            closed = result is not None and len(result[1]) >= len(fence) and not result[2]
            out.append(line if runs and not closed else "")
            fence = "" if closed else fence
            continue
        if result is not None:
            fence, words = result[1], result[3].split()
            runs = result[2] == "python" and "no-run" not in words
            if result[2] == "python" and not runs and not re.search(r"<!--.*\w.*-->$", before):
                raise ValueError(f"line {number}: a block is left out; say why in an HTML comment on the line before")
        elif line.strip():
            before = line.strip()
        out.append("")
    if fence:
        raise ValueError("the last block is never closed")
    return "\n".join(out) + "\n"


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_the_snippets_of_a_page_run(page, tmp_path):
    code = program(page.read_text(encoding="utf-8"))
    if not code.strip():
        pytest.skip("the page shows no Python")
    script = tmp_path / f"{page.stem}_page.py"
    script.write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{page.name} (line numbers are the page's):\n{done.stdout}\n{done.stderr[-4000:]}"


PAGE = """
# Title
```python
x = 1
```
Text with `code`.

```sh
exit 1
```
<!-- needs a GPU -->

```python no-run
x = 2
```
````python
y = '''
```
'''
````
"""


def test_code_keeps_its_place_and_the_rest_is_blank():
    lines = program(PAGE).splitlines()
    assert [(at, line) for at, line in enumerate(lines, 1) if line] == [
        (4, "x = 1"),
        (17, "y = '''"),
        (18, "```"),
        (19, "'''"),
    ]


def test_a_block_that_is_left_out_needs_a_reason():
    with pytest.raises(ValueError, match="line 13: .*say why"):
        program(PAGE.replace("<!-- needs a GPU -->", ""))
    with pytest.raises(ValueError, match="never closed"):
        program("```python\nx = 1\n")
