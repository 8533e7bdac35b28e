"""Renders conversations to tokens and parses responses. A model's own tokens are never tokenized again."""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from cachetools import LRUCache, cached

from forge_agents.envs.env import writable
from forge_agents.envs.reasoning import (
    answer_start,
    closing_text,
    continuation,
    is_tag,
    opens_reasoning,
    split_reasoning,
    split_response,
)
from forge_agents.errors import ForgeError
from forge_agents.imports import lean_transformers
from forge_agents.models import resolve as models
from forge_agents.models.chat_templates import TemplateRefusalError, render
from forge_agents.models.families import REASONING_EFFORT, REASONING_SWITCHES
from forge_agents.policy import Thinking
from forge_agents.rollout.tokenizing import encode, has_slow_patterns, tokenize
from forge_agents.runtime import startup
from forge_agents.tools.formats import RESULT_TAGS
from forge_agents.tools.native import CallReader, reader_for
from forge_agents.types import ToolCall

_MARK = "\u2063answer\u2063"  # stands for a response while the template is rendered; `_defuse` takes it out of any text

_ENDS = {"<|return|>": "<|end|>"}
"""Tokens that a template (gpt-oss) writes in place of the token with which the model ended its answer."""
_CALL_MARK = re.compile(r"tool|python_|TOOL_CALLS|ARGS|CALL_ID|_ACTION")
"""Matches control tokens of tool calls, in any model family."""
_RESULT_MARK = re.compile(r"respon|result|output|list|<\|(?:im_)?tool\|?>")
"""Matches control tokens that a model reads but does not write: those of tool results and lists of tools."""
_RESULT = re.compile(r"respon|result|output", re.IGNORECASE)
"""Matches tokens around tool results. Tokenizers such as DeepSeek's do not mark them as special."""
_MAX_CACHED_TOKENS = 2_000_000
"""Size of the cache of rendered texts, about 80 MB. One text of a program may have a million tokens."""
_TOKENS_PER_TEXT = 488
"""Cost of a cached text in addition to its tokens, to limit the cache to 4,000 texts."""
_BRACKETED = re.compile(r"<\S+>|\[\S+\]")
"""Matches texts of control tokens. Some tokenizers also add runs of blanks."""
_MAX_LAYOUTS = 4096
"""Number of role sequences whose layout is cached."""
_LAYOUT_MARK = re.compile(r"zq\d+qz")
_PROBE = [{"role": "user", "content": "-"}]
_ANSWERED = [*_PROBE, {"role": "assistant", "content": _MARK}]
Layout: TypeAlias = Callable[[list[dict[str, str]]], list[dict[str, str]]]


class ControlTokenError(ForgeError, ValueError):
    """A text contains a control token that only the model itself may write."""


