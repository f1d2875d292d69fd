"""Compute on tensors, behind one interface.

Owns the arithmetic of a forward pass and the order in which it adds up. Knows nothing of requests, configuration files,
scheduling or sockets, and imports no other room.

    interface.py       Backend: the operations of a decoder, and the values they take
    select.py          a backend by its name
    torch_backend.py   the reference: plain torch
    errors.py          the error tree
"""
