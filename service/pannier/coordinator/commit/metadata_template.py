"""Makes the bytes of ``.metadata`` for every save by one plan, of which most are the same in all.

In: the body of a plan's manifests. Out: a pickle of torch's ``Metadata``, which loads as the one of
``pickle.dumps`` does. Its objects are written as columns: one record of constant length per chunk, in which
only memo references and numbers differ. Names of data files come first and ``storage_meta`` last, so that
everything in between is made once for the plan. Pure; any thread.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pannier.coordinator.commit import torch_pickles
from pannier.coordinator.commit.torch_pickles import DICT, NEWOBJ, REDUCE, STATE, plain
from pannier.coordinator.planning.arrays import Bools, Ints, number_rows, read_column
from pannier.coordinator.planning.plan_cache import AgreedPlan
from pannier.v1 import plan_pb2, records_pb2
from pannier.wire import object_names
from pannier.wire.plan_columns import decode_mappings, parse_tables

Bytes = npt.NDArray[np.uint8]

# pickle's protocol 4; each comment says what it does to the stack.
_MARK: Final = b"("
_STOP: Final = b"."
_POP: Final = b"0"
_MEMOIZE: Final = b"\x94"
_ITEMS: Final = b"u"
_LIST: Final = b"]("
_APPENDS: Final = b"e"
_NONE: Final = b"N"
_TUPLES: Final = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}


class _Record(NamedTuple):
    """A form of records of constant length: the bytes that all share, and the places of numbers."""

    text: bytes
    holes: Sequence[int]
    """Where each number begins; all are little-endian, of the widths below."""
    widths: Sequence[int]

    def fill(self, *columns: Ints) -> Bytes:
        """One row per record."""
        count = len(columns[0])
        out = np.empty((count, len(self.text)), np.uint8)
        out[:] = np.frombuffer(self.text, np.uint8)
        for hole, width, column in zip(self.holes, self.widths, columns, strict=True):
            bytes_ = np.ascontiguousarray(column, "<i8").view(np.uint8).reshape(count, 8)
            out[:, hole : hole + width] = bytes_[:, :width]
        return out


def _record(*parts: bytes | int) -> _Record:
    """Makes a form from text and, where a number goes, its width in bytes."""
    text, holes, widths = b"", [], []
    for part in parts:
        if isinstance(part, int):
            holes.append(len(text))
            widths.append(part)
            text += bytes(part)
        else:
            text += part
    return _Record(text, holes, widths)


_REFERENCE: Final = (b"j", 4)


def _number(largest: int) -> tuple[bytes, int]:
    """Opcode and width of the numbers of a column whose largest is this one."""
    if largest < 1 << 16:
        return b"M", 2
    return (b"J", 4) if largest < 1 << 31 else (b"\x8a\x08", 8)


class _Memo:
    """The pickle's memo: objects that were written before, by number."""

    def __init__(self) -> None:
        self.count = 0
        self.parts: list[bytes] = []

    def add(self, text: bytes) -> bytes:
        """Writes an object for later reference only; returns the reference."""
        self.parts.append(text + _MEMOIZE + _POP)
        self.count += 1
        return self.reference(self.count - 1)

    @staticmethod
    def reference(number: int) -> bytes:
        """The bytes that put the object on the stack."""
        return b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number)


