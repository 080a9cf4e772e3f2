"""Channels: how the products of one stage reach the next one on another rank.

A channel is one boundary, one direction and one route, and carries micro-batches 0, 1, 2, ... in order. On the
receiving side a thread keeps at most `POOL` receives posted or waiting to be taken, and tells the executor what
arrived; on the sending side one thread per rank lets go of what has been delivered.

The first message of a step is announced by a header. When all micro-batches of a step are alike, the header holds for
all of them; otherwise every message has its own. Gradients need none: both sides know which tensors went forward.

Where the last two steps looked alike, both ends foresee that the next does, and the message is received together with
its header, not after it. If it looks different after all, the sender fills what was foreseen with anything.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Product
from pipeswift.runtime.boundary import Flat, Spec, first_difference
from pipeswift.runtime.foresight import Foresight, Shapes, blank, shapes_of
from pipeswift.runtime.groups import peer_lost, traffic
from pipeswift.runtime.peers import Disagreement

POOL = 2  # receive buffers per channel
SENT = 4  # messages that may be kept after their delivery, per rank

SPECS = 64  # that both ends of a channel remember

# The spec's number, whether it holds for the rest of the step, how many bytes of pickled spec follow, the micro-batch's
# first sample, its number of samples, that of the mini-batch, the step's number of micro-batches.
HEADER: Shapes = (((7,), torch.int64),)
CPU = torch.device("cpu")


class Arrival(NamedTuple):
    """Something for the executor: a product is here."""

    product: Product
    stage: int
    microbatch: int


class Inbox(SimpleQueue):
    """What the executor wakes for: an Arrival, None for news that lie elsewhere, or the exception that ended a channel.

    tap: gets each arrival as well, in the thread that received it, while the executor may be busy.
    """

    tap: Callable[[Arrival], None] | None = None

    def arrive(self, arrival: Arrival) -> None:
        if self.tap is not None:
            self.tap(arrival)
        self.put(arrival)


class Expected(NamedTuple):
    """A message that will come. shapes: known for gradients, None where a header says. first: of its step.

    of: the micro-batches of the step, which a header has to confirm."""

    microbatch: int
    shapes: Shapes | None
    first: bool = False
    of: int = 0


class _Room(NamedTuple):
    """Tensors that are being received."""

    tensors: tuple[Tensor, ...]
    works: tuple[dist.Work, ...]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class _Posted(NamedTuple):
    microbatch: int
    value: Flat | tuple[Tensor, ...]
    room: _Room


class ShapeError(PipeSwiftError):
    """A stage's output changed its shape in a step whose inputs are all alike."""


