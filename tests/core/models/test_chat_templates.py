import copy
import itertools
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from process_checks import holds_within

from forge_agents.models import chat_templates
from forge_agents.models.chat_templates import TemplateLimitError, render
from forge_agents.rollout.rendering import Renderer

USER = [{"role": "user", "content": "hi <b> \u00e9 \ud800"}]
LONG = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\ntwo"},
    {"role": "user", "content": "three"},
]
PRINT = "{% for m in messages %}{{ m.content }}{% endfor %}"
DOUBLING = "{% set ns = namespace(s='xx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEXT_LOOPS = "{% set t = messages[0].content %}" + "{% for x in t %}" * 4 + "{% endfor %}" * 4
NAMESPACES = "".join(f"{{% set {b} = namespace(x={a}, y={a}) %}}" for a, b in itertools.pairwise(LETTERS))
LETTER_LOOP = "{% for c in messages[0].content %}" + "{{ messages }}" * 300 + "{% endfor %}"
LIMIT = "processor time|memory"
HOSTILE = {
    "nested ranges": (NESTED, "processor time"),
    "macros": ("{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n else '' }}{% endmacro %}{{ f(60) }}", "processor time"),
    "power": ("{{ 10 ** (10 ** 10) > 1 }}", LIMIT),
    "filter": ("{{ 'x' | center(10 ** 12) }}", "memory"),
    "product": ("{{ 'x' * 10 ** 12 }}", "memory"),
    "format": ("{{ '%9999999999d' % 1 }}", LIMIT),
    "doubled text": (DOUBLING, LIMIT),
    "doubled lists": (DOUBLING.replace("'xx'", "[1]").replace("ns.s ~ ns.s", "ns.s + ns.s"), LIMIT),
    "nested lists": (DOUBLING.replace("ns.s ~ ns.s", "[ns.s, ns.s]") + "{{ ns.s }}", LIMIT),
    "long output": ("{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}", "wrote"),
    "loops over a text": (TEXT_LOOPS, "processor time"),
    "text for each letter": (LETTER_LOOP, "wrote|memory"),
    "backslashes": ("{{ messages" + " | tojson" * 40 + " }}", LIMIT),
    "namespaces": (NAMESPACES + "{{ z }}", LIMIT),
}
"""Templates that take too long or too much, and a word of the error."""


@pytest.fixture(autouse=True)
def limit_cpu(monkeypatch):
    """Sets the processor time of the next workers; other limits and ordinary templates keep theirs on slow machines."""

    def set_limit(seconds):
        chat_templates._stop()
        monkeypatch.setattr(chat_templates, "_MAX_CPU_S", seconds)

    set_limit(30.0)
    yield set_limit
    chat_templates._stop()


@pytest.fixture(scope="module")
def tokenizer(tiny_llama):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_llama)


@pytest.mark.parametrize("name", HOSTILE)
def test_endless_template_is_stopped_and_its_folder_named(tokenizer, name, limit_cpu):
    template, reason = HOSTILE[name]
    if "processor time" in reason:
        limit_cpu(0.2)
    tokenizer.chat_template = template
    with pytest.raises(TemplateLimitError, match=reason) as error:
        render(tokenizer, [{"role": "user", "content": "x" * 200}])
    assert tokenizer.name_or_path in str(error.value)
    limit_cpu(30.0)
    tokenizer.chat_template = PRINT + "{{ '' * 1 }}"  # the next template is rendered as before
    assert render(tokenizer, USER) == USER[0]["content"]


@pytest.mark.parametrize("condition", ["'magic' in messages[-1].content", "messages | length > 4"])
def test_loop_that_depends_on_the_conversation_is_stopped(tokenizer, condition, limit_cpu):
    limit_cpu(0.5)
    tokenizer.chat_template = PRINT + f"{{% if {condition} %}}{NESTED}{{% endif %}}"
    for _ in range(2):
        assert render(tokenizer, LONG).startswith(" Be brief. one")
        with pytest.raises(TemplateLimitError, match="endless loop"):
            render(tokenizer, [*LONG, {"role": "user", "content": "magic"}])


