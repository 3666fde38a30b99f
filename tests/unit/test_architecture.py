"""``docs/architecture.md`` names modules that are there."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ROOTS = [REPOSITORY / root / "pannier" for root in ("client", "service", "proto")]
PATH = re.compile(r"`([a-z0-9_]+(?:/[a-z0-9_]+)*(?:/|\.py))`")


def test_every_path_is_there() -> None:
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    named = set(PATH.findall(text)) - {"client/", "service/", "proto/", "pannier/"}
    assert len(named) > 40
    assert [
        path for path in sorted(named) if not any((root / path).exists() for root in ROOTS)
    ] == []


def test_every_room_is_on_the_map() -> None:
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    rooms = {
        str(path.parent.relative_to(root))
        for root in ROOTS
        for path in root.rglob("__init__.py")
        if path.parent.name not in ("pannier", "v1")
    }
    assert {room for room in rooms if f"`{room}/" not in text} == set()
