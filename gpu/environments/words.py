"""How the built-in tool environments talk: commands with a sign in front, and replies in the tiny model's alphabet."""

from __future__ import annotations

from gpu.models.tokenizer import CharTokenizer


def command(text: str, signs: str) -> tuple[str, str]:
    """The first line that begins with one of `signs`, as the sign and the rest; ("", text) when there is none."""
    for line in text.splitlines():
        stripped = line.strip()
        if stripped and stripped[0] in signs:
            return stripped[0], stripped[1:].strip()
    return "", text.strip()


def spoken(text: str) -> str:
    """A message that asks for the next turn, in characters that every tokenizer has."""
    return "".join(char for char in text.lower() if char in CharTokenizer.ALPHABET) + ">"
