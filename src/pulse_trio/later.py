"""Names of a package whose modules are imported when a name is first asked for.

`import pulse_trio` costs half without the client and the worker, which bring the database's driver. A type checker sees
ordinary imports: each package has both, side by side.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def later(
    package: str, names: Mapping[str, Sequence[str]], modules: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`. `names`: by the module in the package that has them; `modules` are attributes
    of the package too, as if it had imported them."""
    places = {name: module for module, of_it in names.items() for name in of_it}

    def found(name: str) -> Any:
        if name in places:
            value = getattr(import_module(f"{package}.{places[name]}"), name)
            # The next look finds it in the package, where Python looks first.
            setattr(sys.modules[package], name, value)
            return value
        if name in modules:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places, *modules})

    return found, listed
