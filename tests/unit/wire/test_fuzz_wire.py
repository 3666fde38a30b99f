"""Messages of peers, fuzzed: plans, metadata and streams are taken as they are, or refused."""

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import grpc
import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import assume, example, given
from hypothesis import strategies as st

from pannier.coordinator.planning.columns import RankPlan
from pannier.coordinator.planning.global_plan import make_global_plan
from pannier.v1 import plan_pb2, save_pb2, sidecar_pb2
from pannier.wire import chunk_codec, limits, plan_codec
from pannier.wire.chunk_codec import ReceivedChunk
from pannier.wire.errors import InvalidRequestError
from pannier.wire.plan_columns import column_length, decode_column, encode_column
from support.actors.hosts import Host, running_host
from support.actors.scripted import Trainer
from support.fuzzing import FUZZ, accepted, messages
from support.plan_messages import FLOAT32, columns, make_items, tables_of
from support.processes.stretch import BOUND_S

ATTEMPT = "i1-a1-g00000000-s1"
MIB = 1 << 20


# Plans.


def _fit(items: plan_pb2.Items) -> plan_pb2.Items:
    """Columns of equal length that refer to what is there, so that the values count."""
    tables = plan_pb2.ItemTables()
    with suppress(DecodeError):
        tables = tables_of(items)
    fqns = list(tables.fqns) or ["w"]
    properties = list(tables.properties) or [plan_pb2.TensorProperties()]
    for each in properties:
        each.MergeFrom(FLOAT32)
    kinds = [kind if kind in (1, 2, 3) else 2 for kind in _numbers(items.kind)]
    count = len(kinds)
    ndim = [
        0 if kind == plan_pb2.ITEM_KIND_BYTE_IO else number % 3 for number, kind in enumerate(kinds)
    ]
    entries = sum(ndim)
    sizes = itertools.chain(
        *map(_numbers, (items.size, items.chunk_offset, items.chunk_size)), itertools.repeat(0)
    )
    return make_items(
        fqns,
        properties,
        kind=kinds,
        fqn=[number % len(fqns) for number in range(count)],
        hint=[0] * count,
        ndim=ndim,
        property=[number % len(properties) for number in range(count)],
        size=list(itertools.islice(sizes, entries)),
        chunk_offset=list(itertools.islice(sizes, entries)),
        chunk_size=list(itertools.islice(sizes, entries)),
    )


def _numbers(column: bytes) -> list[int]:
    """Of a column; of a malformed one, its bytes."""
    try:
        return decode_column(column)
    except InvalidRequestError:
        return list(column)


@st.composite
def local_plans(draw: st.DrawFn) -> plan_pb2.LocalPlan:
    plan = draw(messages(plan_pb2.LocalPlan))
    if draw(st.booleans()):
        plan.items.CopyFrom(_fit(plan.items))
        kinds = decode_column(plan.items.kind)
        for name in ("head", "body", "tail"):
            values = [*_numbers(getattr(plan, name)), *([0] * len(kinds))][: len(kinds)]
            if name == "head":
                values = [
                    0 if kind == plan_pb2.ITEM_KIND_BYTE_IO else value
                    for kind, value in zip(kinds, values, strict=True)
                ]
            setattr(plan, name, encode_column(values))
    return plan


def whole(
    size: int, head: int = 704, body: int = 0, tail: int = 873, count: int = 1
) -> plan_pb2.LocalPlan:
    """Tensors of one dimension."""
    return plan_pb2.LocalPlan(
        items=make_items(
            [f"w{number}" for number in range(count)],
            [FLOAT32],
            fqn=range(count),
            kind=[plan_pb2.ITEM_KIND_TENSOR] * count,
            hint=[0] * count,
            ndim=[1] * count,
            property=[0] * count,
            size=[size] * count,
            chunk_offset=[0] * count,
            chunk_size=[size] * count,
        ),
        **columns(head=[head] * count, body=[body] * count, tail=[tail] * count),
    )


