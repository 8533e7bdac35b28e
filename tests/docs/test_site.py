"""The documentation site: every page is in it, every public name and every error class, and it asks no other host."""

import ast
import importlib.util
import posixpath
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RECIPES = sorted((ROOT / "recipes").glob("*/README.md"))
LOADED = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=["']?(?:https?:)?//[^"'>]*""")
"""Resources that a browser loads by itself, unlike links that a person may follow."""


@pytest.fixture(scope="module")
def site():
    spec = importlib.util.spec_from_file_location("docs_site", DOCS / "_site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def nav(site):
    """Pages by section, as they are built."""
    text = (ROOT / "mkdocs.yml").read_text()
    sections = site.navigation(yaml.safe_load(text)["nav"])
    return {title: pages for section in sections for title, pages in section.items()}


def test_every_page_is_in_the_navigation_once(nav):
    listed = [page for pages in nav.values() for page in pages]
    written = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} | {"recipes/index.md"}
    written |= {f"recipes/{path.parent.name}.md" for path in RECIPES}
    assert sorted(page for page in listed if not page.startswith("api/") and page != "errors.md") == sorted(written)
    assert len(listed) == len(set(listed))


def test_unplaced_page_follows_its_section(site):
    sections = ("Guides", "Recipes", "Results", "Reference", "Decisions")
    built = dict(next(iter(section.items())) for section in site.navigation([{title: []} for title in sections]))
    assert "verifiers.md" in built["Guides"] and "results/README.md" in built["Results"]
    assert "decisions/packaging.md" in built["Decisions"] and "errors.md" in built["Reference"]


@pytest.mark.parametrize("readme", RECIPES, ids=lambda readme: readme.parent.name)
def test_recipe_has_all_sections_and_no_broken_link(readme):
    text = readme.read_text()
    assert re.findall(r"^## (.+)", text, re.MULTILINE) == ["Run", "Settings", "Expected", "Time", "Known failures"]
    assert [link for link in re.findall(r"\]\(([^)#]+)", text) if not (readme.parent / link).exists()] == []


def test_a_recipe_on_the_site_leads_to_pages_of_the_site(site):
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*")} | set(site.recipes())
    for page, source in site.recipes().items():
        links = [posixpath.normpath(f"recipes/{link}") for link in re.findall(r"\]\(([^)#]+)", site.recipe(source))]
        assert [link for link in links if link not in pages] == [], page


@pytest.mark.parametrize(
    ("link", "on_the_site"),
    [
        ("[a](../recipes/README.md)", "[a](recipes/index.md)"),
        ("[a](../../recipes/README.md)", "[a](../recipes/index.md)"),
        ("[a](../../recipes/tool_use/README.md#time)", "[a](../recipes/tool_use.md#time)"),
        ("[a](../results/README.md)", "[a](../results/README.md)"),
    ],
)
def test_links_of_a_page_to_recipes_lead_to_their_pages_on_the_site(site, link, on_the_site):
    assert site.on_page_markdown(link, page=None, config=None, files=None) == on_the_site


def test_the_leaderboard_is_what_its_command_makes_of_the_reports():
    from forge_agents.bench.merge import board
    from forge_agents.bench.tables import as_markdown

    page, reports = DOCS / "results/leaderboard.md", sorted((DOCS / "results/benchmark").glob("*.json"))
    made = board(*reports)
    suites = {section.title.partition(" ")[0] for section in made.sections}
    assert page.read_text() == as_markdown(made) and len(suites) > 3


def test_the_readme_links_to_pages_that_exist():
    links = re.findall(r"\]\((docs/[^)#]+)", (ROOT / "README.md").read_text())
    assert links and [link for link in links if not (ROOT / link).exists()] == []


def test_the_reference_has_every_public_name(site):
    import forge_agents as fa
    import forge_trainers
    import forge_verifiers

    for package, module in (("forge_agents", fa), ("verifiers/forge_verifiers", forge_verifiers)):
        result = site.documented(package)
        assert sorted(result) == sorted(name for name in module.__all__ if not name.startswith("__"))
    assert site.documented("forge_agents")["GRPOTrainer"] == "forge_trainers.rl.trainer.GRPOTrainer"
    assert set(site.documented("trainers/forge_trainers")) == set(forge_trainers.__all__)


def test_the_reference_has_every_built_in_environment(site):
    from forge_agents.envs import registry

    classes = {registry.spec(env_id).entry_point for env_id in registry.list_envs() if env_id.startswith("forge/")}
    listed = re.findall(r"^::: ([\w.]+)\.(\w+)$", site.environments(), re.MULTILINE)
    assert len(listed) == len(set(listed)) >= 16
    assert {f"{module}:{name}" for module, name in listed} == {place for place in classes if re.search(":[A-Z]", place)}


def test_the_reference_has_what_a_loop_or_a_loss_of_ones_own_imports(site):
    """The reference has all names that two examples import, so that readers need not open the source."""
    described = {package: set(site.documented(package)) for package in site.REFERENCE}
    for example in ("rl_loop.py", "own_loss.py"):
        for node in ast.walk(ast.parse((ROOT / "examples" / example).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("forge_"):
                place = next(package for package in described if package.endswith(node.module.replace(".", "/")))
                assert {alias.name for alias in node.names} <= described[place], (example, node.module)


def test_the_list_of_errors_has_every_class(site):
    from forge_agents import errors

    named = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    classes = site.error_classes()
    assert named <= set(classes) and {"SandboxError", "ScoreError", "MissingExtraError", "ReportError"} <= set(classes)
    page = site.errors_page()
    assert all(f"\n## {name}\n" in page for name in (*classes, "NotFittedError", "BreachError", "RuntimeError"))
    assert [name for name, explanation in classes.items() if not explanation] == []


def test_messages_are_listed_with_what_varies_left_open(site):
    messages = site.raised_messages()
    assert messages["ValueError"]["forge_trainers.rl.config"][0].startswith("group_size=… gives every advantage 0. Set")
    told = messages["RunFolderError"]["forge_trainers.records.run_folder"]
    assert any("another process is training in …" in text for text in told)


def said_by(node):
    """Return the constant pieces of an expression's text that are long enough to identify it."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    pieces = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return [text for piece in pieces if len(text := " ".join(piece.split())) > 12]


def raised_literally(sources):
    """``(where, piece)`` of every message in a raise of the packages."""
    for module, nodes in sources:
        for node in nodes:
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                if getattr(node.exc.func, "id", "") == "interrupted":  # Ctrl-C is no error
                    continue
                for piece in said_by(node.exc.args[0]):
                    yield f"{module}:{node.lineno}", piece


def test_no_message_that_is_raised_is_missing_from_the_list(site):
    page = site.errors_page()
    raised = list(raised_literally(site._sources()))
    assert len(raised) > 500
    assert [(where, piece) for where, piece in raised if piece not in page] == []


@pytest.mark.parametrize(
    ("name", "module", "told"),
    [
        ("NotReadyError", "forge_trainers.rl.lifecycle", "nothing has been trained yet. Call fit first"),
        ("RuntimeError", "forge_agents.envs.env", "…: no episode is running. Call reset() before step()"),
        ("NotImplementedError", "forge_agents.envs.env", "… must define instructions(self, agent)"),
        ("FloatingPointError", "forge_trainers.learner.core", "the loss is … and the gradient norm"),
        ("BreachError", "forge_agents.envs.conformance.checks", "seed …: no end after … steps"),
        ("StallError", "forge_agents.runtime.mesh", "… did not finish … within … s. Look at"),  # made by a function
        ("RunFolderError", "forge_trainers.learner.checkpoint", "cannot write a checkpoint to …"),
        ("DivergedError", "forge_trainers.rl.train_step", "The checkpoints are unchanged, and the next run continues"),
        ("MismatchError", "forge_trainers.rl.train_step", "The checkpoints are unchanged, and the next run continues"),
        ("ValueError", "forge_trainers.offline.rows", "… has the keys …. Expected …"),
        ("ValueError", "forge_agents.tools.mcp", "… failed"),  # said where there is no other text
        ("PermissionError", "forge_agents.sandbox._isolation", "users could not be mapped into the namespace"),
        ("HTTPException", "forge_agents.viewer.server", "there is no run …; there are …"),  # a library's
    ],
)
def test_messages_are_found_wherever_they_are_made(site, name, module, told):
    assert any(told in text for text in site.raised_messages()[name][module])


def test_drawn_pictures_load_nothing_and_are_named_by_a_page():
    drawn = sorted(DOCS.rglob("*.svg"))
    pages = "".join(page.read_text() for page in DOCS.rglob("*.md"))
    assert drawn and [file.name for file in drawn if file.name not in pages] == []
    for file in drawn:
        text = file.read_text()
        assert re.findall(r"""url\((?!#)|(?:href|src)=|@import|<script|<foreignObject""", text) == [], file.name


@pytest.mark.timeout(560)
def test_the_site_is_built_strictly_and_asks_no_other_host(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(ROOT / "mkdocs.yml")]
    done = subprocess.run(
        [*command, "--site-dir", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=540
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.html")}
    assert len(pages) > 30
    assert {name: LOADED.findall(text) for name, text in pages.items() if LOADED.search(text)} == {}
    styles = "".join(path.read_text() for path in tmp_path.rglob("*.css"))
    assert re.findall(r"url\(\s*[\"']?(?:https?:)?//[^)]*|@import[^;]*//[^;]*", styles) == []
    assert "forge_trainers.rl.trainer.GRPOTrainer" in pages["api/forge_agents.html"]
    assert 'class="doc doc-heading"' in pages["api/forge_agents.html"]
    assert "gives every advantage 0" in pages["errors.html"]
