"""Errors of the KV transfer.

TransferError
├── ConnectorMissing      no connector of that name, or its library is not installed
├── BadConnectorSpec      what the operator asks for cannot be read
├── RegionUnusable        a region's metadata does not fit this connector
├── RegionUnreachable     the region's owner is gone, or has fenced it
├── WriteFault            a write ended with an error
├── RegionTooSmall        the landing region holds too few blocks
├── SealKeyMissing        blocks are to be sealed, and there is no cluster key
├── SealSpent             a link has sealed as many blocks as its key may
├── NoMemory              the system gives none for a region or for staging
├── CannotPin             memory of the host that a GPU is to copy to cannot be page-locked
└── NoSuchInterface       no network interface has the address to bind
"""

from __future__ import annotations


class TransferError(Exception):
    """Base of all errors of this package."""


class ConnectorMissing(TransferError):
    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"KV connector {name!r} is not available: {detail}")


class BadConnectorSpec(TransferError):
    def __init__(self, text: str, detail: str) -> None:
        super().__init__(f"KV connector {text!r}: {detail}")


class RegionUnusable(TransferError):
    def __init__(self, region: str, detail: str) -> None:
        super().__init__(f"landing region {region} cannot be used: {detail}")


class RegionUnreachable(TransferError):
    def __init__(self, region: str, detail: str) -> None:
        super().__init__(f"landing region {region} cannot be reached: {detail}")


class WriteFault(TransferError):
    def __init__(self, detail: str) -> None:
        super().__init__(f"a KV write failed: {detail}")


class RegionTooSmall(TransferError):
    def __init__(self, region_bytes: int, block_bytes: int, min_slots: int) -> None:
        super().__init__(
            f"a landing region of {region_bytes} bytes holds fewer than {min_slots} KV blocks of {block_bytes} bytes"
        )


class SealKeyMissing(TransferError):
    def __init__(self) -> None:
        super().__init__("KV blocks are to be encrypted (--kv-encrypt), which takes a --cluster-key")


class SealSpent(TransferError):
    def __init__(self) -> None:
        super().__init__("the link's key has sealed as many blocks as it may; a new link has a new one")


class NoMemory(TransferError):
    def __init__(self, num_bytes: int, reason: str) -> None:
        super().__init__(f"there are no {num_bytes} bytes of memory: {reason}")


class CannotPin(TransferError):
    def __init__(self, num_bytes: int, reason: str) -> None:
        super().__init__(f"{num_bytes} bytes of memory cannot be page-locked: {reason}")


class NoSuchInterface(TransferError):
    def __init__(self, host: str) -> None:
        super().__init__(f"no network interface of this machine has the address {host}")