@FUZZ
@given(local=st.lists(local_plans(), min_size=1, max_size=3))
@example(local=[whole(8, body=(1 << 62) - 1, head=(1 << 32) - 1)])
@example(local=[whole(8, body=(1 << 63))])
@example(local=[whole(8, body=(1 << 62) - 1, count=24)])
@example(local=[whole((1 << 62) - 1, body=1)])
@example(local=[whole((1 << 64) - 1, body=1)])
def test_local_plans_make_a_global_one_or_are_refused(local: list[plan_pb2.LocalPlan]) -> None:
    ranks = [
        RankPlan(rank, f"node-{rank}", plan_codec.plan_digest(plan), plan)
        for rank, plan in enumerate(local)
    ]
    for made in accepted(make_global_plan, ranks, ATTEMPT):
        place = made.metadata.placement
        files, lengths = decode_column(place.file), decode_column(place.length)
        assert len(made.assignment.owner) == len(files) == len(lengths)
        assert all(file < len(made.metadata.files) for file in files)
        again = plan_pb2.GlobalMetadata.FromString(made.metadata.SerializeToString())
        assert again == made.metadata


@FUZZ
@given(items=messages(plan_pb2.Items), fit=st.booleans())
@example(items=whole((1 << 64) - 1).items, fit=False)
@example(items=whole(1 << 63).items, fit=False)
def test_items_are_decoded_and_encoded_again(items: plan_pb2.Items, fit: bool) -> None:
    if fit:
        items = _fit(items)
    for decoded in accepted(plan_codec.decode_items, items):
        assert len(decoded) == column_length(items.kind)
        assert repr(decoded)
        for encoded in accepted(plan_codec.encode_items, decoded):
            assert plan_codec.decode_items(encoded) == decoded


@FUZZ
@given(metadata=messages(plan_pb2.GlobalMetadata), fit=st.booleans())
def test_metadata_of_torch_is_built_or_refused(
    metadata: plan_pb2.GlobalMetadata, fit: bool
) -> None:
    if fit:
        metadata.items.CopyFrom(_fit(metadata.items))
    for built in accepted(plan_codec.build_metadata, metadata, storage_meta=None):
        assert len(built.storage_data) <= column_length(metadata.placement.file)


@FUZZ
@given(request=messages(sidecar_pb2.PlanRequest))
def test_requests_are_checked_without_an_accident(request: sidecar_pb2.PlanRequest) -> None:
    accepted(limits.check_plan, request)
    accepted(limits.check_context, request.context)


@FUZZ
@given(name=st.text(max_size=12) | st.sampled_from(["load", "Tensor", "__name__", "float32.x", ""]))
def test_a_dtype_is_one_of_torchs(name: str) -> None:
    for dtype in accepted(plan_codec.dtype_named, name):
        assert isinstance(dtype, torch.dtype)


# Streams.


raw = st.one_of(
    st.binary(max_size=64),
    st.builds(
        lambda offset, crc, data: sidecar_pb2.WriteRequest(
            offset=offset, crc32c=crc, data=data
        ).SerializeToString(),
        st.integers(0, (1 << 64) - 1),
        st.integers(0, (1 << 32) - 1),
        st.binary(max_size=20),
    ),
    messages(sidecar_pb2.WriteRequest).map(sidecar_pb2.WriteRequest.SerializeToString),
    st.builds(
        lambda head, rest: head + rest, st.sampled_from([b"\x10", b"\x10\x00\x1d"]), st.binary()
    ),
)


