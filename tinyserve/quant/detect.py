"""Which format a checkpoint is quantised in: `quantization_config` of config.json, or hf_quant_config.json.

Nothing is guessed. A method without a reader here is refused by its name, and so is a combination that its reader does
not know; MXFP4 of stacked experts (gpt-oss) and GGUF describe themselves and need no reader.

Before: fp8.py, compressed.py, gptq.py, awq.py, modelopt.py, bitsandbytes.py, torchao.py.  After: models/registry.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ..errors import CheckpointError, ConfigError, UnsupportedModel, shown
from .awq import read_awq
from .bitsandbytes import NF4, USUAL, read_bitsandbytes
from .codes import Scheme
from .compressed import Compressed, read_compressed
from .format import Fused, Stored, WeightFormat
from .fp4 import MXFP4
from .fp8 import read_fbgemm, read_fp8
from .gptq import GPTQ, read_gptq
from .grouped import ONLINE, grouped_formats
from .modelopt import ModelOptNVFP4, read_modelopt
from .stored import Method
from .torchao import TorchAO, read_torchao

READERS: dict[str, Callable[[Mapping[str, Any]], Method]] = {
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed,
    "fbgemm_fp8": read_fbgemm,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "modelopt": read_modelopt,
    "modelopt_fp4": read_modelopt,
    "torchao": read_torchao,
}
SELF_DESCRIBING = ("gguf", "mxfp4")


def detect(config: Mapping[str, Any], modelopt: Mapping[str, Any] | None = None) -> Method | None:
    """Return how a checkpoint's quantised matrices are read, or None if they need no reader.

    Args: config: of config.json.   modelopt: of hf_quant_config.json, if there is one.
    Raises: UnsupportedModel: the method or a combination is not implemented; CheckpointError: no sense in it.
    """
    own = config.get("quantization_config") or None
    if own is None:
        return None if modelopt is None else _read(read_modelopt, modelopt)
    if not isinstance(own, Mapping):
        raise CheckpointError(f"config.json: quantization_config is {shown(own)}, expected an object.")
    method = own.get("quant_method")
    if not isinstance(method, str) and "quant_algo" in own:  # ModelOpt's own name for it
        method = "modelopt"
    if method in SELF_DESCRIBING:
        return None
    if method == "compressed-tensors" and own.get("kv_cache_scheme") and not own.get("config_groups"):
        return None  # only the cache was calibrated
    if not isinstance(method, str) or method not in READERS:
        raise UnsupportedModel(
            f"The checkpoint is quantised with {shown(method)}; this version reads {', '.join(sorted(READERS))}, GGUF "
            "and plain numbers. Use another quantisation of the same model."
        )
    return _read(READERS[method], own)


def stacked_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """Return the scheme of stacked experts that describe themselves (gpt-oss's MXFP4), or None."""
    own = config.get("quantization_config")
    return MXFP4 if isinstance(own, Mapping) and own.get("quant_method") == "mxfp4" else None


def _read(reader: Callable[[Mapping[str, Any]], Method], config: Mapping[str, Any]) -> Method:
    """Call a reader. Raises: CheckpointError: values of a wrong kind, which the reader trips over."""
    try:
        return reader(config)
    except (CheckpointError, ConfigError):
        raise
    except (TypeError, ValueError, KeyError, AttributeError, re.error) as error:
        raise CheckpointError(f"The description of the quantisation makes no sense: {error!r}") from error


def check_asked(asked: str | None, method: Method | None) -> None:
    """Raise ConfigError if `--quantization` contradicts a checkpoint of safetensors."""
    if asked is None or (method is None and asked in (*ONLINE, *SELF_DESCRIBING)):
        return
    if method is None:
        raise ConfigError(
            f"--quantization {asked}, but the checkpoint has plain numbers. Leave the option out, or take one of "
            f"{', '.join(ONLINE)} to have them rounded while loading."
        )
    if asked.removesuffix("_marlin").removesuffix("_fp4") != method.title.split()[0]:
        raise ConfigError(
            f"--quantization {asked}, but the checkpoint is {method.title} and is read as it is. Leave the option out"
            + (", or take the checkpoint of plain numbers to have it rounded." if asked in ONLINE else ".")
        )


def online(asked: str | None) -> Callable[[str, Fused, tuple[Stored, ...]], WeightFormat] | None:
    """Return the choice of formats that rounds plain numbers as `--quantization` asks, or None if it does not."""
    return grouped_formats(ONLINE[asked]) if asked in ONLINE else None


def online_scheme(asked: str | None) -> Scheme | None:
    """Return what `--quantization` rounds plain numbers to, or None if it does not."""
    return ONLINE.get(asked or "")


@frozen(eq=False)
class Blank:
    """A tensor that is not there: what a method may ask of one to describe it (a `Stored` of format.py)."""

    shape: tuple[int, ...]
    numbers: tuple[int, ...] = ()
    qtype: str | None = None
    nbytes: int = 0

    def read(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers that it was given."""
        return torch.tensor(self.numbers, dtype=dtype)

    def blocks(self) -> Tensor:
        """There are none. Raises: CheckpointError: always."""
        raise CheckpointError("A tensor that is not there has no blocks.")


def dummy_scheme(method: Method, module: str, rows: int, columns: int) -> Scheme:
    """Return the scheme that a matrix would have in a checkpoint of this method.

    Raises: UnsupportedModel: only the files of the checkpoint would say.
    """
    tensors = {
        "weight": Blank((rows, columns)),
        "weight_scale": Blank((rows, 1)),
        "qweight": Blank((columns, rows // 8)),
    }
    if isinstance(method, GPTQ):
        tensors["qweight"] = Blank((columns * method.bits // 32, rows))
    elif isinstance(method, ModelOptNVFP4):
        tensors["weight"] = Blank((rows, columns // 2))
    elif isinstance(method, NF4):
        return USUAL
    elif isinstance(method, TorchAO):
        if method.usual is None:
            raise UnsupportedModel("The config of this torchao checkpoint does not say what its files hold.")
        return method.usual
    elif isinstance(method, Compressed) and method.group(module).bits < 8:
        tensors |= {"weight_packed": Blank((rows, columns // 2)), "weight_shape": Blank((2,), (rows, columns))}
        if method.group(module).width == 16:
            tensors["weight_global_scale"] = Blank((1,))
    return method.tensor(module, tensors).scheme
