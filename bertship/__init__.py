"""bertship: text in, a measured BERT service out.

Importing this package imports nothing else: `Client` and the rest are loaded when first touched, because the same
package runs inside Triton's interpreter, where neither torch nor tritonclient is installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bertship.async_client import AsyncClient
    from bertship.client import Client
    from bertship.pipeline import Pipeline

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "Pipeline", "__version__"]

_HOMES = {"AsyncClient": "bertship.async_client", "Client": "bertship.client", "Pipeline": "bertship.pipeline"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'bertship' has no attribute {name!r}")
