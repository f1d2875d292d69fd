"""The prefill node: computes prompts and first tokens, and hands their KV over.

main.py     the `prefill-node` command
policy.py   what time it promises
"""
