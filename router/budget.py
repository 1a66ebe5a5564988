"""Memory that the block index may take; whoever allocates for it asks here first. Knows nothing of blocks."""

from __future__ import annotations


class IndexFullError(Exception):
    """The allocation would exceed the budget; nothing was changed."""


class Budget:
    """Bytes taken, and how many there are. Old and new count together while a table moves to a larger place."""

    def __init__(self, max_bytes: int | None = None) -> None:
        """`max_bytes`: hard limit; None for no limit."""
        self.max_bytes = max_bytes
        #: bytes taken and not given back; at most max_bytes
        self.used_bytes = 0

    def allows(self, size_bytes: int) -> bool:
        """Whether `take` would succeed."""
        return self.max_bytes is None or self.used_bytes + size_bytes <= self.max_bytes

    def take(self, size_bytes: int) -> None:
        """Before allocating. Raises IndexFullError."""
        if not self.allows(size_bytes):
            raise IndexFullError(f"{size_bytes} bytes more than {self.used_bytes} exceed {self.max_bytes}")
        self.used_bytes += size_bytes

    def give(self, size_bytes: int) -> None:
        """After freeing."""
        self.used_bytes -= size_bytes
        assert self.used_bytes >= 0
