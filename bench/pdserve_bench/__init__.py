"""Benchmarks: what clients of a server see, and how far computation is from the machine's limits.

Owns load, measurement, and how results are shown and kept. Imports the rooms that it measures inside a process; servers
it measures from outside, as any client.

    args.py        the flags of `pdserve bench`; imports nothing else
    main.py        from parsed flags to an exit code
    serve/         pdserve bench serve: load over HTTP
    kernels/       pdserve bench kernels: operations and steps against the floor
    router/        pdserve bench router: the router by itself
    handoff/       pdserve bench handoff: what handing over costs a request
    stats.py       distributions
    tables.py      a table as a value
    reports.py     JSON, PNG and HTML files
    machine.py     what a benchmark ran on
    errors.py      the error tree
"""
