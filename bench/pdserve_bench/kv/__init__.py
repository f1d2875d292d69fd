"""`pdserve bench kv`: how fast KV blocks get from one process into another, beside what could be had without us.

Two processes for each way, a sender and a receiver, on one host or on two. In each repetition the sender measures all
points and all baselines one after the other: what is compared was measured in the same minute.

    run.py          the whole: processes, samples, result, files
    options.py      flags -> what is asked for
    config.py       what is asked for
    processes.py    senders and receivers as processes; the other host
    messages.py     what sender and receiver say to each other, and the sender to the run
    receiver.py     the process that is written to
    sender.py       the process that writes, and measures
    pushes.py       what is measured: connectors and the mover
    raw.py          what they are compared with: memcpy and a socket
    raw_nixl.py     and NIXL, one contiguous buffer
    mooncake_peer.py   a peer, in an interpreter of its own
    results.py      samples -> times, GB/s, ratios
    view.py         the result as tables and as CSV
    plot.py         the result as a picture
"""
