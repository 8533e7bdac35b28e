"""APIs that programs use: OpenAI's chat completions and responses, Anthropic's messages.

Each API has an adapter with one `Protocol`. `common` has what they share. A stream contains the whole answer at once,
because a turn is one decision.
"""

from forge_agents.programs.protocols.anthropic import PROTOCOL as _MESSAGES
from forge_agents.programs.protocols.chat import PROTOCOL as _CHAT
from forge_agents.programs.protocols.common import Protocol
from forge_agents.programs.protocols.responses import PROTOCOL as _RESPONSES

__all__ = ["PROTOCOLS", "Protocol"]

PROTOCOLS: dict[str, Protocol] = {
    "/v1/chat/completions": _CHAT,
    "/v1/responses": _RESPONSES,
    "/v1/messages": _MESSAGES,
}
"""Adapters by path."""
