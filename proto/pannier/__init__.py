"""Pannier, a checkpoint service for PyTorch training: ``from pannier import client`` is what a trainer needs.

``pannier.__version__`` is the version of the installed distribution. In a wheel, all packages are in this
directory; an editable install has them in the three source roots ``proto``, ``client`` and ``service``, of which
only this one has an ``__init__``.
"""

from pkgutil import extend_path
from typing import TYPE_CHECKING

__path__[:] = extend_path(__path__, __name__)

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        # Looked up when it is first asked for, since that takes longer than some commands do.
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from pannier.wire.version import package_version

        return package_version()
