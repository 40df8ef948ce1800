"""Zip archives around tensors: what files of torch.save and `.npz` share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .. import _C
from .plan import Output
from .streamed_file import Body
from .waves import Piece


@dataclass(frozen=True)
class Member:
    """A file of the archive: bytes, and then perhaps a tensor."""

    name: str
    head: bytes
    output: Output | None = None


class ArchiveLayout:
    """Members in order, none compressed. The checksums of those with tensors become known while these are written."""

    def __init__(self, root: str, members: Sequence[Member]) -> None:
        self._members = list(members)
        self.bodies: list[Body] = []
        at = 0
        for filling, output in _Fillings(root, self._members, lambda output: 0):
            at += len(filling)
            if output is not None:
                self.bodies.append(Body(output, at))
                at += output.bytes
        self.length = at
        self._crcs: list[tuple[Output, int]] = []
        self._fillings = iter(_Fillings(root, self._members, self._crc))
        self._filling = b""
        self._number = -1

    def sealed(self, piece: Piece, address: int) -> None:
        crc = _C.crc32_of_memory(address, piece.bytes)
        if self._crcs and self._crcs[-1][0] is piece.output:
            before = self._crcs.pop()[1]
            crc = _C.crc32_combine(before, crc, piece.bytes)
        self._crcs.append((piece.output, crc))

    def filling(self, number: int) -> bytes:
        while self._number < number:
            self._filling, _ = next(self._fillings)
            self._number += 1
        return self._filling

    def head(self) -> bytes:
        return b""

    def _crc(self, output: Output) -> int:
        of, crc = self._crcs.pop(0)
        assert of is output
        return crc


class _Fillings:
    """The bytes between tensors, each with the tensor behind it; None at the end."""

    def __init__(self, root: str, members: Sequence[Member], crc_of: Callable[[Output], int]) -> None:
        self._archive = _C.ArchiveWriter(root)
        self._members = members
        self._crc_of = crc_of

    def __iter__(self) -> Iterator[tuple[bytes, Output | None]]:
        archive = self._archive
        for member in self._members:
            output = member.output
            if output is None:
                archive.add(member.name, member.head)
                continue
            archive.begin(member.name, len(member.head) + output.bytes)
            yield archive.take() + member.head, output
            crc = self._crc_of(output)
            archive.end(_C.crc32_combine(_C.crc32(member.head), crc, output.bytes))
        archive.finish()
        yield archive.take(), None
