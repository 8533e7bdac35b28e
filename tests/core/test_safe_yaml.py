"""YAML of strangers is read within bounds, and ordinary YAML as PyYAML reads it."""

import re
from pathlib import Path

import pytest
import yaml
from refusals import raises

from forge_agents import safe_yaml


def powers(kind: str, levels: int) -> str:
    """Values that stand for 9 ** `levels` others, by aliases or by merge keys."""
    lines = ["a0: &a0 {x: 1}"]
    for level in range(1, levels + 1):
        nine = f"[{', '.join([f'*a{level - 1}'] * 9)}]"
        lines.append(f"a{level}: &a{level} " + (f"{{<<: {nine}}}" if kind == "merge" else nine))
    return "\n".join(lines)


@pytest.mark.parametrize("kind", ["merge", "alias"])
def test_repeated_aliases_and_merge_keys_are_refused_before_they_are_built(kind):
    assert safe_yaml.load(powers(kind, 4)) == yaml.safe_load(powers(kind, 4))
    with pytest.raises(ValueError, match=r"the text:6:\d+: more than 100,000 values, as aliases and merge keys"):
        safe_yaml.load(powers(kind, 30))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 200_000, "nested more than 100 deep"),
        ("[" * 101 + "]" * 101, "1:101: values are nested more than 100 deep"),
        ("a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 200)), "nested more than 100 deep"),
        ("- &a [*a]", "1:3: a value contains itself"),
        ("- &a {<<: *a}", "1:3: a value contains itself"),
        ("a: " + "9" * 5000, "1:4: a number of more than 1,000 characters"),
        ("a: 1" + ":1" * 5000, "1:4: a number of more than 1,000 characters"),
        ("a: !!int x", "cannot be read as YAML: invalid literal"),
        ("a: !!bool x", "cannot be read as YAML"),
        ("a: !!timestamp 2026-99-99", "cannot be read as YAML"),
        ("a: 2026-99-99", "cannot be read as YAML"),
        ("a: !!float 1\x1b", "the text"),
        ("{[a]: 1}", "found unhashable key"),
        # multiples of 2^61 - 1 have one hash
        *((f"b:\n  {2**61 - 1}: 1\n  {k}{100 * (2**61 - 1)}: 1", "3:3: a key that is a number of") for k in ("", "-")),
        ("!!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("a: 1\n---\nb: 2", "expected a single document"),
    ],
)
def test_hostile_texts_are_refused_with_one_printable_line(text, problem):
    with pytest.raises(ValueError, match="^the text") as caught:
        safe_yaml.load(text)
    assert problem in str(caught.value) and str(caught.value).isprintable()


def test_many_values_are_refused_while_they_are_read(monkeypatch):
    monkeypatch.setattr(safe_yaml, "_MAX_PARTS", 1_000)
    assert len(safe_yaml.load("- 1\n" * 999)) == 999
    with pytest.raises(ValueError, match="the text:1000:3: more than 1,000 values"):
        safe_yaml.load("- 1\n" * 10_000)


def test_ordinary_settings_are_read_as_pyyaml_reads_them(tmp_path):
    settings = {"a": [1, 2.5, None, True, "yes", "0o7"], "b": {"c": {"d": []}}, "e": "1e5", "f": "text\n" * 3}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    assert safe_yaml.read(tmp_path / "config.yaml") == settings
    assert safe_yaml.load("x: &x {a: 1, b: 2}\ny: {<<: *x, b: 3}")["y"] == {"a": 1, "b": 3}
    (tmp_path / "latin.yaml").write_bytes(b"a: caf\xe9\n")
    assert safe_yaml.read(tmp_path / "latin.yaml") == {"a": "caf\N{REPLACEMENT CHARACTER}"}


def test_large_file_is_not_read_completely(tmp_path):
    with (tmp_path / "config.yaml").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match=r"config.yaml has more than 10 MB"):
        safe_yaml.read(tmp_path / "config.yaml")
    raises(ValueError, "the text has more than 10 MB", safe_yaml.load, "#" * 10_000_001)


def test_no_other_module_loads_yaml():
    root = Path(__file__).resolve().parents[2]
    files = [file for name in ("forge_agents", "envs", "trainers", "verifiers") for file in (root / name).rglob("*.py")]
    calls = {file.name for file in files if re.search(r"(?<!safe_)yaml\.\w*load\w*\(", file.read_text())}
    assert calls == {"safe_yaml.py"}