class Renderer:
    """Turns a conversation into one growing token stream.

    The first prompt is the chat template applied to instructions and observation. Every later prompt consists of the
    previous prompt, the response's tokens exactly as they were sampled, and the tokens that the template writes between
    a response and the next generation. Each prompt therefore extends the previous one, the engine's prefix cache always
    hits, and the learner trains on exactly the tokens that were sampled.

    Args:
        tokenizer: A Hugging Face tokenizer with a chat template and an end-of-sequence token.
        thinking: Whether the template turns reasoning on, as `Policy.thinking`.

    A message that the template refuses or omits reaches the model in another role: later system messages and tool
    results as user messages, and instructions in front of the first user message.

    Raises:
        ValueError: There is no chat template or no end-of-sequence token, or the template refuses or omits user
            messages, does not begin an answer in a prompt (``add_generation_prompt``), or cannot turn reasoning on and
            off.
    """

    def __init__(self, tokenizer: Any, *, thinking: Thinking = "auto") -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template. Use an instruction-tuned "
                "model or set tokenizer.chat_template"
            )
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token. Set eos_token in its "
                "tokenizer_config.json"
            )
        self._tokenizer = tokenizer
        tokenizer.encode("")  # turns off padding and truncation, which a model's file may turn on
        self.may_be_slow = has_slow_patterns(tokenizer)
        """Whether texts of any length should be tokenized outside of the event loop."""
        self.eos_id: int = tokenizer.eos_token_id
        # all_special_tokens omits tokens without a role, such as those that open a message
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        special = {*tokenizer.all_special_tokens, *added}
        ends = sorted(token for token in special if not _CALL_MARK.search(token))
        self._ends = dict(zip(tokenizer.convert_tokens_to_ids(ends), ends, strict=True))
        self._start = _cached(lambda messages: self._encode(self._template(self._defused(messages))))
        self._between = _cached(self._render_between)
        self._layout = cached(LRUCache(_MAX_LAYOUTS), lock=threading.Lock())(self._find_layout)
        self._switches: dict[str, bool | str] = {}
        self._layout(("user",))  # fails if the template omits even this message
        self._check_generation_prompt()
        self._structure = self._role_tokens()
        special |= self._structure | self._result_tokens()
        self._special = tuple(sorted(special, key=lambda token: (-len(token), token)))
        self._lookalikes = self._normalized_tokens()
        if thinking != "auto":
            self._switches = self._switches_of(thinking)

    @classmethod
    def of(cls, folder: Path, *, thinking: Thinking = "auto") -> Renderer:
        """The renderer of a model folder, cached as long as its files do not change."""
        files = (file for file in folder.iterdir() if file.suffix != ".safetensors")
        return _renderer(folder, thinking, tuple(sorted((file.name, file.stat().st_mtime_ns) for file in files)))

    def start(self, instructions: str, observation: str) -> tuple[int, ...]:
        """Tokens of a first prompt, up to the model's answer."""
        messages = (("user", observation),)
        return self._start((("system", instructions), *messages) if instructions else messages)

    def extend(self, prompt_ids: Sequence[int], response_ids: Sequence[int], observation: str) -> tuple[int, ...]:
        """Tokens of the next prompt: `prompt_ids`, `response_ids` unchanged, then `observation`."""
        return self.go_on(prompt_ids, response_ids, (("user", observation),))

    def begin(self, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """Tokens of a prompt with a whole conversation, given as role and text of each message."""
        return self._start(tuple(messages))

    def go_on(
        self, prompt_ids: Sequence[int], response_ids: Sequence[int], messages: Sequence[tuple[str, str]]
    ) -> tuple[int, ...]:
        """As `extend`, with new messages given as role and text of each."""
        return (*prompt_ids, *response_ids, *self._between(tuple(messages), self._end_of(response_ids)))

    def answer(self, text: str, *, cut: bool = False) -> tuple[int, ...]:
        """Tokens of an answer that was not sampled, as the model would have written it after a prompt.

        Args:
            text: Reasoning in the tags of any family, if there is any, and the answer. Surrounding blanks are removed.
                If prompts end with an opening tag, the text needs none.
            cut: Whether the text is incomplete. Otherwise `end_ids` are appended.

        Raises:
            ControlTokenError: The text contains the end-of-turn token, or a token that the chat template writes between
                messages. Other control tokens are tokenized as text, except reasoning tags and marks of tool calls.
        """
        for token in self._special:
            if token not in text:
                continue
            if token == self._tokenizer.eos_token:
                raise ControlTokenError(f"an answer contains the end-of-turn token {token!r}. Remove it")
            if token in self._structure and any(token in part for part in split_reasoning(text)):
                raise ControlTokenError(
                    f"an answer contains the control token {token!r}, which the chat template writes between messages. "
                    "Remove it, or write it with a space in between"
                )
        template = str(self._tokenizer.chat_template)
        written = continuation(self._sample_prompt, text.strip(), template=template)
        pieces = self._without_control_tokens(written.strip())
        ids = tuple(token for piece in pieces for token in self._encode(piece))
        for token in filter(None, map(self._lookalikes.get, ids)):
            if not (_is_call_mark(token) or is_tag(token)):
                raise ControlTokenError(
                    f"an answer contains a text that the tokenizer reads as the control token {token!r}. Remove it"
                )
        return ids if cut else (*ids, *self.end_ids)

    def _without_control_tokens(self, text: str) -> list[str]:
        """`text`, split inside each control token of reasoning and answer, so that the pieces are tokenized as text."""
        cuts = {0, len(text)}
        reasoning, answer = split_reasoning(text, opened=bool(self._opening))
        for part, begin in ((reasoning, text.find(reasoning)), (answer, text.rfind(answer))):
            for token in self._special:
                if token in part and not _is_call_mark(token):
                    if begin < 0:
                        raise ControlTokenError(f"the reasoning contains the control token {token!r}. Remove it")
                    cuts |= {begin + match.start() + 1 for match in re.finditer(re.escape(token), part)}
        return [text[start:end] for start, end in itertools.pairwise(sorted(cuts))]

    def reads(self, prompt_ids: Sequence[int], text: str) -> bool:
        """Whether a prompt with these tokens contains `text`."""
        prompt = str(self._tokenizer.decode(list(prompt_ids), skip_special_tokens=False))
        return self._defuse(text).strip() in prompt

    def parse(self, response_ids: Sequence[int], *stop: str) -> tuple[str, str]:
        """Reasoning and answer of a response. See `text`."""
        return split_reasoning(self.text(response_ids, *stop), opened=bool(self._opening))

    def sections(self, response_ids: Sequence[int], *stop: str) -> tuple[str, str, str]:
        """As `parse`, with the raw reasoning in the middle. See `split_response`."""
        return split_response(self.text(response_ids, *stop), opening=self._opening)

    def closing(self, response_ids: Sequence[int]) -> tuple[int, ...]:
        """Tokens that close the reasoning in which a response ended. Empty if it did not end inside reasoning."""
        return self._encode(self._closing(response_ids))

    def stopped_thinking(self, response_ids: Sequence[int]) -> str:
        """The tag that closes the reasoning in which a stop text ended a response. Empty if it ended elsewhere."""
        return "" if self._end_of(response_ids) else self._closing(response_ids).strip()

    def _closing(self, response_ids: Sequence[int]) -> str:
        return closing_text(self._opening + str(self._tokenizer.decode(list(response_ids), skip_special_tokens=False)))

    @functools.cached_property
    def call_reader(self) -> CallReader | None:
        """Parser of calls in the grammar of the model's family, None if the family writes JSON that is parsed as text.

        Raises:
            MissingExtraError: The package with the grammar is missing.
        """
        return reader_for(self._tokenizer)

    def calls(
        self, response_ids: Sequence[int], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, tuple[ToolCall, ...]]:
        """Parse calls of `tools` (schemas) in the grammar of the model's family.

        Returns the text around them and the calls. Both are empty if there are none. The text may contain JSON calls.
        """
        if self.call_reader is None:
            return "", ()
        if not self.parse(response_ids)[1]:  # an empty answer, or unfinished reasoning
            return "", ()
        ids = response_ids[self.thought_length(response_ids) :]
        return self.call_reader(ids[:-1] if ids[-1] in (self.eos_id, self.end_ids[-1]) else ids, tools)

    def thought_length(self, response_ids: Sequence[int]) -> int:
        """Number of reasoning tokens, including tags: the tokens before those of the answer."""
        answer = self.parse(response_ids)[1]

        def in_answer(at: int) -> bool:  # a text that begins inside a character begins with replacement characters
            return answer.endswith(self.text(response_ids[at:]).lstrip("\N{REPLACEMENT CHARACTER}"))

        return bisect.bisect_left(range(len(response_ids) + 1), True, key=in_answer)

    def text(self, response_ids: Sequence[int], *stop: str) -> str:
        """Text of a response up to the end-of-turn token, or a `stop` text after the reasoning, stripped."""
        return self._cut_at_stop(response_ids, stop)[0]

    def stopped_by(self, response_ids: Sequence[int], *stop: str) -> str:
        """The `stop` text that ends an answer. Empty if it contains none."""
        return self._cut_at_stop(response_ids, stop)[1]

    def _cut_at_stop(self, response_ids: Sequence[int], stop: Sequence[str]) -> tuple[str, str]:
        ids = tuple(response_ids)
        if ids[-len(self.end_ids) :] == self.end_ids:
            ids = ids[: -len(self.end_ids)]
        elif self._end_of(ids):
            ids = ids[:-1]
        text = str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
        start = answer_start(text, opened=bool(self._opening)) if stop else 0
        matches = [(at, word) for word in stop if (at := text.find(word, start)) >= 0]
        end, word = min(matches, default=(None, ""))
        return text[:end].strip(), word

    @functools.cached_property
    def max_token_chars(self) -> int:
        """Length of the longest token. A text of more characters than this times a number of tokens takes more tokens.

        Exceptions are texts of which the tokenizer's normalizer deletes most characters.
        """
        return max(map(len, self._tokenizer.get_vocab()))

    def piece(self, token_id: int) -> str:
        """Text of one token, including blanks."""
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))

    @functools.cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, as the chat template writes them. Generation must stop at the last one.

        The tokenizer's end-of-sequence token may be a different one: many base models have ``<|endoftext|>`` and a
        template that writes ``<|im_end|>``. If a template writes nothing after an answer, as GLM's does, the first
        token of the next message ends it.
        """
        following, eos = "", str(self._tokenizer.eos_token)
        with contextlib.suppress(ValueError):
            following = self._template([*_ANSWERED, *_PROBE]).rpartition(_MARK)[2]
        before, separator, _ = following.partition(eos)
        if separator and not self._without_controls(before):
            return self._encode(before + eos)
        first = next((token for token in self._special if following.startswith(token)), "")
        writes_another = first == _ENDS.get(eos)
        return (self.eos_id,) if not first or writes_another or _CALL_MARK.search(first) else self._encode(first)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens at which generation must stop, in addition to those that an engine knows."""
        return () if self.end_ids[-1] == self.eos_id else self.end_ids[-1:]

    @functools.cached_property
    def _opening(self) -> str:
        """The opening reasoning tag with which the template ends prompts. Empty if it writes none."""
        return opens_reasoning(self._sample_prompt)

    @functools.cached_property
    def _sample_prompt(self) -> str:
        return self._template(_PROBE)

    def _end_of(self, response_ids: Sequence[int]) -> str:
        """The control token that ends a response, of the several that end turns in most families. May be empty."""
        return self._ends.get(response_ids[-1], "") if response_ids else ""

    def _render_between(self, messages: tuple[tuple[str, str], ...], end: str) -> tuple[int, ...]:
        rendered = self._template([*_ANSWERED, *self._defused(messages)])
        _, mark, between = rendered.rpartition(_MARK)
        if not mark:
            raise ValueError(
                f"the chat template of {self._tokenizer.name_or_path!r} drops or rewrites assistant messages, so "
                "conversations cannot be continued token by token. Use a model or a template that keeps them"
            )
        # if the response already contains its end, omit the template's end and the text before it
        before, separator, rest = between.partition(_ENDS.get(end, end) or _MARK)
        closes = separator and self._tokenizer.eos_token not in before and not self._without_controls(before)
        return self._encode(rest if closes else between)

    def _without_controls(self, text: str) -> str:
        return functools.reduce(lambda left, token: left.replace(token, ""), self._special, text)

    def _template(self, messages: list[dict[str, str]]) -> str:
        """Render `messages` and the beginning of an answer, in the first layout that shows every message."""
        return self._apply_template(self._layout(tuple(message["role"] for message in messages))(messages))

    def _find_layout(self, roles: tuple[str, ...]) -> Layout:
        """The first layout in which the template shows every message of a conversation with these roles.

        Raises:
            ValueError: The template refuses these roles or omits a message in every layout.
        """
        marks = [f"zq{number}qz" for number in range(len(roles))]
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        refusal: ValueError | None = None
        for layout in _LAYOUTS:
            try:
                rendered = self._apply_template(layout(messages))
            except TemplateRefusalError as error:  # Gemma and Mistral, if one role has two messages in a row
                refusal = refusal or error
                continue
            found_marks = set(_LAYOUT_MARK.findall(rendered))  # one search: a program may send 200,000 messages
            lost = [role for role, mark in zip(roles, marks, strict=True) if mark not in found_marks]
            if not lost:
                return layout
            refusal = refusal or ValueError(
                f"the chat template of {self._tokenizer.name_or_path!r} omits messages of the role {lost[0]!r} in "
                f"a conversation of {', '.join(roles[:20])}. Use a model or a template that shows each message"
            )
        assert refusal is not None
        raise refusal

    def _switches_of(self, thinking: Thinking) -> dict[str, bool | str]:
        """Return the variables that set the template's reasoning. Raises ValueError if it ignores or refuses them."""
        names: Sequence[str] = REASONING_SWITCHES
        value: bool | str = thinking == "on"
        others: tuple[bool | str, ...] = (True, False)
        if thinking not in ("on", "off"):
            names, value, others = (REASONING_EFFORT,), thinking, ("low", "medium")
        if len({self._apply_template(_PROBE, dict.fromkeys(names, other)) for other in others}) == 1:
            raise ValueError(
                f"thinking={thinking!r}, but the chat template of {self._tokenizer.name_or_path!r} has no switch for "
                f"it ({' or '.join(names)}). Leave thinking='auto'"
            )
        switches = dict.fromkeys(names, value)
        self._apply_template(_PROBE, switches)
        return switches

    def _check_generation_prompt(self) -> None:
        """Raise ValueError if the template writes a role before an answer but omits it in prompts."""
        prompt = self._apply_template(_PROBE)
        if prompt != self._apply_template(_PROBE, generation_prompt=False):
            return
        answered = ""
        with contextlib.suppress(TemplateRefusalError):
            answered = self._apply_template(_ANSWERED)
        header = answered.partition(_MARK)[0].removeprefix(prompt) if answered.startswith(prompt) else ""
        if split_reasoning(f"{header}{_MARK}")[1].strip() != _MARK:  # more than blanks and empty reasoning
            raise ValueError(
                f"the chat template of {self._tokenizer.name_or_path!r} writes {header!r} before an answer, but omits "
                "it in a prompt, so the model would be trained without it. Let the template write it at its end "
                "{% if add_generation_prompt %}, in chat_template.jinja or tokenizer_config.json of the model's folder"
            )

    def _role_tokens(self) -> set[str]:
        """Tokens between messages. Some tokenizers, such as DeepSeek's, do not mark them as special."""
        text = self._apply_template(_PROBE)
        with contextlib.suppress(ValueError):
            text = self._template([{"role": role, "content": "-"} for role in ("system", "user", "assistant", "user")])
        tokens = (token.content for token in self._tokenizer.added_tokens_decoder.values())
        return {token for token in tokens if token in text and _BRACKETED.fullmatch(token) and not is_tag(token)}

    def _result_tokens(self) -> set[str]:
        """Tokens around tool results. Qwen's tokens are left out, because environments write results with them."""
        tokens = (token.content for token in self._tokenizer.added_tokens_decoder.values())
        return {token for token in tokens if _BRACKETED.fullmatch(token) and _RESULT.search(token)} - {*RESULT_TAGS}

    def _apply_template(
        self,
        messages: list[dict[str, str]],
        switches: Mapping[str, bool | str] | None = None,
        *,
        generation_prompt: bool = True,
    ) -> str:
        chosen = self._switches if switches is None else switches
        return render(self._tokenizer, messages, add_generation_prompt=generation_prompt, **chosen)

    def _encode(self, text: str) -> tuple[int, ...]:
        text = writable(text)  # of a stranger's file; the library takes no half of a surrogate pair
        return encode(self._tokenizer, text, may_be_slow=self.may_be_slow)

    def _defused(self, messages: tuple[tuple[str, str], ...]) -> list[dict[str, str]]:
        return [{"role": role, "content": self._defuse(text, by_model=role == "assistant")} for role, text in messages]

    def _defuse(self, text: str, *, by_model: bool = False) -> str:
        """Break up special tokens in `text`, because one agent's text must not open a new role in another's prompt.

        A text `by_model` itself keeps its marks of tool calls.
        """
        if _MARK in text:  # it would be taken for the mark of an answer
            text = text.replace(_MARK[0], "")
        for token in self._special:
            if token in text and not (by_model and _is_call_mark(token)):
                text = text.replace(token, f"{token[0]} {token[1:]}")
        return self._without_lookalikes(text, by_model=by_model) if self._lookalikes else text

    def _normalized_tokens(self) -> dict[int, str]:
        """Special tokens by id that the tokenizer finds in normalized text: fullwidth letters may then match, too."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or backend.normalizer is None:
            return {}
        added = self._tokenizer.added_tokens_decoder.items()
        return {number: token.content for number, token in added if token.normalized and token.content in self._special}

    def _without_lookalikes(self, text: str, *, by_model: bool) -> str:
        """`text` with a question mark for each part that becomes a special token only after normalization.

        Without the question mark, the texts around such a part could form another token.
        """
        while True:
            read = tokenize(self._tokenizer, text, add_special_tokens=False, return_offsets_mapping=True)
            places = [
                place
                for number, place in zip(read["input_ids"], read["offset_mapping"], strict=True)
                if number in self._lookalikes and not (by_model and _is_call_mark(self._lookalikes[number]))
            ]
            if not places:
                return text
            ends = [0, *(max(end, start + 1) for start, end in places)]
            starts = [*(start for start, _ in places), len(text)]
            text = "?".join(text[end:start] for end, start in zip(ends, starts, strict=True))


def _cached(render: Callable[..., tuple[int, ...]]) -> Callable[..., tuple[int, ...]]:
    """Cache the latest results of `render`: games repeat the same texts."""
    cache: LRUCache[Any, tuple[int, ...]] = LRUCache(_MAX_CACHED_TOKENS, lambda ids: len(ids) + _TOKENS_PER_TEXT)
    return cached(cache, lock=threading.Lock())(render)


def _is_call_mark(token: str) -> bool:
    return bool(_CALL_MARK.search(token)) and not _RESULT_MARK.search(token)


def _alternating(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Merge neighbors of one role. Later system messages become user messages."""
    merged: list[tuple[str, list[str]]] = []
    for message in messages:
        role = "user" if merged and message["role"] == "system" and merged[-1][0] != "system" else message["role"]
        if merged and merged[-1][0] == role:
            merged[-1][1].append(message["content"])
        else:
            merged.append((role, [message["content"]]))
    return [{"role": role, "content": "\n\n".join(texts)} for role, texts in merged]


def _as_user(*roles: str) -> Layout:
    def layout(messages: list[dict[str, str]]) -> list[dict[str, str]]:
        return _alternating(
            [{**message, "role": "user" if message["role"] in roles else message["role"]} for message in messages]
        )

    return layout


_LAYOUTS: tuple[Layout, ...] = (list, _alternating, _as_user("tool"), _as_user("system"), _as_user("system", "tool"))
"""Layouts of a conversation, the most faithful first. Gemma 1 and others have no system messages."""


@functools.lru_cache(maxsize=8)  # a tokenizer takes seconds to load
def _renderer(folder: Path, thinking: Thinking, files: tuple[tuple[str, int], ...]) -> Renderer:
    loaded = "transformers" in sys.modules
    progress = contextlib.nullcontext() if loaded else startup.track("library", "transformers", "for the tokenizer")
    with progress, lean_transformers():
        from transformers import AutoTokenizer  # noqa: F401  # `load_tokenizer` uses it

    return Renderer(models.load_tokenizer(folder), thinking=thinking)