class MetadataTemplate:
    """The template of one plan. Raises ValueError when the plan's body is malformed."""

    def __init__(self, plan: AgreedPlan) -> None:
        items = _read_items(plan.body)
        self._names = plan.names
        memo = _Memo()
        self._before = memo.parts
        keys = {
            word: memo.add(plain(word))
            for word in (
                *("offsets", "sizes", "fqn", "index", "offset", "relative_path", "length"),
                *("properties", "size", "chunks"),
            )
        }
        size_class, chunk_class, index_class, info_class, tensor_class = map(
            memo.add,
            (
                *(torch_pickles.SIZE, torch_pickles.CHUNK, torch_pickles.METADATA_INDEX),
                *(torch_pickles.STORAGE_INFO, torch_pickles.TENSOR),
            ),
        )
        self._first_name = memo.count
        memo.parts = []
        memo.count += len(plan.names)
        first_fqn = memo.count
        for fqn in items.tables.fqns:
            memo.add(plain(fqn))
        properties = [memo.add(torch_pickles.properties(each)) for each in items.tables.properties]
        # Sizes are written once and then referred to: many chunks have the same.
        tensors = np.flatnonzero(items.kind != plan_pb2.ITEM_KIND_BYTE_IO)
        heads = items.firsts()
        sizes, which = _distinct(items, tensors, heads)
        first_size = memo.count
        text = _write_sizes(sizes, size_class)
        memo.parts.append(text)
        memo.count += len(sizes.ndim)
        offsets, extents, wholes = (each + first_size for each in which)
        chunk = _record(
            chunk_class + NEWOBJ + DICT + keys["offsets"],
            *_REFERENCE,
            keys["sizes"],
            *_REFERENCE,
            STATE,
        )
        whole = dict(zip(heads[items.tensor(heads)].tolist(), wholes.tolist(), strict=True))
        by_key = np.argsort(items.fqn[tensors], kind="stable")
        chunks = chunk.fill(offsets[by_key], extents[by_key])
        edges = np.searchsorted(items.fqn[tensors][by_key], np.arange(len(items.tables.fqns) + 1))
        state: list[bytes | memoryview] = [DICT]
        for row in heads.tolist():
            key = int(items.fqn[row])
            state.append(memo.reference(first_fqn + key))
            if row not in whole:
                state.append(torch_pickles.OBJECT)
                continue
            state += (
                tensor_class + NEWOBJ + DICT,
                keys["properties"] + properties[int(items.property[row])],
                keys["size"] + memo.reference(whole[row]),
                keys["chunks"] + _LIST,
                chunks[edges[key] : edges[key + 1]].data,
                _APPENDS + STATE,
            )
        state.append(_ITEMS)
        objects = np.flatnonzero(items.kind == plan_pb2.ITEM_KIND_BYTE_IO)
        assigned = plan.assignment
        place_of = info_class + NEWOBJ + DICT + keys["relative_path"]
        index_of = index_class + NEWOBJ + DICT + keys["fqn"]
        fixed = _record(
            index_of,
            *_REFERENCE,
            keys["index"],
            *_number(int(items.hint.max(initial=0))),
            keys["offset"],
            *_REFERENCE,
            STATE + place_of,
            *_REFERENCE,
            keys["offset"],
            *_number(int(assigned.offset.max(initial=0))),
            keys["length"],
            *_number(int(assigned.length.max(initial=0))),
            STATE,
        )
        # Tensors whose place is in the receipt, as that of all objects is.
        varying = tensors[assigned.length[tensors] == 0]
        planned = assigned.length[tensors] > 0
        rows = tensors[planned]
        pairs = fixed.fill(
            items.fqn[rows] + first_fqn,
            items.hint[rows],
            offsets[planned],
            assigned.file[rows] + self._first_name,
            assigned.offset[rows],
            assigned.length[rows],
        )
        place = (STATE + place_of, *_REFERENCE, keys["offset"], b"\x8a\x08", 8)
        length = (keys["length"], b"\x8a\x08", 8, STATE)
        self._loose = _record(index_of, *_REFERENCE, keys["index"] + _NONE, *place, *length)
        self._loose_tensors = _record(
            *(index_of, *_REFERENCE, keys["index"], b"J", 4, keys["offset"], *_REFERENCE),
            *place,
            *length,
        )
        self._objects = (objects, items.fqn[objects] + first_fqn, assigned.file[objects])
        self._varying = (
            *(varying, items.fqn[varying] + first_fqn, items.hint[varying]),
            *(offsets[~planned], assigned.file[varying]),
        )
        planner_data = decode_mappings(items.mappings) if items.mappings is not None else None
        self._body = b"".join(
            (
                *memo.parts,
                torch_pickles.METADATA + NEWOBJ + DICT,
                plain("state_dict_metadata"),
                *state,
                plain("planner_data") + plain(planner_data),
                plain("storage_data") + DICT,
                pairs.data,
            )
        )
        self._end = plain("version") + plain(torch_pickles.DCP_VERSION) + STATE + _STOP

    def render(
        self, checkpoint_id: str, attempt: str, places: Mapping[int, tuple[int, int]]
    ) -> bytes:
        """The bytes of one attempt's ``.metadata``.

        Args:
            places: offset and length of the chunks that have no planned place, by row.

        Raises KeyError when one is missing.
        """
        prefix = object_names.data_prefix(attempt)
        names = [plain(prefix + name) + _MEMOIZE + _POP for name in self._names]
        rows, fqns, files = self._objects
        objects = self._loose.fill(fqns, files + self._first_name, *_columns(places, rows))
        rows, fqns, hints, offsets, files = self._varying
        tensors = self._loose_tensors.fill(
            fqns, hints, offsets, files + self._first_name, *_columns(places, rows)
        )
        parts = [
            *self._before,
            *names,
            self._body,
            tensors.tobytes() + objects.tobytes() + _ITEMS,
            plain("storage_meta") + torch_pickles.storage_meta(checkpoint_id, attempt),
            self._end,
        ]
        frame = struct.pack("<Q", sum(map(len, parts)))
        return b"".join((b"\x80\x04\x95", frame, *parts))


