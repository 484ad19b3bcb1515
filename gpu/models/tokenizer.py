"""Text to token ids and back, and how a conversation becomes a prompt.

Token ids are the truth: a conversation only ever grows by ids, and text is never tokenised again between turns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from jinja2.sandbox import ImmutableSandboxedEnvironment

from storage.errors import ConfigurationRefused


class Message(NamedTuple):
    """One utterance. `role` is "system", "user" or "assistant"."""

    role: str
    content: str


class Tokenizer(Protocol):
    """`stop_ids` end a turn when they are generated."""

    stop_ids: frozenset[int]
    vocab_size: int

    def decode(self, ids: Sequence[int]) -> str:
        """Text of generated ids, without the stop token."""
        ...

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids that open a conversation and ask for the assistant's turn."""
        ...

    def extend(self, messages: Sequence[Message], stopped: bool) -> list[int]:
        """Ids to append after an assistant's turn; `stopped`: that turn ended with its stop token."""
        ...


class CharTokenizer:
    """Single characters, for the tiny model: a prompt is the plain text, newline ends a turn."""

    ALPHABET = "\n abcdefghijklmnopqrstuvwxyz0123456789+-*/=<>?!.,:;()[]{}_|#@&%"

    def __init__(self) -> None:
        self._ids = {char: index for index, char in enumerate(self.ALPHABET)}
        self.vocab_size = 64
        self.stop_ids = frozenset({self._ids["\n"]})

    def _encode(self, text: str) -> list[int]:
        try:
            return [self._ids[char] for char in text]
        except KeyError as error:
            raise ConfigurationRefused(
                f"character {error} in a prompt",
                expected=f"the characters {self.ALPHABET!r}",
                action="use an environment made for the tiny model, or another model",
            ) from error

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.ALPHABET[i] if i < len(self.ALPHABET) else "~" for i in ids if i not in self.stop_ids)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        return self._encode("".join(message.content for message in messages))

    def extend(self, messages: Sequence[Message], stopped: bool) -> list[int]:
        return self.prompt(messages)


_SENTINEL = "\u2063tidegate\u2063"


class ChatTokenizer:
    """A `tokenizers` file with a chat template (Jinja, rendered in a sandbox), as Hugging Face checkpoints ship it."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as Fast

        self._fast = Fast.from_file(str(folder / "tokenizer.json"))
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        source = settings.get("chat_template") or _read_optional(folder / "chat_template.jinja")
        if not source:
            raise ConfigurationRefused(
                f"{folder} has no chat template",
                expected="chat_template in tokenizer_config.json",
                action="use an instruction-tuned model",
            )
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        self._template = environment.from_string(source)
        self._special = {key: _content(settings.get(key)) for key in ("bos_token", "eos_token")}
        self._eos = self._special["eos_token"]
        eos = self._fast.token_to_id(self._eos)
        self.stop_ids = frozenset() if eos is None else frozenset({eos})
        self.vocab_size = self._fast.get_vocab_size()

    def _render(self, messages: Sequence[Message], *, ask: bool) -> str:
        turns = [{"role": message.role, "content": message.content} for message in messages]
        return self._template.render(messages=turns, add_generation_prompt=ask, **self._special)

    def _encode(self, text: str) -> list[int]:
        return self._fast.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._fast.decode(list(ids), skip_special_tokens=True)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        return self._encode(self._render(messages, ask=True))

    def extend(self, messages: Sequence[Message], stopped: bool) -> list[int]:
        # What the template writes between an assistant's words and the next generation prompt.
        before = [Message("user", ""), Message("assistant", _SENTINEL)]
        between = self._render([*before, *messages], ask=True).split(_SENTINEL)[-1]
        return self._encode(between.removeprefix(self._eos) if stopped else between)


def _read_optional(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _content(token: object) -> str:
    """Special tokens are strings or {"content": ...} in the wild."""
    return str(token["content"]) if isinstance(token, dict) else str(token or "")


def _raise(message: str) -> None:
    raise ConfigurationRefused(
        f"the chat template refuses the conversation: {message}",
        expected="messages it accepts",
        action="check the environment's messages",
    )