@FUZZ
@given(message=raw)
@example(message=b"\x10" + b"\xff" * 40)
@example(message=b"\x10\x00\x1d\x00\x00\x00\x00\x22" + b"\xff" * 9 + b"\x01")
@example(message=b"\x10\x00\x1d\x00\x00\x00\x00\x22\x05ab")
def test_a_message_of_a_stream_means_what_protobuf_says(message: bytes) -> None:
    for decoded in accepted(chunk_codec.decode, message):
        try:
            reference = sidecar_pb2.WriteRequest.FromString(message)
        except Exception:  # noqa: BLE001 - protobuf has several
            raise AssertionError(f"{message!r} is no WriteRequest, but {decoded}") from None
        if isinstance(decoded, ReceivedChunk):
            assert not reference.HasField("header")
            assert decoded.offset == reference.offset
            assert decoded.crc32c == reference.crc32c
            assert bytes(decoded.data) == reference.data
        else:
            assert decoded == reference.header


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with running_host() as made:
        made.start(spool_budget=64 * MIB)
        yield made


_NUMBERS = iter(range(1, 1 << 30))


@FUZZ
@given(said=st.lists(raw, max_size=4), begins=st.booleans())
def test_a_stream_of_anything_ends_by_name_and_leaves_nothing(
    host: Host, said: list[bytes], begins: bool
) -> None:
    with Trainer(host.address, incarnation=f"inc{next(_NUMBERS)}") as trainer:
        context = trainer.context(host.id())
        header = chunk_codec.encode(trainer.header(context, "0", MIB))
        ended = threading.Event()

        def speak() -> Iterator[bytes]:
            yield from ([header, *said] if begins else said)
            # Longer than any answer takes.
            ended.wait(0.2)

        call = trainer.channel.stream_stream("/pannier.v1.Sidecar/Write")(speak(), timeout=BOUND_S)
        assert len(list(_answers(call))) <= 1
        ended.set()
        assert call.code() in _REFUSALS, call.details()
        failure = save_pb2.Failure(kind=save_pb2.FAILURE_KIND_CLIENT, message="enough")
        trainer.call("Fail", sidecar_pb2.FailRequest(context=context, failure=failure))
    host.coordinator.decide(context, save_pb2.SAVE_STATE_ABORTED, failure)


def _answers(call: Any) -> Iterator[bytes]:
    with suppress(grpc.RpcError):
        yield from call


_REFUSALS: Final = (
    *(grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DATA_LOSS),
    *(grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ABORTED),
)
"""Not INTERNAL, which stands for a bug, nor a deadline."""
_CALLS: dict[str, Any] = {
    "Plan": sidecar_pb2.PlanRequest,
    "Begin": sidecar_pb2.BeginRequest,
    "HandOver": sidecar_pb2.HandOverRequest,
    "Finish": sidecar_pb2.FinishRequest,
    "Fail": sidecar_pb2.FailRequest,
    "Ping": sidecar_pb2.PingRequest,
}


@FUZZ
@given(data=st.data(), method=st.sampled_from(sorted(_CALLS)), sound=st.booleans())
def test_a_call_of_anything_is_answered_or_refused(
    host: Host, data: st.DataObject, method: str, sound: bool
) -> None:
    request = data.draw(messages(_CALLS[method], depth=2))
    with Trainer(host.address, incarnation=f"inc{next(_NUMBERS)}") as trainer:
        if sound and hasattr(request, "context"):
            request.context.CopyFrom(trainer.context(host.id()))
        elif hasattr(request, "context"):
            assume(request.context.ByteSize() or method != "Fail")
        call = getattr(trainer.stub, method).future(request, timeout=BOUND_S)
        assert call.code() in _REFUSALS, call.details()
    known = host.sidecar.saves.undecided()
    assert all(os.path.commonpath([save.checkpoint_id, str(host.root)]) for save in known)


def test_it_still_works_afterwards(host: Host) -> None:
    trainer = host.trainer(9, (9,), incarnation="last", client="c9")
    context = trainer.context(host.id(9))
    trainer.hand_over(context, trainer.write(context, "0", b"x" * MIB))
    host.coordinator.await_phase(context, save_pb2.RANK_PHASE_DURABLE)
    assert sum(path.stat().st_size for path in host.spool.glob("*.data")) <= 64 * MIB
