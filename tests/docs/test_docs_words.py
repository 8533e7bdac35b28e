"""Parts of the pages that no test runs: settings in YAML, command lines, and Python that needs a model.

The parsers of the commands read settings and command lines. In Python, our names and their arguments are looked up.
"""

import argparse
import ast
import functools
import inspect
import re
import shlex
from pathlib import Path

import pytest

import forge_agents as fa
from forge_agents.cli import main as cli
from forge_agents.cli.config import Parser, parse
from forge_trainers.offline.config import SFTRunConfig

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.md"))
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *RECIPES)
BLOCK = re.compile(r"^```(\w+)([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RELAY = "env: forge/Relay-v0\npolicies: {team: {model: smollm2-135m-instruct}}\n"
SFT = "policy: {model: smollm2-135m-instruct, name: hero}\ndata: chats.jsonl\n"


def blocks(language):
    """``(page, words after the language, text)`` of each block."""
    return [
        (page, mark.split(), text)
        for page in PAGES
        for result, mark, text in BLOCK.findall(page.read_text(encoding="utf-8"))
        if result == language
    ]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the files that command lines name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.yaml").write_text(RELAY)
    (tmp_path / "sums.yaml").write_text(SFT)
    (tmp_path / "chats.jsonl").write_text("")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


# ---- settings


def settings(text):
    """Return the configuration in the YAML of a page, as its command reads it."""
    keys = re.findall(r"^(\w+):", text, re.MULTILINE)
    kind = SFTRunConfig if "policy" in keys else fa.RunConfig
    rest = RELAY.splitlines() if kind is fa.RunConfig else []
    missing = [line for line in rest if line.partition(":")[0] not in keys]
    Path("shown.yaml").write_text("\n".join([*missing, text]))
    return parse(kind, ["shown.yaml", "--trust_host", "node1"], prog="forge-agents train", description="")


@pytest.mark.parametrize(("page", "mark", "text"), blocks("yaml"), ids=lambda value: getattr(value, "stem", ""))
def test_the_settings_of_a_page_are_understood(page, mark, text, folder):
    assert settings(text)


def test_unknown_settings_are_found(folder, capsys):
    assert settings("steps: 60\n").steps == 60
    with pytest.raises(SystemExit):
        settings("league: {snapshot_evry: 5}\n")
    assert "snapshot_evry" in capsys.readouterr().err


# ---- command lines


def command_lines(text):
    """Yield the words of every call of ``forge-agents`` in a shell's text."""
    for line in text.replace("\\\n", " ").replace('"$(', ";").replace(')"', ";").splitlines():
        lexer = shlex.shlex(re.sub(r"(^|\s)#.*$", "", line), posix=True, punctuation_chars=True)
        lexer.whitespace_split, lexer.commenters = True, ""
        words = []
        for word in [*lexer, ";"]:
            if set(word) <= set("();<>|&"):
                if words and words[0].endswith("forge-agents"):
                    yield words[1:]
                words = []
            else:
                words.append(word)


class UnderstoodError(Exception):
    """Ends a command when its words have been read."""


@pytest.fixture
def read_only(monkeypatch):
    """Commands read their words and do nothing."""
    read = Parser.parse_args

    def stop(self, *args, **kwargs):
        result = read(self, *args, **kwargs)
        if (self.prog or "").startswith("forge-agents "):
            raise UnderstoodError
        return result

    monkeypatch.setattr(Parser, "parse_args", stop)


SHOWN = [
    (page.parent.name if page in RECIPES else page.stem, words)
    for page, _, text in blocks("sh")
    for words in command_lines(text)
]


@pytest.mark.parametrize(("page", "words"), SHOWN, ids=[f"{page}-{' '.join(words)}" for page, words in SHOWN])
def test_the_command_lines_of_a_page_are_understood(page, words, folder, read_only):
    if words[0].startswith("--"):
        assert cli.main(words) == 0
        return
    with pytest.raises(UnderstoodError):
        cli.COMMANDS[words[0]](words[1:])


def test_the_command_lines_are_found():
    text = "forge-agents view a \\\n  b  # c\nprintf '1\\n2' | x/forge-agents play E --seed 3 > f &\n"
    text += 'eval "$(forge-agents --completion bash)"  # and\nmake demo\n'
    expected = [["view", "a", "b"], ["play", "E", "--seed", "3"], ["--completion", "bash"]]
    assert list(command_lines(text)) == expected
    assert len(SHOWN) > 30


def in_sentences(program):
    """``(page, words)`` of commands that stand as code within a text, of all pages below docs/."""
    shown = re.compile(rf"`{program}(?:(?<=/)| )([^`\n]+)`")
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    return [(page.stem, shlex.split(line)) for page in pages for line in shown.findall(page.read_text("utf-8"))]


@pytest.mark.parametrize(("page", "words"), in_sentences("forge-agents"))
def test_a_command_in_a_sentence_is_understood(page, words, folder, read_only):
    assert words[0] in (*cli.COMMANDS, "COMMAND", "--completion")
    if "--print_config" in words:
        words.remove("--print_config")  # it prints as soon as it is read
    if words[0] in cli.COMMANDS and any(word.startswith("--") and word != "--help" for word in words):
        with pytest.raises(UnderstoodError):
            cli.COMMANDS[words[0]](words[1:])


TYPED = [
    (page.parent.name, shlex.split(line, comments=True))
    for page, _, text in blocks("sh")
    for line in re.findall(r"^python examples/(\w+\.py.*)$", text, re.MULTILINE)
    if page in RECIPES
]


@pytest.mark.parametrize(("page", "words"), [*in_sentences("python examples/"), *TYPED])
def test_an_example_in_a_sentence_takes_its_options(page, words, load_example, monkeypatch):
    read = argparse.ArgumentParser.parse_args

    def stop(*args):
        read(*args)
        raise UnderstoodError

    module = load_example(words[0].removesuffix(".py"))
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises(UnderstoodError):
        module.main(words[1:])


def test_scripts_that_the_docs_name_exist():
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *RECIPES)
    named = {path for page in pages for path in re.findall(r"python ((?:[\w-]+/)+\w+\.py)", page.read_text("utf-8"))}
    assert len(named) > 10 and [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_tests_that_the_docs_name_exist():
    """Result pages name the test of each fix, so a renamed test must be renamed there, too."""
    defined = {
        name
        for file in (ROOT / "tests").rglob("*.py")
        for name in (file.stem, *re.findall(r"def (test_\w+)", file.read_text()))
    }
    pages = sorted((ROOT / "docs").rglob("*.md"))
    quoted = re.compile(r"`(?:[\w/]+/)?(test_\w+)(?:\.py)?`")
    named = {(page.name, name) for page in pages for name in quoted.findall(page.read_text())}
    assert len(named) > 50
    assert not sorted((page, name) for page, name in named if name not in defined)


def test_commands_in_sentences_are_found():
    assert len(in_sentences("forge-agents")) > 25 and len([*in_sentences("python examples/"), *TYPED]) > 5
    assert len({page for page, _ in TYPED}) >= len(RECIPES) - 3, "two recipes have commands of other kinds"


@pytest.mark.parametrize("line", ["view runs --prot 1", "train train.yaml --trainer.learner.lrr 1", "play --agent"])
def test_unknown_options_are_found(line, folder, read_only, capsys):
    words = line.split()
    with pytest.raises(SystemExit):
        cli.COMMANDS[words[0]](words[1:])
    assert words[-2 if words[-1] == "1" else -1].strip("-") in capsys.readouterr().err


# ---- Python that needs a model


class Names(ast.NodeVisitor):
    """Meanings of names, as far as our own signatures tell, and calls that they do not allow."""

    def __init__(self):
        self.known, self.wrong = {}, []

    def visit_Import(self, node):
        for name in node.names:
            if name.name.startswith("forge_"):
                self.known[name.asname or name.name] = __import__(name.name)

    def visit_ImportFrom(self, node):
        if node.module.startswith("forge_"):
            home = __import__(node.module, fromlist=["_"])
            self.known |= {name.asname or name.name: getattr(home, name.name) for name in node.names}

    def visit_Assign(self, node):
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.known[target.id] = Made.of(self.meaning(node.value))

    def visit_With(self, node):
        for item in node.items:
            self.visit(item.context_expr)
            if isinstance(item.optional_vars, ast.Name):
                self.known[item.optional_vars.id] = Made.of(self.meaning(item.context_expr))
        for statement in node.body:
            self.visit(statement)

    def visit_Attribute(self, node):
        self.generic_visit(node)
        home = self.meaning(node.value)
        if home is not None and not has(home, node.attr):
            self.wrong.append(f"{ast.unparse(node)}: there is no {node.attr}")

    def visit_Call(self, node):
        self.generic_visit(node)
        called = self.meaning(node.func)
        if not callable(called) or any(isinstance(given, ast.Starred) for given in node.args):
            return
        try:
            inspect.signature(called).bind(*node.args, **{given.arg: given for given in node.keywords if given.arg})
        except TypeError as error:
            self.wrong.append(f"{ast.unparse(node)}: {error}")

    def meaning(self, node):
        """Return a module, class, function or `Made`, or None if unknown."""
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        if isinstance(node, ast.Attribute):
            home = self.meaning(node.value)
            if isinstance(home, Made):
                return home.part(node.attr)
            return getattr(home, node.attr, None) if home is not None else None
        if isinstance(node, ast.Call):
            called = self.meaning(node.func)
            made = called if isinstance(called, type) else returned(called)
            return Made(made) if isinstance(made, type) and made.__module__.startswith("forge_") else None
        return None


class Made:
    """An instance of a class, known by the class alone."""

    def __init__(self, kind):
        self.kind = kind

    @staticmethod
    def of(meaning):
        return meaning if isinstance(meaning, Made) else None

    def part(self, name):
        result = inspect.getattr_static(self.kind, name, None)
        return functools.partial(result, self) if inspect.isfunction(result) else None


def has(home, name):
    if not isinstance(home, Made):
        return hasattr(home, name)
    return hasattr(home.kind, name) or any(name in vars(kind).get("__annotations__", {}) for kind in home.kind.__mro__)


def returned(function):
    plain = function.func if isinstance(function, functools.partial) else function
    told = getattr(plain, "__annotations__", {}).get("return")
    return getattr(inspect.getmodule(plain), told, None) if isinstance(told, str) else told


def looked_up(shown):
    """Return the errors in the marked blocks of a page, which no test runs."""
    names = Names()
    for marked, text in shown:
        before = len(names.wrong)
        names.visit(ast.parse(text))
        if not marked:  # the test of the page runs it
            del names.wrong[before:]
    return names.wrong


MARKED = sorted({page for page, mark, _ in blocks("python") if "no-run" in mark})


@pytest.mark.parametrize("page", MARKED, ids=lambda page: page.stem)
def test_python_that_no_test_runs_has_existing_names(page):
    assert looked_up([("no-run" in mark, text) for of, mark, text in blocks("python") if of == page]) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("fa.Polcy('m')", ["fa.Polcy: there is no Polcy"]),
        ("fa.Policy('m', nam='x')", ["fa.Policy('m', nam='x'): got an unexpected keyword argument 'nam'"]),
        (
            "with fa.GRPOTrainer(fa.Random()) as t:\n    r = t.fit('x', stepz=1)\n    print(r.curv)",
            ["t.fit('x', stepz=1): missing a required argument: 'steps'", "r.curv: there is no curv"],
        ),
        ("with fa.GRPOTrainer(fa.Random()) as t:\n    print(t.fit('x', steps=1).curve)", []),
    ],
)
def test_unknown_names_and_arguments_are_found(text, wrong):
    assert looked_up([(False, "import forge_agents as fa\n"), (True, text)]) == wrong


def test_the_page_of_policies_lists_the_architectures_that_can_be_trained():
    from forge_agents.models.families import TRAINABLE

    table = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8").partition("| architecture |")[2]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)[: len(TRAINABLE)]) == sorted(TRAINABLE)


def test_the_makefile_and_the_quick_start_give_the_demo_the_same_time():
    makefile, page = ((ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", "docs/quick-start.md"))
    assert "end to end (five to ten minutes on two cores, after the installation)" in makefile
    assert "After the installation this takes five to ten minutes on two cores" in " ".join(page.split())
