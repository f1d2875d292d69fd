"""Text of pdserve: from messages to token ids and from token ids back to text.

Owns the tokenizer, the chat template, the incremental detokenizer and stop strings. Knows nothing of models, tensors,
nodes or HTTP, imports no other room and never torch, so that a router host installs without it.

    files.py           which files make a tokenizer, their identity, their end ids and sampling defaults
    tokenizer.py       Tokenizer: encode, decode, bytes of a token
    token_table.py     the bytes that each token id stands for
    detokenizer.py     IncrementalDetokenizer: a stream of ids becomes a stream of whole characters
    stop.py            StopStrings: ends a stream of text at a stop string
    chat_template.py   messages become the text of a prompt
    output_parser.py   the text of an answer taken apart: reasoning, function calls, content
    reasoning.py       thinking between <think> and </think>
    tool_parsers.py    function calls in the formats of the model families
    json_call.py       a function call written as JSON, read while it arrives
    pieces.py          what the parsers return
    gguf_tokenizer.py  the same files from the metadata of a GGUF
    errors.py          the error tree
"""
