"""Messages as JSON: every field, and 64-bit integers as numbers that proto3's parsers read."""

import json

from google.protobuf import json_format

from pannier.common.message_json import as_dict
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
