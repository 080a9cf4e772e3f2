"""Cutting the experts of a program, and the all-to-alls around them, into chunks that overlap."""

from __future__ import annotations

from collections.abc import Iterator

from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Op
from pipeswift.program.steps import Lane, Part, Program, Work, issue

LOCAL = -1  # the chunk of the tokens whose expert is on their own rank: it is not sent, and computed first

_CUT = (Part.DISPATCH, Part.EXPERTS, Part.COMBINE)


def chunk(program: Program, chunks: int, *, local_first: bool = False) -> Program:
    """The same program with the experts of every MoE segment in `chunks` groups, each with all-to-alls of its own.

    All chunks are sent for at once, and each is sent on as soon as it is computed: while chunk k computes, chunk k + 1
    arrives and chunk k - 1 leaves.

    local_first: the tokens that stay on their rank are a chunk of their own, `LOCAL`, that needs no all-to-all and is
    computed while the first one arrives. A weight gradient is of all tokens of a group, so each is added to once and
    its bits depend on no chunking. Programs without all-to-alls stay as they are.
    Raises PipeSwiftError for less than one chunk, and for a program that is in chunks already.
    """
    if chunks < 1:
        raise PipeSwiftError(f"a program is cut into 1 chunk or more: got chunks={chunks}; 1 leaves it whole")
    if any(work.chunks > 1 or work.chunk == LOCAL for work in program.works):
        raise PipeSwiftError("this program is in chunks already: cut the whole program instead")
    if chunks == 1 and not local_first:
        return program
    cut = _Cut(program, chunks, local_first)
    after = {piece: cut.needs(work, piece) for work in program.works for piece in cut.pieces(work)}
    return issue(cut.order(), after)


class _Cut:
    """One program, and into what each of its works is cut."""

    def __init__(self, program: Program, chunks: int, local_first: bool):
        self._program, self._chunks, self._local_first = program, chunks, local_first
        self._sent = {(work.action, work.segment) for work in program.works if work.part is Part.DISPATCH}

    def pieces(self, work: Work) -> tuple[Work, ...]:
        if not self._is_cut(work):
            return (work,)
        numbers = range(LOCAL if self._has_local(work) else 0, self._chunks)
        return tuple(work._replace(chunk=number, chunks=self._chunks) for number in numbers)

    def needs(self, work: Work, piece: Work) -> tuple[Work, ...]:
        """What a piece of `work` comes after."""
        found: list[Work] = []
        for earlier in self._program.after[work]:
            pieces = self.pieces(earlier)
            if piece.chunk == LOCAL:
                found += (before for before in self._program.after[earlier] if before.lane is Lane.COMPUTE)
            elif self._is_cut(work) and self._is_cut(earlier):
                found += (other for other in pieces if other.chunk in (LOCAL, piece.chunk))
            else:
                found += pieces + self._local_of(earlier)
        if work.lane is Lane.ALL_TO_ALL:
            found = [other for other in found if other.chunk != LOCAL]
        return tuple(found)

    def order(self) -> Iterator[Work]:
        """Each chunk is sent on right after it is computed; everything else stays in its place."""
        leaving = {
            earlier: work for work, needs in self._program.after.items() for earlier in needs if self._leaves(work)
        }
        for work in self._program.works:
            if self._leaves(work):
                continue
            onwards = self.pieces(leaving[work]) if work in leaving else ()
            for piece in self.pieces(work):
                yield piece
                yield from (other for other in onwards if other.chunk == piece.chunk)

    def _leaves(self, work: Work) -> bool:
        """Whether `work` is the second of its segment's all-to-alls."""
        return self._is_cut(work) and work.part is (Part.COMBINE if work.op is Op.F else Part.DISPATCH)

    def _local_of(self, work: Work) -> tuple[Work, ...]:
        """The local chunk that whoever needs all of what `work` brings home needs, too."""
        if not self._local_first or not self._leaves(work):
            return ()
        return tuple(
            piece for earlier in self._program.after[work] for piece in self.pieces(earlier) if piece.chunk == LOCAL
        )

    def _has_local(self, work: Work) -> bool:
        return self._local_first and work.part is Part.EXPERTS and work.op is not Op.W

    def _is_cut(self, work: Work) -> bool:
        return work.part in _CUT and (work.action, work.segment) in self._sent
