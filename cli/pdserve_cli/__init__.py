"""The `pdserve` command: starts nodes and a router on this machine, shows what they do, asks a node how it is.

Owns processes, terminals and command lines. Imports nothing but the wire types: everything else runs in processes of
its own and is spoken to as any user would. `pdserve bench` alone works in this process: bench is imported for it.

    main.py        from a command line to an exit code
    args.py        subcommands and their flags
    serve.py       pdserve serve
    demo.py        pdserve demo: two prompts and the proof
    node.py        pdserve node status | reset-cache
    commands.py    what to run for a node or a router, and its ready line
    fleet.py       prefill nodes, decode nodes and a router as one thing that starts and stops
    supervise.py   runs a fleet for as long as some work takes; signals
    cores.py       which cores each node computes on
    processes.py   one child process: its ready line, its log, its end
    launch.py      the first moments of a child: tied to its parent's life, bound to its cores
    openai_api.py  streams an answer and measures it
    terminal.py    log lines of children
    proof_view.py  the `pdserve` object of an answer as a table
    node_view.py   a node's status as tables
    demo_prompt.py the long prompt of the demo
    errors.py      the error tree
"""
