"""Compute on tensors, behind one interface.

Owns the arithmetic of a forward pass and the order in which it adds up. Knows nothing of requests, configuration files,
scheduling or sockets, and imports no other room.

    interface.py       Backend: the operations of a decoder, and the values they take
    select.py          a backend by its name
    operations.py      a decoder as one operation after another
    torch_backend.py   the reference: plain torch
    cpu/               the backend for CPUs, in C
    triton_gpu/        the backend for GPUs, in Triton
    flash_attn/        the same with attention by the flash_attn package
    sampling.py        from logits to tokens
    kv_blocks.py       bytes of KV blocks: digest, copy, rows from one layout to another; in numpy: kv_blocks_reference
    quantized_cache.py a KV cache of 8-bit codes as a tensor
    digest.py          a digest that GPUs can compute
    errors.py          the error tree
"""
