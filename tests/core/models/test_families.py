"""Family and chat format of a model, by its architecture and chat template."""

import json

import pytest

from forge_agents.errors import ModelNotFoundError
from forge_agents.models import resolve
from forge_agents.models.families import CHAT_FORMATS, FAMILIES, chat_format_of, head_dim_of, inspect_model


def model(folder, architecture, template=None, file="tokenizer_config.json"):
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    if template is not None:
        text = template if file.endswith("jinja") else json.dumps({"chat_template": template})
        (folder / file).write_text(text)
    return inspect_model(folder)


def properties(info):
    chat_format = info.chat_format
    return info.family.name, chat_format.name, chat_format.calls, info.supports_reasoning, info.renderer


def test_packaged_model_is_a_llama_with_chatml():
    info = inspect_model(resolve.resolve("smollm2-135m-instruct"))
    assert properties(info) == ("llama", "chatml", "", False, "")


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
        ("Qwen3_5ForCausalLM", "<|im_start|><tool_call><function=<think>",
         ("qwen3_5", "qwen3.5", "xml", True, "qwen3.5")),
        ("Qwen3_5MoeForConditionalGeneration", "<|im_start|><tool_call><function=<think>",
         ("qwen3_5_moe", "qwen3.5", "xml", True, "qwen3.5")),
        ("GptOssForCausalLM", "<|start|>..<|channel|>", ("gpt_oss", "harmony", "harmony", True, "gpt-oss")),
        ("Gemma3ForConditionalGeneration", "<start_of_turn>", ("gemma3", "gemma", "", False, "")),
        ("MistralForCausalLM", "[INST]..[TOOL_CALLS]", ("mistral", "mistral", "mistral", False, "")),
    ],
)  # fmt: skip
def test_family_and_chat_format_are_recognized(tmp_path, file, architecture, template, expected):
    info = model(tmp_path, architecture, template, file)
    assert properties(info) == expected


@pytest.mark.parametrize(
    ("architecture", "size"),
    [("Qwen3ForCausalLM", 128), ("Gemma3ForCausalLM", 256), ("GptOssForCausalLM", 64), ("LlamaForCausalLM", 32)],
)
def test_size_of_heads_has_the_default_of_transformers(architecture, size):
    assert head_dim_of({"architectures": [architecture], "hidden_size": 128, "num_attention_heads": 4}) == size


def test_tool_template_is_preferred(tmp_path):
    several = [{"name": "default", "template": "[INST]"}, {"name": "tool_use", "template": "[INST] [TOOL_CALLS]"}]
    assert model(tmp_path, "MistralForCausalLM", several).chat_format.name == "mistral"


def test_unknown_family_and_format_are_none(tmp_path):
    info = model(tmp_path, "NovelForCausalLM")
    assert (info.architecture, info.family, info.chat_format) == ("NovelForCausalLM", None, None)
    assert chat_format_of("{{ messages }}") is None
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelNotFoundError, match="config.json"):
        inspect_model(tmp_path)


def test_no_chat_format_hides_another():
    for i, each in enumerate(CHAT_FORMATS):
        text = " ".join(each.marks)
        assert chat_format_of(text) is each, f"one before number {i}"
    architectures = [name for family in FAMILIES for name in family.architectures]
    assert len(architectures) == len(set(architectures))


def test_every_renderer_named_exists():
    library = pytest.importorskip("renderers.base", reason="comes with forge-agents-rl[calls]")
    library._populate_registry()
    named = {renderer for each in CHAT_FORMATS for renderer in each.renderers.values()}
    assert named <= library.RENDERER_REGISTRY.keys()


@pytest.mark.parametrize(
    ("template", "switch"),
    [
        ("{%- if enable_thinking is defined and not enable_thinking %}", "on or off"),
        ("{{ 'x' if thinking }}{{ reasoning_effort|default('low') }}", "on or off, effort"),
        ("{% if 'thinking' in message %}{{ message.thinking + \"thinking\" }}{% endif %}thinking {# thinking #}", ""),
        ("{{ 'Reasoning: ' + reasoning_effort }}", "effort"),
        ("{%" * 200_000 + "'" * 200_001, ""),
    ],
    ids=["on or off", "both", "texts and attributes", "effort", "hostile"],
)
def test_reasoning_switch_is_a_variable_of_the_template(tmp_path, template, switch):
    assert model(tmp_path, "LlamaForCausalLM", template).reasoning_switch == switch


def test_models_command_prints_properties(tmp_path, capsys, tiny_models):
    from forge_agents.cli import main as cli

    assert cli.main(["list", "--models"]) == 0
    message = capsys.readouterr().out
    for family in FAMILIES:
        assert f"{family.models}\n  {', '.join(family.architectures)}\n" in message
        assert f"inference only: {family.untrainable_reason}" in message or not family.untrainable_reason
    model(tmp_path, "MixtralForCausalLM", "[INST]..[TOOL_CALLS]{% if enable_thinking %} reasoning_content")
    assert cli.main(["list", "--models", str(tiny_models(family="qwen2")), str(tmp_path)]) == 0
    trainable, refused = capsys.readouterr().out.split(f"{tmp_path}\n")
    assert "architecture Qwen2ForCausalLM (Qwen2 and Qwen2.5)\n  trainable    yes\n  chat         chatml" in trainable
    assert "reasoning    not in its template\n  tools        not in its template" in trainable
    assert "trainable    no: architecture 'MixtralForCausalLM' cannot be trained (Mixtral): TorchTitan" in refused
    assert (
        "reasoning    yes, switched by Policy.thinking (on or off)\n  tools        JSON after [TOOL_CALLS]" in refused
    )
    model(tmp_path, "X\x1b]52;c;eA==\x07", "")
    assert cli.main(["list", "--models", str(tmp_path)]) == 0
    listed = capsys.readouterr().out
    assert r"architecture X\x1b]52;c;eA==\x07" in listed and not {"\x1b", "\x07"} & set(listed)
