"""The tensors that make up one quantised matrix of a checkpoint, seen as one tensor: `<module>.weight`.

A quantised linear layer is stored as several tensors (`qweight`, `qzeros`, `scales`, `g_idx`). `wrap` puts one
`QuantizedTensor` in their place, so that neither weight tables nor the loader know of quantisation. Whoever can keep
codes (grouped.py, experts.py) asks it for `codes()`; everybody else (embeddings, the halves of latent attention, CPU
formats) asks for `read()` and gets plain numbers, which is noted, so that a log line can say so.

Before: codes.py.  After: one file per format makes them; detect.py chooses the format; models/registry.py wraps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Protocol

import torch
from attrs import field, frozen
from torch import Tensor

from ..errors import CheckpointError
from .codes import Codes, Scheme
from .format import Stored

log = logging.getLogger(__name__)

CODED = frozenset((torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32))  # converting to these would lose


@frozen(eq=False)
class QuantizedTensor:
    """One quantised matrix (a `Stored` of quant/format.py).

    Args:
        module: the checkpoint's name of the layer.
        shape: of the matrix: outputs, inputs.
        scheme: of its codes.
        tensors: what it is made of, by name within the module.
        decode: makes the codes.
        made_dense: gets the names of those that were asked for plain numbers.
    """

    module: str
    shape: tuple[int, ...]
    scheme: Scheme
    tensors: Mapping[str, Stored]
    decode: Callable[[QuantizedTensor], Codes]
    made_dense: set[str] = field(factory=set)

    @property
    def qtype(self) -> str:
        return self.scheme.name

    @property
    def nbytes(self) -> int:
        return sum(stored.nbytes for stored in self.tensors.values())

    def codes(self) -> Codes:
        """Read all tensors. Raises: CheckpointError: they do not fit each other."""
        try:
            codes = self.decode(self)
        except (RuntimeError, LookupError, ValueError, TypeError, ArithmeticError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            shapes = ", ".join(f"{name} {list(stored.shape)}" for name, stored in self.tensors.items())
            raise CheckpointError(f"{self.module}: {self.qtype} cannot be made of {shapes}: {error}") from error
        if tuple(codes.codes.shape) != self.shape or codes.scales.shape[0] != self.shape[0]:
            raise CheckpointError(
                f"{self.module}: codes {list(codes.codes.shape)} and scales {list(codes.scales.shape)} do not fit a "
                f"weight of {list(self.shape)}."
            )
        self.check_groups(codes)
        return codes

    def check_groups(self, codes: Codes) -> None:
        """Raise CheckpointError unless every column has a scale."""
        count, width = codes.scales.shape[1], self.scheme.width
        if codes.groups is not None:
            fits = (
                len(codes.groups) == self.shape[1] and 0 <= int(codes.groups.min()) <= int(codes.groups.max()) < count
            )
        else:
            fits = count == 1 or (width > 0 and count == -(-self.shape[1] // width))
        if not fits or (codes.zeros is not None and codes.zeros.shape != codes.scales.shape):
            raise CheckpointError(
                f"{self.module}: {count} scales a row do not fit {self.shape[1]} columns ({self.qtype})."
            )

    def read(self, dtype: torch.dtype) -> Tensor:
        """Return plain numbers; see Stored."""
        self.made_dense.add(self.module)
        return self.codes().dense(dtype)

    def blocks(self) -> Tensor:
        """These are no GGUF blocks. Raises: CheckpointError: always."""
        raise CheckpointError(f"{self.module}: {self.qtype} has no GGUF blocks.")

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """Read one of the tensors. Raises: CheckpointError: it is missing, or codes are of another type."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.module}: {self.qtype} needs {self.module}.{name}, which is not there.")
        stored = self.tensors[name]
        e5m2 = dtype == torch.float8_e4m3fn and getattr(stored, "dtype", "") == "F8_E5M2"
        if e5m2 or (dtype in CODED and stored.nbytes != prod(stored.shape) * dtype.itemsize):
            raise CheckpointError(
                f"{self.module}.{name}: {'e5m2' if e5m2 else f'{stored.nbytes} bytes'} for {list(stored.shape)} "
                f"numbers, which are no {dtype}."
            )
        return stored.read(dtype)

    def maybe(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """Read one of the tensors, or return None if it is not there."""
        return self.tensor(name, dtype) if name in self.tensors else None


class Method(Protocol):
    """How one kind of quantised checkpoint is read; one class per file.

    Args:
        title: for people.
        kinds: names within a module that belong to a quantised matrix.
        marks: those of them that only a quantised module has.
    """

    title: str
    kinds: tuple[str, ...]
    marks: tuple[str, ...]

    def tensor(self, module: str, tensors: Mapping[str, Stored]) -> QuantizedTensor:
        """Return the matrix of one module; reads nothing. Raises: CheckpointError, UnsupportedModel."""
        ...


def wrap(tensors: Mapping[str, Stored], method: Method) -> dict[str, Any]:
    """Return the tensors with those of each quantised matrix replaced by one.

    Raises: CheckpointError: nothing is quantised although the config says so, or codes have no scales.
    """
    kinds = sorted(method.kinds, key=len, reverse=True)
    split: dict[str, tuple[str, str]] = {}
    modules: dict[str, dict[str, Stored]] = {}
    for name, stored in tensors.items():
        kind = next((kind for kind in kinds if name.endswith(f".{kind}")), None)
        if kind is not None:
            split[name] = module, kind = name[: -len(kind) - 1], kind
            modules.setdefault(module, {})[kind] = stored
    quantised = {module for module, own in modules.items() if any(mark in own for mark in method.marks)}
    if not quantised:
        raise CheckpointError(
            f"The config says {method.title}, but no module has {' or '.join(method.marks)}: the weights are plain. "
            "Remove quantization_config (--hf-overrides '{\"quantization_config\": null}') if that is what they are."
        )
    found: dict[str, Any] = {}
    for name, stored in tensors.items():
        module, kind = split.get(name, ("", ""))
        if module in quantised:
            weight = f"{module}.weight"
            if weight not in found:
                found[weight] = _tensor(method, module, modules[module])
            continue
        if kind == "weight" and stored.nbytes == prod(stored.shape) > 0:
            raise CheckpointError(f"{name} has one byte a number, but no scales ({' or '.join(method.marks)}).")
        found[name] = stored
    return found


def _tensor(method: Method, module: str, tensors: Mapping[str, Stored]) -> QuantizedTensor:
    """Return the matrix of one module. Raises: CheckpointError: tensors are missing, or have no sense together."""
    try:
        return method.tensor(module, tensors)
    except CheckpointError:
        raise
    except (ValueError, LookupError, TypeError, ArithmeticError, AttributeError) as error:
        shapes = ", ".join(f"{name} {list(stored.shape)}" for name, stored in tensors.items())
        raise CheckpointError(f"{module}: {method.title} cannot be made of {shapes}: {error!r}") from error
