"""What a load says of keys that don't fit: missing ones, ones left unread, narrowed tensors, keys that aren't text."""

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from pannier import client
from pannier.client.restore.load_result import LoadResult

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(directory: Path, state: dict[str, Any]) -> None:
    dcp.save(state, checkpoint_id=directory, no_dist=True)


def load(directory: Path, state: dict[str, Any], **more: Any) -> LoadResult:
    return client.load(state, checkpoint_id=directory, no_dist=True, **more)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Pannier's warnings; torch logs its calls, too."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("pannier") and record.levelno == logging.WARNING
    ]


def test_what_was_left_unread_is_counted_and_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = {f"p{n}": torch.ones(2) for n in range(7)}
    save(tmp_path, {"w": torch.ones(3), "optim": optimizer, "none": torch.empty(0, 3)})
    with caplog.at_level(logging.WARNING, "pannier"):
        result = load(tmp_path, {"w": torch.zeros(3)})
    assert result.unread.count == 7
    assert result.unread.first == tuple(f"optim.p{n}" for n in range(5))
    (warning,) = warned(caplog)
    assert "left 7 keys: 'optim.p0', " in warning
    assert warning.endswith("'optim.p4' and 2 more, which no rank's state has")


@pytest.mark.parametrize(
    ("stored", "wanted", "is_cast"),
    [
        (torch.float32, torch.bfloat16, True),
        (torch.float16, torch.bfloat16, True),
        (torch.float8_e4m3fn, torch.float8_e5m2, True),
        (torch.bfloat16, torch.float32, False),
        (torch.float32, torch.float32, False),
    ],
)
def test_tensors_that_were_narrowed_are_counted_and_warned_of_once(
    stored: torch.dtype,
    wanted: torch.dtype,
    is_cast: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    save(tmp_path, {"m": {"w": torch.ones(3).to(stored), "b": torch.ones(3)}})
    with caplog.at_level(logging.WARNING, "pannier"):
        result = load(tmp_path, {"m": {"w": torch.zeros(3).to(wanted), "b": torch.zeros(3)}})
    assert (result.cast.count, result.cast.first) == ((1, ("m.w",)) if is_cast else (0, ()))
    assert [("narrower dtype" in each, "'m.w'" in each) for each in warned(caplog)] == [
        (True, True)
    ] * is_cast
    assert not result.unread.count


MISSING = {
    "compiled when saved": ("model._orig_mod.0.weight", "model.0.weight"),
    "compiled when loaded": ("model.0.weight", "model._orig_mod.0.weight"),
    "another prefix": ("module.net.weight", "net.weight"),
    "inside a model": ("layers.0.weight", "model.layers.0.weight"),
}


@pytest.mark.parametrize(("stored", "wanted"), MISSING.values(), ids=MISSING)
def test_a_missing_key_names_the_stored_one_with_the_same_last_parts(
    stored: str, wanted: str, tmp_path: Path
) -> None:
    save(tmp_path, {stored: torch.ones(3), "other.weight": torch.ones(3)})
    with pytest.raises(client.LoadError, match="Missing key in checkpoint state_dict") as caught:
        load(tmp_path, {wanted: torch.zeros(3)})
    assert f"{stored!r} for {wanted!r}" in str(caught.value)


def test_an_unlike_key_is_not_advised(tmp_path: Path) -> None:
    save(tmp_path, {"encoder.weight": torch.ones(3)})
    with pytest.raises(client.LoadError, match="Missing key in checkpoint state_dict") as caught:
        load(tmp_path, {"decoder.weight": torch.zeros(3)})
    assert "encoder" not in str(caught.value)


def test_objects_under_integer_keys_come_back_in_place(tmp_path: Path) -> None:
    def state(step: int) -> dict[str, Any]:
        return {
            "scheduler": {"milestones": Counter({30 * step: step, 80: step}), "last": step},
            "workers": {0: {"seed": step, "list": [{1: step}]}, 1: {"seed": step, "list": []}},
            "tensors": {5: torch.full((2,), float(step))},
            "text": {"7": step},
        }

    save(tmp_path, state(1))
    loaded = state(3)
    loaded["scheduler"]["milestones"] = Counter({30: 9, 80: 9})
    load(tmp_path, loaded)
    assert loaded["scheduler"] == {"milestones": Counter({30: 1, 80: 1}), "last": 1}
    assert loaded["workers"] == state(1)["workers"]
    assert loaded["text"] == {"7": 1}
    assert list(loaded["tensors"]) == [5]
    assert loaded["tensors"][5].tolist() == [1.0, 1.0]
    assert list(loaded) == list(state(1))


def test_a_scheduler_goes_on_from_its_milestones(tmp_path: Path) -> None:
    def scheduler() -> torch.optim.lr_scheduler.MultiStepLR:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])

    save(tmp_path, {"scheduler": scheduler()})
    resumed = scheduler()
    load(tmp_path, {"scheduler": resumed})
    assert sorted(resumed.milestones) == [2, 4]


class OwnLoadBytes(DefaultLoadPlanner):
    """Decides itself where objects go."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        super().load_bytes(read_item, value)


def test_a_planner_that_puts_objects_itself_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, {"workers": {0: 5}})
    with caplog.at_level(logging.WARNING, "pannier"):
        load(tmp_path, {"workers": {0: 1}}, planner=OwnLoadBytes())
    (warning,) = warned(caplog)
    assert "OwnLoadBytes.load_bytes" in warning
    assert "'workers.0'" in warning
