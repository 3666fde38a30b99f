"""A Dockerfile's stages, with what each one inherits: instructions in, environment and commands out."""

import json
import re
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path


@dataclass(frozen=True)
class Stage:
    """What a container of this stage is started with, and what made it."""

    name: str
    environment: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    healthcheck: tuple[str, ...] = ()
    stop_signal: str = ""
    lines: tuple[tuple[str, str], ...] = ()
    """Instruction and arguments, of the stages before as well."""


def stages(path: Path) -> dict[str, Stage]:
    """By name. Raises AssertionError for an instruction that this doesn't know."""
    found: dict[str, Stage] = {}
    current = Stage("")
    for instruction, arguments in _instructions(path.read_text()):
        if instruction == "FROM":
            match = re.fullmatch(r"(\S+) AS (\S+)", arguments)
            assert match is not None, arguments
            current = replace(found.get(match[1], Stage("")), name=match[2])
        elif instruction in ("ENV", "LABEL"):
            pairs = dict(word.partition("=")[::2] for word in shlex.split(arguments))
            if instruction == "ENV":
                current = replace(current, environment={**current.environment, **pairs})
            else:
                current = replace(current, labels={**current.labels, **pairs})
        elif instruction == "USER":
            current = replace(current, user=arguments)
        elif instruction == "ENTRYPOINT":
            current = replace(current, entrypoint=tuple(json.loads(arguments)))
        elif instruction == "CMD":
            current = replace(current, command=tuple(json.loads(arguments)))
        elif instruction == "HEALTHCHECK":
            words = tuple(json.loads(arguments.partition(" CMD ")[2]))
            current = replace(current, healthcheck=words)
        elif instruction == "STOPSIGNAL":
            current = replace(current, stop_signal=arguments)
        else:
            assert instruction in ("ARG", "COPY", "RUN", "WORKDIR"), instruction
        current = replace(current, lines=(*current.lines, (instruction, arguments)))
        found[current.name] = current
    return found


def _instructions(text: str) -> list[tuple[str, str]]:
    kept = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    lines = re.sub(r"\\\n\s*", "", kept).splitlines()
    return [(line.split()[0], line.split(None, 1)[1]) for line in lines if line.strip()]
