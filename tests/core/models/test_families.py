"""A model's family is told by its architecture, its dialect by its chat template, whatever its folder is called."""

import json

import pytest

from forge_agents.errors import ModelNotFoundError
from forge_agents.models import resolve
from forge_agents.models.families import CHAT_FORMATS, FAMILIES, chat_format_of, inspect_model


def model(folder, architecture, template=None, file="tokenizer_config.json"):
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    if template is not None:
        text = template if file.endswith("jinja") else json.dumps({"chat_template": template})
        (folder / file).write_text(text)
    return inspect_model(folder)


def test_the_packaged_model_is_a_llama_that_talks_chatml():
    found = inspect_model(resolve.resolve("smollm2-135m-instruct"))
    assert (found.family.name, found.dialect.name, found.thinks, found.renderer) == ("llama", "chatml", False, "")


@pytest.mark.parametrize("file", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("architecture", "template", "expected"),
    [
        ("Qwen3ForCausalLM", "<|im_start|>..<tool_call>..<think>", ("qwen3", "qwen3", "hermes", True, "qwen3")),
        ("Qwen2ForCausalLM", "<|im_start|>..<tool_call>", ("qwen2", "qwen2.5", "hermes", False, "")),
        ("LlamaForCausalLM", "<|start_header_id|>", ("llama", "llama-3", "llama", False, "llama-3")),
        ("LlamaForCausalLM", "<|im_start|>..<tool_call>", ("llama", "qwen2.5", "hermes", False, "")),
        ("Qwen3_5ForConditionalGeneration", "<|im_start|><tool_call><function=<think>",
         ("qwen3_5", "qwen3.5", "xml", True, "qwen3.5")),
        ("GptOssForCausalLM", "<|start|>..<|channel|>", ("gpt_oss", "harmony", "harmony", True, "gpt-oss")),
        ("MistralForCausalLM", "[INST]..[TOOL_CALLS]", ("mistral", "mistral", "mistral", False, "")),
    ],
)  # fmt: skip
def test_architecture_and_template_are_told_apart(tmp_path, file, architecture, template, expected):
    found = model(tmp_path, architecture, template, file)
    assert (found.family.name, found.dialect.name, found.dialect.calls, found.thinks, found.renderer) == expected


def test_of_several_templates_that_for_tools_counts(tmp_path):
    several = [{"name": "default", "template": "[INST]"}, {"name": "tool_use", "template": "[INST] [TOOL_CALLS]"}]
    assert model(tmp_path, "MistralForCausalLM", several).dialect.name == "mistral"


def test_what_is_unknown_is_none_and_no_guess(tmp_path):
    found = model(tmp_path, "NovelForCausalLM")
    assert (found.architecture, found.family, found.dialect) == ("NovelForCausalLM", None, None)
    assert chat_format_of("{{ messages }}") is None
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelNotFoundError, match="config.json"):
        inspect_model(tmp_path)


def test_no_dialect_hides_another():
    for i, dialect in enumerate(CHAT_FORMATS):
        text = " ".join(dialect.marks)
        assert chat_format_of(text) is dialect, f"one before number {i}"
    architectures = [name for family in FAMILIES for name in family.architectures]
    assert len(architectures) == len(set(architectures))


def test_every_renderer_named_exists():
    library = pytest.importorskip("renderers.base", reason="comes with forge-agents-rl[verifiers]")
    library._populate_registry()
    named = {renderer for dialect in CHAT_FORMATS for renderer in dialect.renderers.values()}
    assert named <= library.RENDERER_REGISTRY.keys()


def test_the_command_says_what_a_model_can_do(tmp_path, capsys, tiny_models):
    from forge_agents.cli import main as cli

    assert cli.main(["models"]) == 0
    said = capsys.readouterr().out
    for family in FAMILIES:
        assert f"{family.models}\n  {', '.join(family.architectures)}\n  plays" in said
        assert f"does not learn: {family.why_not}" in said or not family.why_not
    model(tmp_path, "MixtralForCausalLM", "[INST]..[TOOL_CALLS] enable_thinking reasoning_content")
    assert cli.main(["models", str(tiny_models(family="qwen2")), str(tmp_path)]) == 0
    learns, refused = capsys.readouterr().out.split(f"{tmp_path}\n")
    assert "computes Qwen2ForCausalLM (Qwen2 and Qwen2.5)\n  learns   yes\n  talks    chatml" in learns
    assert "thinks   not by its template\n  tools    not by its template" in learns
    assert "learns   no: architecture 'MixtralForCausalLM' cannot be trained (Mixtral): TorchTitan has no" in refused
    assert "thinks   yes, as Policy.thinking says\n  tools    calls them by JSON behind [TOOL_CALLS]" in refused
