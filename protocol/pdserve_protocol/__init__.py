"""Wire types of pdserve: what routers and nodes, and nodes among themselves, say to each other.

Owns the messages, their encoding, the protocol version and the ZMQ doors they pass through. Knows nothing of models,
tensors, HTTP or scheduling, and imports no other room.

    codec.py      the Message base, encode and decode, the protocol version and its history
    sampling.py   SamplingParams
    requests.py   what a router sends to a node
    outputs.py    what a node sends back for a request, and the proof of what it did
    node.py       identity and load of a node, tokenizer files, hello and ping
    handoff.py    what two nodes say about one KV hand-off
    timing.py     every deadline and interval that more than one process must agree on
    door.py       addresses, CURVE keys from the cluster key, sockets
    client.py     EngineCoreClient: asyncio client of one node
    errors.py     the error tree
"""
