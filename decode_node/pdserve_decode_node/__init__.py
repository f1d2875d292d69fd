"""The decode node: takes over prompts whose KV was computed elsewhere and generates the rest.

main.py     the `decode-node` command
policy.py   when to grant
"""
