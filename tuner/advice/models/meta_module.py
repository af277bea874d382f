"""Finds a torch module's shape by making it on the meta device, which allocates nothing.

The user's code runs in a child process, `python -m zerotune.tuner.advice.models.meta_module
PACKAGE.MODULE:CALLABLE`, so that our process imports neither it nor torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sized
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from zerotune.store.errors import UserError
from zerotune.tuner.advice.models.huggingface import READERS, from_config, read_fields
from zerotune.tuner.advice.models.model_shape import CONTEXT, HEAD_WIDTH, ModelShape, checked

TIMEOUT_S: Final = 300.0
_MARK: Final = b"zerotune-shape "
_ACTIVE: Final = ("top_k", "num_experts_per_tok", "n_active_experts")
_HEADS: Final = ("num_attention_heads", "num_heads", "n_heads", "n_head")


def shape_of(spec: str) -> ModelShape:
    """The shape, with the parameters counted, of the module that `package.module:callable` returns.

    The callable makes a `torch.nn.Module` without arguments, or is its class.

    Raises:
        UserError: it cannot be made, or has no repeated blocks.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH")))),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, spec], capture_output=True, timeout=TIMEOUT_S, env=environment, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{spec} took longer than {TIMEOUT_S:.0f} s", "give the model's dimensions") from error
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            return checked(msgspec.json.decode(line.removeprefix(_MARK), type=ModelShape))
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    message = lines[-1] if lines else "it said nothing"
    raise UserError(
        f"{spec} cannot be made: {message}",
        "name a callable without arguments that makes a torch.nn.Module, as package.module:callable, or give --layers "
        "and --hidden",
    )


def is_config(text: str) -> bool:
    """Whether the text names a configuration file, or its folder, and not a number."""
    return text.endswith(".json") or os.path.exists(text)


def shape_of_config(path: Path) -> ModelShape:
    """The shape of a `config.json`; if transformers is installed, its class counts the parameters."""
    raw, counted = read_fields(path), None
    if all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers")):
        with suppress(UserError):  # a file with its own code, for example
            counted = shape_of(os.path.abspath(path))
    try:
        shape = from_config(raw, str(path))
    except UserError:
        if counted is None:
            raise
        return counted
    return shape if counted is None else msgspec.structs.replace(shape, stated_parameters=counted.stated_parameters)


def inspect(model: Any) -> ModelShape:
    """The shape of a module, by its configuration if that is known, or else by its longest list of equal blocks.

    Raises ValueError if it has no such list, or no matrix in it.
    """
    import torch

    n_parameters = float(sum(parameter.numel() for parameter in model.parameters()))
    config: Any = getattr(model, "config", None)
    if getattr(config, "model_type", None) in READERS:
        with suppress(UserError):  # our reader does not know all fields of classes
            shape = from_config(config.to_dict(), type(model).__name__)
            return msgspec.structs.replace(shape, stated_parameters=n_parameters)
    lists = [
        list(module) for module in model.modules() if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential))
    ]
    equal = [blocks for blocks in lists if len(blocks) > 1 and len({type(block) for block in blocks}) == 1]
    if not equal:
        raise ValueError("the module has no list of equal blocks")
    blocks = max(equal, key=lambda found: sum(p.numel() for block in found for p in block.parameters()))
    matrices = [parameter for parameter in blocks[0].parameters() if parameter.dim() == 2]
    if not matrices:
        raise ValueError("a block of the module has no matrix")
    width = Counter(side for matrix in matrices for side in set(matrix.shape)).most_common(1)[0][0]
    heads = next(
        (
            value
            for module in blocks[0].modules()
            for name in _HEADS
            if isinstance(value := getattr(module, name, None), int)
        ),
        max(1, width // HEAD_WIDTH),
    )
    in_blocks = sum(parameter.numel() for block in blocks for parameter in block.parameters())
    in_block = in_blocks / len(blocks)
    n_experts, n_active = _experts(blocks[-1])  # a mixture's first blocks may have no experts
    in_experts = sum(
        parameter.numel()
        for block in blocks
        for name, parameter in block.named_parameters()
        if f".{name}".rpartition(".experts.")[1]
    )
    ffn_width, shared_ffn_width = (in_block - 4 * width * width) / (2 * width), 0.0
    if n_experts > 1:
        shared_ffn_width = max(0.0, ffn_width - in_experts / len(blocks) / (2 * width))
        ffn_width = in_experts / len(blocks) / n_experts / (2 * width)
    return ModelShape(
        n_layers=len(blocks),
        width=width,
        n_heads=heads,
        n_kv_heads=heads,
        head_width=max(1, width // heads),
        ffn_width=max(1, round(ffn_width)),
        n_experts=n_experts,
        n_active_experts=n_active or n_experts,
        shared_ffn_width=round(shared_ffn_width),
        vocabulary=max(1, math.floor((n_parameters - in_blocks) / width)),
        n_context=CONTEXT,
        stated_parameters=n_parameters,
        assumed=("n_context",) if n_active else ("n_context", "n_active_experts"),
    )


def _experts(block: Any) -> tuple[int, int | None]:
    """A block's experts, and how many of them a token passes, if the block has that number; (1, 1): no experts."""
    experts = next((module for name, module in block.named_modules() if f".{name}".endswith(".experts")), None)
    if experts is None:
        return 1, 1
    n_experts = len(experts) if isinstance(experts, Sized) else next(experts.parameters()).shape[0]
    active = (getattr(module, name, None) for module in block.modules() for name in _ACTIVE)
    return n_experts, next((value for value in active if isinstance(value, int) and 1 <= value <= n_experts), None)


def _of_config(path: Path) -> Any:
    """The model of transformers' own class for a configuration; nothing of the file is run."""
    import torch
    import transformers

    raw = json.loads(path.read_bytes())
    config = transformers.AutoConfig.for_model(**raw)
    text = config.get_text_config()
    if text is not config and "tie_word_embeddings" not in raw:  # left out, as one of the two classes assumes it
        config.tie_word_embeddings &= getattr(text, "tie_word_embeddings", True)
    named = [getattr(transformers, str(name), None) for name in raw.get("architectures") or ()]
    is_model = [one for one in named if isinstance(one, type) and issubclass(one, transformers.PreTrainedModel)]
    with torch.device("meta"):
        if is_model:
            return is_model[0](config)
        sees = "vision_config" in raw
        made = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
        return made.from_config(config)


def _make(spec: str) -> Any:
    if spec.endswith(".json"):
        return _of_config(Path(spec))
    module, _, name = spec.partition(":")
    made = importlib.import_module(module)
    for part in name.split("."):
        made = getattr(made, part)
    import torch

    with torch.device("meta"):
        model = made() if callable(made) and not isinstance(made, torch.nn.Module) else made
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"it is of type {type(model).__name__}, no torch.nn.Module")
    return model


def main() -> None:
    """Print the shape of the module that the first argument names."""
    shape = inspect(_make(sys.argv[1]))
    print(f"{_MARK.decode()}{msgspec.json.encode(shape).decode()}")


if __name__ == "__main__":
    main()
