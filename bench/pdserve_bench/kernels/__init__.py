"""`pdserve bench kernels`: operations and whole steps against the floor, which the same run measures.

Steps are real: the worker of a node, with steps written by hand instead of a scheduler. Operations are timed inside
these steps, where caches and memory are as they are in earnest.

    run.py        the whole: models, alternating repetitions, result, files
    options.py    flags -> what is asked for
    config.py     what is asked for
    floors.py     read bandwidth and matrix peak of this machine, now
    costs.py      bytes and FLOPs of operations and of steps
    timed.py      a backend that times another one's operations
    driver.py     a worker, and the steps that it computes
    measure.py    repetitions of steps -> samples
    results.py    samples -> times, ratios, the time between operations
    view.py       the result as tables
    plot.py       the result as a picture
"""
