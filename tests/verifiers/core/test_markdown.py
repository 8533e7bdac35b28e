import time

import pytest

from forge_verifiers.core.markdown import CodeBlock, answer_section, code_blocks, indented_blocks


@pytest.mark.parametrize(
    "text",
    [
        "```python\ndef f():\n    return 1\n```",
        "```python\r\ndef f():\r\n    return 1\r\n```\r\nDone.",
        "~~~python\ndef f():\n    return 1\n~~~",
        "````Python title=f.py\ndef f():\n    return 1\n````",
        "1. Define it:\n\n   ```python\n   def f():\n       return 1\n   ```\n2. Call it.",
        "1. Define it:\n    ```python\n    def f():\n        return 1\n    ```",
        "- ```python\n  def f():\n      return 1\n  ```",
        "> ```python\n> def f():\n>     return 1\n> ```",
        "Code:\n    ```python\n    def f():\n        return 1\n    ```",
        "<answer>```python\ndef f():\n    return 1\n```</answer>",
        "<answer>\n```python\ndef f():\n    return 1\n```\n</answer>",
        "Use `f` as in ```python\ndef f():\n    return 1\n```",
        "```python\ndef f():\n    return 1",
        "```python\ndef f():\n    return 1\n```<|im_end|>",
    ],
)
def test_a_fenced_block_is_found_wherever_markdown_allows_it(text):
    (block,) = code_blocks(text)
    assert block.language == "python" and block.text.strip() == "def f():\n    return 1"


@pytest.mark.parametrize(
    ("text", "section"),
    [
        ("<answer>\nx = 1\n</answer>\n", "x = 1"),
        ("so <answer>{}</answer>", "{}"),
        ("x = 1", "x = 1"),
        ("\ufeffx = 1", "x = 1"),
        ("<answer>x = 1", "<answer>x = 1"),
        ("</answer><answer>", "</answer><answer>"),
        ("f'<answer>{x}</answer>'", "f'<answer>{x}</answer>'"),
        ("```\nf'<answer>'\n```</answer>", "```\nf'<answer>'\n```</answer>"),
    ],
)
def test_an_answer_section_is_read_without_its_tags(text, section):
    assert answer_section(text) == section


def test_fences_in_a_docstring_belong_to_the_code():
    code = 'def f():\n    """Example:\n\n    ```python\n    f()\n    ```\n    """\n    return 1\n'
    assert code_blocks(f"```python\n{code}```\nDone.") == [CodeBlock("python", code)]
    assert [block.text.strip() for block in code_blocks("```python\n    x = 1\n    ```\nDone.\n")] == ["x = 1"]


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ('`{"a": 1}`', CodeBlock("", '{"a": 1}')),
        ('```json {"a": 1} ```', CodeBlock("json", '{"a": 1}')),
        ("```f = 1```", CodeBlock("", "f = 1")),
        ("```python f = 1\n```", CodeBlock("python", "f = 1")),
    ],
)
def test_code_on_one_line_is_a_block(text, block):
    assert code_blocks(text) == [block]
    assert code_blocks(f"Call {text} now") == [] or "\n" in text


def test_blocks_keep_their_order_language_and_inner_fences():
    text = "```bash\nls\n```\ntext ```inline``` text\n````\n```\nx\n```\n````\n"
    assert code_blocks(text) == [CodeBlock("bash", "ls\n"), CodeBlock("", "```\nx\n```\n")]
    assert code_blocks("no code") == [] == indented_blocks("no code")
    assert indented_blocks("Here:\n\n    x = 1\n\nDone.") == [CodeBlock("", "x = 1\n")]


@pytest.mark.parametrize(
    "unit",
    ["> ", "- ", "```\n", "~~~\n> ", "```x ", "* a\n ", "\t- ", "<a ```\n", "    ```\n", "a\n> ```x y.\n"],
)
def test_hostile_markdown_takes_little_time(unit):
    text = (unit * 100_000)[:100_000]
    start = time.process_time()
    code_blocks(text)
    indented_blocks(text)
    assert time.process_time() - start < 10  # takes at most 1 s; a parser of emphasis and links takes minutes
