"""Messages as JSON: every field, and 64-bit integers as numbers that proto3's parsers read."""

import json

from google.protobuf import json_format

from pannier.common.message_json import as_dict, duration, seconds_of, timestamp
from pannier.v1 import save_pb2, status_pb2


def test_every_number_is_a_number_at_any_depth_and_parses_back() -> None:
    save = save_pb2.SaveStatus(id="a", bytes_total=1 << 52, save=save_pb2.SaveId(number=7))
    save.ranks.add(rank=1, bytes_staged=1 << 40, seconds_since_seen=0.5)
    listed = status_pb2.ListSavesResponse(saves=[save], spool_bytes=3, trainers=0)
    fields = json.loads(json.dumps(as_dict(listed)))
    assert set(fields) == {field.name for field in listed.DESCRIPTOR.fields}
    assert (fields["spool_bytes"], fields["spool_free_bytes"]) == (3, 0)
    (shown,) = fields["saves"]
    assert (shown["bytes_total"], shown["save"]["number"]) == (1 << 52, 7)
    assert (shown["ranks"][0]["bytes_staged"], shown["ranks"][0]["rank"]) == (1 << 40, 1)
    assert json_format.ParseDict(fields, status_pb2.ListSavesResponse()) == listed


def test_a_time_of_a_peer_never_spoils_the_json() -> None:
    for number in (-1e300, -1.0, 1e300, float("inf")):
        status = save_pb2.SaveStatus(created_at=timestamp(number))
        wait = save_pb2.TrainingWait(duration=duration(number))
        listed = status_pb2.ListSavesResponse(saves=[status], training_waits=[wait])
        assert as_dict(listed)["saves"][0]["created_at"].endswith("Z")
    assert seconds_of(timestamp(1764270861.25)) == 1764270861.25
    assert seconds_of(duration(32.5)) == 32.5
