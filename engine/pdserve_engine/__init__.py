"""What every node runs: EngineCore, scheduler, KV cache, models, sampler, and the process around them.

What a step is
    config.py             frozen configuration values
    request.py            Request, its status, and the events of its life
    scheduler_output.py   what one step is to compute, and what it yielded
    core.py               EngineCore: schedule, execute, update; no sockets, no clock of its own
    step_pace.py          how long steps take, and when the next is queued behind the one under way
    counters.py           what an engine has done since its start

Who computes what, and where its KV is
    scheduler.py          how many tokens of whom in this step
    kv_cache_manager.py   which blocks a request has
    block_pool.py         KV blocks: reference counts, hashes, LRU of the cached ones
    block_hash.py         the name of a full block

How it is computed
    executor.py           Executor: runs a step, returns a future
    fake_executor.py      one over the oracle, whose steps end when a test says so
    oracle.py             a worker without a model, over real memory, which checks every KV entry that it reads
    worker.py             owns the device: weights, KV cache memory (kv_memory.py), model runner
    model_runner.py       SchedulerOutput -> tensors (input_batch.py) -> logits -> tokens
    sampler.py            logits -> token ids and logprobs (sampling_random.py: the random numbers)
    models/               architectures over pdserve_kernels
    weights/              a Hugging Face folder, a GGUF file or the demo model -> tensors

The process around it
    node.py, args.py      command line in, running node out; wiring.py builds the engine
    proc.py               EngineCoreProc: the event loop of a node process
    outbox.py             open requests, what is to be said of them, and one end for each
    door.py               the ZMQ thread of a node
    sending.py            hand-offs from here, joined to the scheduler
    receiving.py          hand-offs to here, joined to the scheduler

    llm.py                LLM: the offline API, without a process around it
"""
