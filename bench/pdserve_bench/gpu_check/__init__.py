"""`make gpu-check`: what a CUDA machine has to show, in one run; `--device cpu` tries its course where there is none.

    __main__.py   the parts in their order, the verdict, the exit code
    whole.py      the parts that need an engine, and the sizes of what they run
    model.py      a Qwen3 of random weights
    steps.py      decode steps of one worker: graphs against launches, and both against the memory floor
    pair.py       a prefill node and a decode node on the one device: tokens as aggregated, GB/s
    nodes.py      node processes, and requests to them without a router

The kernels alone are pdserve_kernels.triton_gpu.check's. Needs no installed pdserve: the rooms on PYTHONPATH will do.
"""
