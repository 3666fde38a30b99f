"""Objects against the schemas of Kubernetes releases, unknown fields refused.

Kubernetes' own come with kubernetes-validate. Those of custom resources are the project's own
summaries of the published APIs, in tests/deploy/schemas: their fields, with a reference to
Kubernetes' schema wherever a pod or a job is embedded.
"""

import functools
import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
from importlib_resources import files
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

SCHEMAS = Path(__file__).parents[2] / "deploy/schemas"


def releases(count: int = 3) -> list[str]:
    """The newest releases of Kubernetes, like ``1.37``."""
    found = kubernetes_validate.utils.all_versions()[-count:]
    return [kubernetes_validate.utils.major_minor(version) for version in found]


def problems(each: dict[str, Any], release: str) -> list[str]:
    """What that release has against an object; empty: nothing."""
    return [
        f"{each['kind']}/{each['metadata']['name']}: {'.'.join(map(str, error.path))}: {error.message}"
        for error in _validator(each["apiVersion"], each["kind"], release).iter_errors(each)
    ]


@functools.cache
def _validator(version: str, kind: str, release: str) -> Draft202012Validator:
    own = SCHEMAS / f"{kind.lower()}-{version.replace('/', '-')}.json"
    if own.exists():
        schema = json.loads(own.read_text())
    else:
        short = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", version)
        schema = _packaged(release, f"{kind.lower()}-{short}.json")
    definitions = Resource.from_contents(_packaged(release, "_definitions.json"))
    registry: Registry[Any] = Registry().with_resources(
        [("https://kubernetes.io/api/_definitions.json", definitions)]
    )
    return Draft202012Validator(schema, registry=registry)


@functools.cache
def _packaged(release: str, name: str) -> Any:
    folder = files("kubernetes_validate") / "kubernetes-json-schema"
    return json.loads((folder / f"v{release}.0-local-strict" / name).read_text())
