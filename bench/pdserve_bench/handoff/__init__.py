"""`pdserve bench handoff`: what handing over costs a request, between nodes that the benchmark starts itself.

run.py        the whole: each measure with nodes of its own, tables, file
config.py     what is asked for, from flags
fleet.py      a prefill node, a decode node and a router as processes
measures.py   the four loads, and what is read off them
view.py       results as tables
"""
