"""`pdserve bench serve`: load on an OpenAI server over HTTP, and what its clients see of it.

Needs neither torch nor any of our servers in this process: it measures any server that streams completions.

    run.py        the whole: warm-up, load, summary, files
    server.py     what a server says of its model
    config.py     what is asked for
    lengths.py    lengths of prompts and outputs: fixed, or drawn
    arrivals.py   when the requests of an open loop are sent
    prompts.py    random prompts, or a file's
    load.py       open and closed loop
    client.py     one streamed request and the times of its tokens
    sse.py        bytes of a stream -> events
    records.py    what is known of one request, and the latencies in it
    slo.py        --slo, and which requests keep it
    usage.py      processor time and memory of other processes
    summary.py    records -> distributions, rates, goodput, failures
    view.py       the summary as tables
    plot.py       the summary as a picture
"""
