"""Reads the calls of tools out of what a policy said, in the form of its family of models.

What cannot be read is data: a call without a name, or whose arguments are the text that was said.
"""

from __future__ import annotations

from gcore_core.contract.errors import ConfigError, did_you_mean

from .base import Call, Read, ToolParser
from .deepseek import DeepSeek
from .glm import Glm
from .harmony import Harmony
from .hermes import Hermes
from .kimi import Kimi
from .llama import Llama
from .minimax import MiniMax
from .mistral import Mistral
from .qwen_xml import QwenXml

__all__ = ["PARSERS", "Call", "Read", "ToolParser", "choose_parser"]

#: Parsers in the order in which a chat template's text is looked at; the last is for all others.
PARSERS: tuple[ToolParser, ...] = (
    Harmony(),
    Kimi(),
    DeepSeek(),
    MiniMax(),
    Glm(),
    QwenXml(),
    Mistral(),
    Llama(),
    Hermes(),
)


def choose_parser(name: str, template: str = "") -> ToolParser:
    """Returns a parser by its name; "auto": by the text of the model's chat template.

    Raises ConfigError for a name that no parser has.
    """
    if name == "auto":
        return next((p for p in PARSERS if p.writes(template)), PARSERS[-1])
    for parser in PARSERS:
        if parser.name == name:
            return parser
    names = ["auto", *(parser.name for parser in PARSERS)]
    raise ConfigError(
        f"no parser of tool calls is called {name!r}{did_you_mean(name, names)}.",
        where="parser",
        todo=f"Take one of {', '.join(names)}.",
    )
