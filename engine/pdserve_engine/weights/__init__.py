"""From what a user calls a model to tensors.

Owns files: Hugging Face folders, GGUF files, the demo model, and the cache of converted ones. Knows nothing of what the
tensors mean to a decoder.

    resolve.py        MODEL of the command line -> a Hugging Face folder
    gguf_convert.py   a GGUF file -> a Hugging Face folder, once
    gguf_names.py     what GGUF calls things, and what Hugging Face calls them
    load.py           tensors of a folder, and the identity of a model
    errors.py         the error tree
"""

from pdserve_engine.weights.load import load_weights, model_id
from pdserve_engine.weights.resolve import resolve_model

__all__ = ["load_weights", "model_id", "resolve_model"]