@pytest.mark.parametrize("where", ["user", "assistant"])
def test_renderer_of_a_folder_with_an_endless_template_fails(tiny_llama, tmp_path, where, limit_cpu):
    limit_cpu(0.5)
    folder = tmp_path / "hostile"
    shutil.copytree(tiny_llama, folder)
    loop = f"{{% for m in messages %}}{{% if m.role == '{where}' %}}{NESTED}{{% endif %}}{{% endfor %}}"
    (folder / "chat_template.jinja").write_text(PRINT + loop)
    with pytest.raises(TemplateLimitError, match="hostile.*chat_template.jinja"):
        Renderer.of(folder).end_ids  # noqa: B018


TEMPLATES = Path(found.submodule_search_locations[0], "chat_templates") if (found := find_spec("trl")) else Path()
NAMES = sorted(file.stem for file in TEMPLATES.glob("*.jinja")) if found else []


def test_worker_renders_as_transformers(tokenizer):
    import jinja2

    conversations = {"user": USER, "long": LONG, "no system": LONG[1:], "two": [*USER, *USER]}
    rendered = dict.fromkeys(conversations, 0)
    for name, (kind, messages) in itertools.product(NAMES, conversations.items()):
        tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
        switches = {"add_generation_prompt": True, "enable_thinking": False}
        try:
            expected = tokenizer.apply_chat_template(messages, tokenize=False, **switches), ""
            rendered[kind] += 1
        except jinja2.TemplateError as error:
            expected = "", str(error)
        values = {**tokenizer.special_tokens_map, **switches}
        assert chat_templates._render_in_worker(tokenizer.chat_template, values, messages) == expected, (name, kind)
    assert all(rendered.values()) or not NAMES


def test_long_special_tokens_are_rendered_in_the_worker(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    letters = "{% for c in m.content %}{{ bos_token }}{% endfor %}"
    tokenizer.chat_template = f"{{% for m in messages %}}{letters}{{% endfor %}}"
    tokenizer.bos_token = "a" * 1_000_000
    with pytest.raises(TemplateLimitError, match="wrote|memory"):
        render(tokenizer, [{"role": "user", "content": "y" * 8170}])


def test_worker_ends_with_its_process():
    program = """
import os, signal
from forge_agents.models import chat_templates
assert chat_templates._render_in_worker("{{ messages }}", {}, []) == ("[]", "")
print(chat_templates._WORKERS[os.getpid()].process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=300, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert holds_within(60, lambda: not psutil.pid_exists(int(ended.stdout)))


def test_worker_that_died_is_replaced():
    assert chat_templates._render_in_worker("{{ messages }}", {}, []) == ("[]", "")
    process = chat_templates._WORKERS[os.getpid()].process
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert chat_templates._render_in_worker("{{ messages }}", {}, []) == ("[]", "")


def test_process_forked_during_a_rendering_has_a_worker_of_its_own():
    program = """
import os, signal, threading
from forge_agents.models import chat_templates
render = lambda: chat_templates._render_in_worker("{{ messages }}", {}, [])
assert render() == ("[]", "")
pids = [worker.process.pid for worker in chat_templates._WORKERS.values()]
locked, forked = threading.Event(), threading.Event()
def hold():
    with chat_templates._lock:
        locked.set()
        forked.wait()
threading.Thread(target=hold).start()
locked.wait()
if child := os.fork():
    forked.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert render() == ("[]", "") and chat_templates._WORKERS[os.getpid()].process.pid == pids[0]
else:
    signal.alarm(60)
    assert render() == ("[]", "") and chat_templates._WORKERS[os.getpid()].process.pid != pids[0]
    chat_templates._WORKERS[os.getpid()].stop()
    os._exit(0)
"""
    subprocess.run([sys.executable, "-c", program], timeout=300, check=True)
