"""Tasks of a NeMo Gym resources server, over HTTP.

    environment: {name: nemo_gym, options: {url: "http://127.0.0.1:8000", data: tasks.jsonl}}

`data` is a NeMo Gym data set: one JSON object a line, with `responses_create_params` and whatever the server's verifier
wants. A rollout seeds a session, calls the tools that the task lists, and is verified for its reward. The policy calls
a tool with `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; an answer without a call is its last one.

Servers keep their sessions in memory and say nothing of revisions: a rollout that has called a tool starts over after a
crash. Their package needs Python 3.12 and is not installed here; the adapter was tested only against a stand-in that
speaks the same routes (`seed_session`, one per tool, `verify`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from gpu.environments.base import Action, CheckpointMode, Environment, Episode, StepResult
from gpu.environments.nemo_gym_server import NemoGymServer
from gpu.environments.resources import ResourceHost, ToolError, canonical
from gpu.models.tokenizer import Message
from storage.errors import ConfigurationRefused

RESOURCE = "gym"
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}


class NemoGym(Environment):
    """`token_env` names the environment variable with the server's bearer token, where it wants one."""

    def __init__(
        self,
        url: str,
        data: str,
        turns: int = 8,
        max_new_tokens: int = 512,
        timeout: float = 120.0,
        token_env: str = "",
    ) -> None:
        if turns < 1 or max_new_tokens < 1 or timeout <= 0:
            raise ValueError("turns >= 1, max_new_tokens >= 1 and timeout > 0")
        self.max_turns, self.max_new_tokens = turns, max_new_tokens
        self._server = NemoGymServer(url, timeout_s=timeout, token_env=token_env)
        self._tasks = _read(Path(data))

    @property
    def resources(self) -> Mapping[str, ResourceHost]:
        return {RESOURCE: self._server}

    @property
    def recipe(self) -> Sequence[type]:
        return [NemoGymServer]

    def __len__(self) -> int:
        return len(self._tasks)

    def task(self, index: int) -> bytes:
        return self._tasks[index]

    def episode(self) -> Episode:
        return _Rollout(self.max_turns)


class _Rollout(Episode):
    checkpoint_mode = CheckpointMode.RESTART_ONLY

    def __init__(self, turns: int) -> None:
        self._turns, self._turn = turns, 0
        self._output: list[dict[str, Any]] = []

    async def reset(self, task: bytes, seed: int) -> Sequence[Message]:
        return opening(json.loads(task)["responses_create_params"])

    async def step(self, action: Action) -> StepResult:
        self._turn += 1
        calls = tool_calls(action.text) if action.finished else []
        if not calls:
            self._output.append(_said(self._turn, action.text))
            return await self._verified()
        answers: list[str] = []
        for index, (name, arguments) in enumerate(calls):
            answer = await self._tool(name, arguments)
            self._output += _called(f"call_{self._turn}_{index}", name, arguments, answer)
            answers.append(f"<tool_response>\n{answer}\n</tool_response>")
        if self._turn >= self._turns:
            return await self._verified()
        return StepResult(False, messages=[Message("user", "\n".join(answers))])

    async def _tool(self, name: str, arguments: dict[str, Any]) -> str:
        try:
            return await self.tools.call(RESOURCE, name, arguments)
        except ToolError as error:
            return str(error)

    async def _verified(self) -> StepResult:
        said = await self.tools.call(RESOURCE, "verify", {"output": self._output})
        return StepResult(True, said["reward"], record=json.dumps(said))


def opening(parameters: dict[str, Any]) -> list[Message]:
    """The first prompt of a task: its tools as a system message, then its own messages."""
    given: Any = parameters["input"]
    inputs: list[dict[str, Any]] = [{"role": "user", "content": given}] if isinstance(given, str) else given
    tools: list[Any] = parameters.get("tools") or []
    messages = [Message(_ROLES[str(one["role"])], _text(one["content"])) for one in inputs]
    if not tools:
        return messages
    head = 'Call a tool with <tool_call>{"name": ..., "arguments": {...}}</tool_call>. The tools are:'
    told = "\n".join([head, *(json.dumps(tool) for tool in tools)])
    if messages and messages[0].role == "system":
        return [Message("system", f"{messages[0].content}\n\n{told}"), *messages[1:]]
    return [Message("system", told), *messages]


def tool_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The calls in an answer. What is malformed is none."""
    found: list[tuple[str, dict[str, Any]]] = []
    for said in _CALL.findall(text):
        try:
            call = msgspec.json.decode(said, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeEncodeError):
            continue
        name, arguments = call.get("name"), call.get("arguments", {})
        if isinstance(name, str) and isinstance(arguments, dict):
            found.append((name, cast("dict[str, Any]", arguments)))
    return found


def _text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content)


def _said(turn: int, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": f"msg_{turn}", "role": "assistant", "status": "completed", "content": [part]}


def _called(call: str, name: str, arguments: dict[str, Any], answer: str) -> list[dict[str, Any]]:
    asked = {"type": "function_call", "call_id": call, "name": name, "arguments": json.dumps(arguments)}
    return [asked, {"type": "function_call_output", "call_id": call, "output": answer}]


def _read(path: Path) -> list[bytes]:
    """The tasks of a file. Raises `ConfigurationRefused`."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise _refused(f"{path}: {error.strerror}") from error
    tasks = [_task(f"{path}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not tasks:
        raise _refused(f"{path} without a task")
    return tasks


def _task(where: str, line: bytes) -> bytes:
    try:
        task = msgspec.json.decode(line, type=dict[str, Any])
        opening(task["responses_create_params"])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _refused(f"{where}: {error!r}") from error
    return canonical(task)


def _refused(found: str) -> ConfigurationRefused:
    return ConfigurationRefused(
        found,
        expected="JSON lines with responses_create_params, whose input is text or messages",
        action="check environment.options.data",
    )
