"""The flags of nodes. A new flag is a decision: it is added here as well."""

from __future__ import annotations

import re

import pytest
from support.command_lines import parse_command

FLAGS = {
    *("--version", "--model", "--served-model-name", "--dtype", "--quantization", "--max-model-len", "--device"),
    *("--max-num-seqs", "--max-num-batched-tokens", "--block-size", "--kv-cache-memory", "--threads"),
    "--kv-cache-dtype",
    *("--enforce-eager", "--host", "--port", "--advertise-host", "--cluster-key", "--insecure"),
    *("--kv-trusted-network", "--kv-connector", "--kv-wire-dtype", "--kv-encrypt", "--kv-digest"),
    *("--drain-timeout", "--log-level"),
}


@pytest.mark.parametrize(
    ("command", "own"), [("prefill-node", set()), ("decode-node", {"--grant-policy", "--itl-target-ms"})]
)
def test_flags_are_frozen(command: str, own: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_command([command, "--help"])
    usage = capsys.readouterr().out.partition("\n\n")[0]
    assert set(re.findall(r"--[a-z-]+", usage)) == FLAGS | own
