"""Moves KV blocks between two processes, so that nothing is used that was not verified.

Owns the Sender and Receiver state machines, the two ends of a link, the landing zone, the connector contract and the
connectors, and the thread that moves bytes. Knows nothing of requests, schedulers, models or sockets.

    effects.py         what the state machines ask for, as values
    deadlines.py       how long they wait
    sender.py          the sending half of hand-offs over one link
    receiver.py        the receiving half
    state_exchange.py  numbering of States, and what an absent id means
    link.py            envelope, heartbeat, silence
    sender_link.py     handshake and life of the sender's end
    receiver_link.py   handshake and life of the receiver's end
    digest.py          the digest of a block
    landing.py         the landing zone and its pass: copy, digest, copy
    connector.py       the contract of a connector
    connectors.py      those that exist, by name
    loopback.py        both halves in one process
    slow.py            a wrapper that holds writes back
    nixl.py            NIXL
    ucx.py             where UCX may listen
    runs.py            coalescing of neighbours
    mover.py           the thread that owns connectors and landing passes
    events.py          what it tells the engine loop
    errors.py          the error tree
"""
