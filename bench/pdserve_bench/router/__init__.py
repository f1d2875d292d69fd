"""`pdserve bench router`: what the router itself costs, in front of nodes that answer at once.

The router runs as users run it, on one core; nodes without a model and the client share another one.

    run.py        the whole: processes, phases, summary, files
    config.py     what is asked for, and the phases
    options.py    flags -> what is asked for
    fake_nodes.py the nodes' process: the protocol, and nothing behind it
    process.py    children with a ready line
    load.py       a client that counts chunks and reads nothing else
    summary.py    what each phase cost
    view.py       the summary as a table
"""
