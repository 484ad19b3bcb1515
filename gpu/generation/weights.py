"""Weights between a model's parameters and the named buffers that travel and are digested."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from storage.buffers import NamedBuffer, buffers_digest
from storage.errors import ArtifactCorrupt

DTYPES: dict[torch.dtype, str] = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint8: "U8",
}
_TORCH = {name: dtype for dtype, name in DTYPES.items()}


def to_buffer(tensor: Tensor) -> NamedBuffer:
    """A tensor's bytes on the host; shares memory with a contiguous CPU tensor."""
    flat = tensor.detach().contiguous().cpu().view(-1)
    return NamedBuffer(DTYPES[tensor.dtype], tuple(tensor.shape), flat.view(torch.uint8).numpy())


def copy_bytes(tensor: Tensor, start: int, place: npt.NDArray[np.uint8]) -> None:
    """Copy a tensor's bytes from `start` on into host memory, from a GPU without a copy in between."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    torch.from_numpy(place).copy_(flat[start : start + len(place)])


def to_tensor(buffer: NamedBuffer) -> Tensor:
    """A tensor of its own memory with a buffer's content."""
    return torch.from_numpy(buffer.data.copy()).view(_TORCH[buffer.dtype]).view(buffer.shape)


def weight_buffers(model: nn.Module) -> dict[str, NamedBuffer]:
    """All parameters by Hugging Face name; shares memory with parameters on the CPU."""
    return {name: to_buffer(parameter) for name, parameter in model.named_parameters()}


def check_weights(model: nn.Module, weights: Mapping[str, NamedBuffer], digest: str) -> None:
    """Refuse weights that do not fit the model or are not the ones of `digest` ("": not compared). Raises
    `ArtifactCorrupt`."""
    wanted = {name: (DTYPES[p.dtype], tuple(p.shape)) for name, p in model.named_parameters()}
    found = {name: (buffer.dtype, tuple(buffer.shape)) for name, buffer in weights.items()}
    if wanted != found:
        odd = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        raise ArtifactCorrupt(
            f"weights differ in {len(odd)} tensors, the first is {odd[0]}: {found.get(odd[0])}",
            expected=str(wanted.get(odd[0])),
            action="publish weights of the same model",
            code="weights",
        )
    if digest:
        check_digest(weights, digest)


def check_digest(weights: Mapping[str, NamedBuffer], digest: str) -> None:
    """Raises `ArtifactCorrupt` when the weights are not the ones of `digest`."""
    actual = buffers_digest(weights)
    if actual != digest:
        raise ArtifactCorrupt(
            f"weights have digest {actual[:12]}",
            expected=f"digest {digest[:12]}",
            action="send the weights again",
            code="digest",
        )


def install(model: nn.Module, weights: Mapping[str, NamedBuffer]) -> None:
    """Copy checked weights into the parameters."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.device.type == "cpu" and parameter.is_contiguous():
                to_buffer(parameter).data[:] = weights[name].data
            else:
                parameter.copy_(to_tensor(weights[name]))