class Sender:
    """The sending end of a channel."""

    def __init__(self, group: dist.ProcessGroup, peer: int, tag: int, outbox: Outbox, what: str, device: torch.device):
        self._group, self._peer, self._tag, self._outbox, self._what = group, peer, tag, outbox, what
        self._device = device
        self._specs: dict[int, Spec] = {}
        self._made = 0  # specs so far
        self._foresight = Foresight()
        self._current: Spec | None = None
        self._uniform = False
        self._microbatches = 0

    def begin(self, microbatches: int) -> None:
        """A new step: the next message carries a header."""
        self._uniform = False
        self._microbatches = microbatches

    def send(self, value: Flat, uniform: bool) -> None:
        """Hands over a stage's output. `uniform`: every micro-batch of this step has inputs of the same form."""
        if not self._uniform:
            self._announce(value, uniform)
        elif not self._same(value.spec, self._current):
            assert self._current is not None
            raise ShapeError(
                f"{self._what}: {first_difference(value.spec, self._current)} for an earlier micro-batch of this "
                "step, though their inputs are alike; pass dynamic_shapes=True to Pipeline when shapes depend on data"
            )
        # A tensor without gradient may be a buffer, which the layer changes in place for a later micro-batch.
        metas = value.spec.tensors
        copies = (t if meta.needs_grad else t.clone() for t, meta in zip(value.tensors, metas, strict=True))
        self.send_tensors(tuple(copies))

    def _same(self, one: Spec, other: Spec | None) -> bool:
        try:
            return one == other
        except (ValueError, TypeError, RuntimeError) as error:
            raise PipeSwiftError(
                f"{self._what} holds a plain value that cannot be compared with that of another micro-batch ({error}): "
                "hand on tensors instead of arrays"
            ) from error

    def _pack(self, spec: Spec) -> bytes:
        try:
            return pickle.dumps(spec)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise PipeSwiftError(
                f"{self._what} holds a plain value that cannot cross to another rank ({error}): "
                "hand on tensors, numbers, strings or what else pickles"
            ) from error

    def send_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Hands over tensors that the other side expects as they are."""
        for tensor in tensors:
            # Lazy conjugates and negatives are views with a flag, which would not cross.
            tensor = tensor.contiguous().resolve_conj().resolve_neg()
            try:
                work = self._group.send([tensor], self._peer, self._tag)
            except RuntimeError as error:
                raise peer_lost(error) from error
            self._outbox.keep(work, tensor)

    def _announce(self, value: Flat, uniform: bool) -> None:
        spec = value.spec
        number = next((i for i, earlier in self._specs.items() if self._same(spec, earlier)), None)
        known = number is not None
        if number is None:
            number = self._made % SPECS
            self._specs[number] = spec
            self._made += 1
        payload = b"" if known else self._pack(spec)
        header = [number, uniform, len(payload), value.first_sample, value.samples, value.batch, self._microbatches]
        self.send_tensors([torch.tensor(header, dtype=torch.int64)])
        foreseen = self._foresight.next
        if foreseen is not None and not self._foresight.comes_true(spec if known else None):
            self.send_tensors(blank(foreseen, self._device))
        self._foresight.learn(spec, uniform, known)
        if payload:
            self.send_tensors([torch.frombuffer(bytearray(payload), dtype=torch.uint8)])
        self._current, self._uniform = spec, uniform


class Receiver:
    """The receiving end of a channel, and the thread that serves it."""

    def __init__(
        self, group: dist.ProcessGroup, peer: int, tag: int, inbox: Inbox, product: Product, stage: int, device
    ):
        self._group, self._peer, self._tag, self._inbox, self._device = group, peer, tag, inbox, device
        self._product, self._stage = product, stage
        self._expected: SimpleQueue[Expected | None] = SimpleQueue()
        self._buffers: SimpleQueue[None] = SimpleQueue()  # one entry per free one; a semaphore's code is in Python
        for _ in range(POOL):
            self._buffers.put(None)
        self._arrived: dict[int, Flat | tuple[Tensor, ...]] = {}
        self._specs: dict[int, Spec] = {}
        self._foresight = Foresight()
        self._like: Flat | None = None  # what all messages of this step look like
        self.uniform = False
        name = f"receive {product.name.lower()} of stage {stage}"
        self._thread = Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def expect(self, expected: Expected) -> None:
        """Announces a message; messages come in the order in which they were announced."""
        self._expected.put(expected)

    def take(self, microbatch: int) -> Flat | tuple[Tensor, ...]:
        """What arrived for that micro-batch; the caller owns it, and its place in the pool is free again."""
        value = self._arrived.pop(microbatch)
        self._buffers.put(None)
        return value

    def close(self) -> None:
        self._expected.put(None)
        self._buffers.put(None)
        self._thread.join()

    def _serve(self) -> None:
        posted: deque[_Posted] = deque()
        with _reporting(self._inbox):
            while True:
                if not posted or self._may_post_ahead():
                    self._buffers.get()
                    expected = self._expected.get()
                    if expected is None:
                        return
                    posted.append(self._post(expected))
                    if expected.first:  # before the next is posted: the executor has nothing else to do yet
                        self._deliver(posted.popleft())
                else:
                    self._deliver(posted.popleft())

    def _may_post_ahead(self) -> bool:
        """Whether to post another receive before the first one is done."""
        known = self._product is Product.GRADIENT or self._like is not None
        return known and not self._expected.empty() and not self._buffers.empty()

    def _post(self, expected: Expected) -> _Posted:
        if expected.shapes is not None:
            room = self._receive(expected.shapes)
            return _Posted(expected.microbatch, room.tensors, room)
        like, shapes = self._like, self._foresight.now
        if like is None or shapes is None or expected.first:
            like, room = self._read_header(expected)
        else:
            room = self._receive(shapes)
        first = like.first_sample + expected.microbatch * like.samples if self.uniform else like.first_sample
        return _Posted(expected.microbatch, like._replace(tensors=room.tensors, first_sample=first), room)

    def _deliver(self, posted: _Posted) -> None:
        posted.room.wait()
        self._arrived[posted.microbatch] = posted.value
        self._inbox.arrive(Arrival(self._product, self._stage, posted.microbatch))

    def _read_header(self, expected: Expected) -> tuple[Flat, _Room]:
        """(what the next message will look like, without its tensors; where they are received to). Where that holds for
        the rest of the step, it starts where micro-batch 0 does."""
        header = self._receive(HEADER, CPU)
        foreseen = self._receive(self._foresight.next) if self._foresight.next is not None else None
        header.wait()
        number, uniform, size, first_sample, samples, batch, theirs = header.tensors[0].tolist()
        if theirs != expected.of:
            raise Disagreement(
                f"this step has {expected.of} micro-batches here, but {theirs} on the rank of stage {self._stage}: "
                "give step() and evaluate() the same microbatches= on every rank"
            )
        if foreseen is not None and not self._foresight.comes_true(None if size else self._specs[number]):
            foreseen.wait()
            foreseen = None
        if size:
            payload = self._receive((((size,), torch.uint8),), CPU)
            payload.wait()
            self._specs[number] = pickle.loads(payload.tensors[0].numpy().tobytes())
        spec = self._specs[number]
        self._foresight.learn(spec, bool(uniform), known=not size)
        start = first_sample - expected.microbatch * samples if uniform else first_sample
        like = Flat((), spec, start, samples, batch)
        self.uniform = bool(uniform)
        self._like = like if uniform else None
        return like, foreseen or self._receive(shapes_of(spec.tensors))

    def _receive(self, shapes: Shapes, device: torch.device | None = None) -> _Room:
        tensors = blank(shapes, device or self._device)
        return _Room(tensors, tuple(self._group.recv([tensor], self._peer, self._tag) for tensor in tensors))


class Outbox:
    """Keeps what is being sent alive until it has been delivered, and little longer.

    Sent messages are handed to the thread a few at a time: to wake it for each costs as much as to send one.
    """

    def __init__(self, inbox: Inbox):
        self._inbox = inbox
        self._batch: list[tuple[dist.Work, Tensor]] = []
        self._queue: SimpleQueue[list[tuple[dist.Work, Tensor]] | None] = SimpleQueue()
        self._thread = Thread(target=self._reap, name="sent messages", daemon=True)
        self._thread.start()

    def keep(self, work: dist.Work, tensor: Tensor) -> None:
        self._batch.append((work, tensor))
        if len(self._batch) == SENT:
            self.flush()

    def flush(self) -> None:
        """Hands over what has been sent so far; at the end of a step nothing may stay behind."""
        if self._batch:
            self._queue.put(self._batch)
            self._batch = []

    def close(self) -> None:
        self.flush()
        self._queue.put(None)
        self._thread.join()

    def _reap(self) -> None:
        with _reporting(self._inbox):
            while (batch := self._queue.get()) is not None:
                while batch:
                    batch[0][0].wait()
                    del batch[0]


@contextmanager
def _reporting(inbox: Inbox) -> Iterator[None]:
    """Around the life of a channel's thread: the executor raises what ends it."""
    try:
        with traffic():
            yield
    except BaseException as error:
        inbox.put(error)
