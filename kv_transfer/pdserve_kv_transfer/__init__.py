"""Moves KV blocks between two processes, so that nothing is used that was not verified.

Owns the Sender and Receiver state machines, the two ends of a link, the landing zone, the connector contract and the
connectors, the conversion between unlike caches, and the thread that moves bytes. Knows nothing of requests, schedulers
or models.

    effects.py         what the state machines ask for, as values
    deadlines.py       how long they wait
    sender.py          the sending half of hand-offs over one link
    receiver.py        the receiving half
    state_exchange.py  numbering of States, and what an absent id means
    link.py            envelope, heartbeat, silence
    sender_link.py     handshake and life of the sender's end
    receiver_link.py   handshake and life of the receiver's end
    wire.py            what travels over one link: whose blocks, how their numbers are stored, how they are verified
    spans.py           blocks of unlike sizes: which tokens go where
    codec.py           packing and landing of one block: convert, digest or seal, and back
    cache_memory.py    blocks as host memory: in place, or copied from and to a device
    digest.py          the digest of a block
    seal.py            encryption of a block
    staging.py         memory to write from what is not the cache's own bytes
    landing.py         the landing zone
    pages.py           memory in large pages
    shards.py          which heads go to which shard (no engine is sharded yet)
    connector.py       the contract of a connector
    connectors.py      those that exist, by name; those of other distributions
    loopback.py        both halves in one process
    slow.py            a wrapper that holds writes back
    faults.py          what shall go wrong in a drill, as text
    faulty.py          a wrapper whose writes go wrong
    tcp.py             plain sockets: tcp_source.py, tcp_target.py, and what they say to each other, tcp_wire.py
    nixl.py            NIXL
    ucx.py             where UCX may listen
    interfaces.py      the machine's network interfaces
    runs.py            coalescing of neighbours
    mover.py           the thread that owns connectors and landing passes
    events.py          what it tells the engine loop
    errors.py          the error tree
"""
