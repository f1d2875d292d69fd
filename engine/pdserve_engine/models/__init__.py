"""Decoder models over pdserve_kernels.

Owns what a config.json means and which tensors a model is made of. Knows nothing of requests, files or scheduling.

    config.py     DecoderConfig: config.json, read and checked
    registry.py   the architectures, and what tells them apart
    rope.py       RoPE tables, with the scalings that are known
    decoder.py    Decoder: weights and the forward pass
    errors.py     the error tree
"""
