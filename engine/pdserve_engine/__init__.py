"""What every node runs: EngineCore, scheduler, KV cache, models, sampler, and the process around them.

    config.py             frozen configuration values
    request.py            Request, its status, and the events of its life
    scheduler_output.py   what one step is to compute, and what it yielded
    block_pool.py         KV blocks: reference counts, hashes, LRU of the cached ones
    kv_cache_manager.py   which blocks a request has
    scheduler.py          who computes how many tokens in this step
    executor.py           Executor: runs a step, returns a future
    worker.py             owns the device: weights, KV cache tensor, model runner
    model_runner.py       SchedulerOutput -> tensors -> logits -> tokens
    sampler.py            logits -> token ids and logprobs
    models/               architectures over pdserve_kernels
    weights/              a Hugging Face folder, a GGUF file or the demo model -> tensors
    core.py               EngineCore: schedule, execute, update; no sockets, no clock of its own
    handoff.py            joins scheduler and kv_transfer: offers, grants, landed prompts
    proc.py               EngineCoreProc: the event loop of a node process
    door.py               the ZMQ thread of a node
    llm.py                LLM: the offline API
"""