def _columns(places: Mapping[int, tuple[int, int]], rows: Ints) -> tuple[Ints, Ints]:
    pairs = np.array([places[row] for row in rows.tolist()], np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


class _Items(NamedTuple):
    """Columns of a plan's items."""

    tables: plan_pb2.ItemTables
    mappings: plan_pb2.FlattenMappings | None
    fqn: Ints
    kind: Ints
    hint: Ints
    ndim: Ints
    property: Ints
    start: Ints
    size: Ints
    offset: Ints
    extent: Ints

    def firsts(self) -> Ints:
        """The first row of each key, in order of first use."""
        return np.sort(np.unique(self.fqn, return_index=True)[1])

    def tensor(self, rows: Ints) -> Bools:
        found: Bools = self.kind[rows] != plan_pb2.ITEM_KIND_BYTE_IO
        return found


def _read_items(body: bytes) -> _Items:
    metadata = records_pb2.PlanManifest.FromString(body).metadata
    message = metadata.items
    ndim = read_column(message.ndim)
    items = _Items(
        tables=parse_tables(message.tables),
        mappings=metadata.mappings if metadata.HasField("mappings") else None,
        fqn=read_column(message.fqn),
        kind=read_column(message.kind),
        hint=read_column(message.hint) - 1,
        ndim=ndim,
        property=read_column(message.property),
        start=np.cumsum(ndim) - ndim,
        size=read_column(message.size),
        offset=read_column(message.chunk_offset),
        extent=read_column(message.chunk_size),
    )
    rows = {len(column) for column in (items.kind, items.hint, items.ndim, items.property)}
    entries = {len(column) for column in (items.size, items.offset, items.extent)}
    if rows != {len(items.fqn)} or entries != {int(ndim.sum())}:
        raise ValueError("the columns of a plan don't fit together")
    return items


class _Sizes(NamedTuple):
    """Distinct sizes, offsets and extents: ``ndim`` numbers each, from ``start`` on."""

    ndim: Ints
    start: Ints
    numbers: Ints


def _distinct(items: _Items, tensors: Ints, heads: Ints) -> tuple[_Sizes, list[Ints]]:
    """The distinct values of the offsets and extents of the tensors' chunks and of the keys' sizes.

    Returns them and, for each of the three columns, the number of each row's value.
    """
    keys = heads[items.tensor(heads)]
    uses = [(tensors, items.offset), (tensors, items.extent), (keys, items.size)]
    ndim = np.concatenate([items.ndim[rows] for rows, _ in uses])
    start = np.concatenate(
        [items.start[rows] + shift for (rows, _), shift in zip(uses, _shifts(uses), strict=True)]
    )
    numbers = np.concatenate([column for _, column in uses])
    which = np.empty(len(ndim), np.int64)
    firsts: list[Ints] = []
    found = 0
    for d in np.unique(ndim).tolist():
        rows = np.flatnonzero(ndim == d)
        shapes = numbers[start[rows][:, None] + np.arange(d)]
        first, number = number_rows(shapes)
        which[rows] = number + found
        firsts.append(rows[first])
        found += len(first)
    chosen = np.concatenate([np.zeros(0, np.int64), *firsts])
    edges = np.cumsum([len(rows) for rows, _ in uses])[:-1]
    return _Sizes(ndim[chosen], start[chosen], numbers), np.split(which, edges)


def _shifts(uses: Sequence[tuple[Ints, Ints]]) -> list[int]:
    lengths = [len(column) for _, column in uses]
    return [sum(lengths[:index]) for index in range(len(lengths))]


def _write_sizes(sizes: _Sizes, size_class: bytes) -> bytes:
    """Writes each size, in order, as an object for later reference only."""
    parts = []
    edges = np.flatnonzero(np.diff(sizes.ndim, prepend=-1, append=-1))
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        d = int(sizes.ndim[begin])
        numbers = sizes.numbers[sizes.start[begin:end][:, None] + np.arange(d)]
        written = _number(int(numbers.max(initial=0)))
        before, after = (b"", _TUPLES[d]) if d in _TUPLES else (_MARK, b"t")
        record = _record(size_class + before, *(written * d), after + REDUCE + _MEMOIZE + _POP)
        if d:
            parts.append(record.fill(*numbers.T).tobytes())
        else:
            parts.append(record.text * (end - begin))
    return b"".join(parts)
