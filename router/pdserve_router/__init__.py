"""The OpenAI HTTP API in front of any number of prefill and decode nodes.

Owns parsing and validation, tokenization, the choice of nodes, the life of one request over its two halves, text and
stop strings, and the answers. Knows nothing of tensors: a router host installs without torch.

    main.py, args.py     the `router` command
    app.py               routes, error answers, request ids
    serving.py           one generation request from body to answer
    openai_types.py      request bodies as the API defines them
    openai_answers.py    answers as the API defines them
    openapi.py           the document made from both
    validate.py          bodies to checked values and SamplingParams
    messages.py          messages to what chat templates expect
    tokens_api.py        /tokenize, /detokenize
    text_model.py        tokenizer and chat template of a served model
    parsers.py           which parsers take an answer apart
    generation.py        a request at work: its choices and the one answer that they make
    outcome.py           what one choice came to
    registry.py          the nodes: who is up, what they serve
    policy.py            which node takes the next request
    dispatcher.py        starts attempts on nodes, delivers their outputs, aborts
    lifecycle.py         one attempt as a pure state machine: tokens by position, exactly one end
    output_processor.py  tokens to text, stop strings, log probabilities
    responses.py         JSON bodies and stream chunks of completions and chat completions
    responses_api.py     the same for /v1/responses
    proof.py             what happened to a request, for the answer and for the metrics
    metrics.py           Prometheus metrics
    errors.py            the error tree
    http_errors.py       one table: error to HTTP answer
"""
