"""How does a config file with a variant and flags become one checked configuration?"""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from ml_collections import ConfigDict

from resjax.config import kept
from resjax.config.pyfile import execute, told
from resjax.config.schema import find
from resjax.config.tree import FLAG, Section, assign, default, flat
from resjax.config.validate import validate
from resjax.errors import Refused, not_one_of

WHAT = "config file"


def split(spec: str) -> tuple[str, str | None]:
    """'FILE[:variant]' in its two parts."""
    path, colon, variant = spec.rpartition(":")
    if not colon or os.sep in variant or os.path.exists(spec):
        return spec, None
    if not variant:
        raise Refused(f"--config is '{spec}', with no variant after the colon; write FILE or FILE:VARIANT")
    return path, variant


def load(
    spec: str,
    overrides: Iterable[tuple[str, Any]] = (),
    change: Callable[[Section], None] | None = None,
    finish: Callable[[Section], None] | None = None,
) -> ConfigDict:
    """The configuration of a file, with flags applied: typed, locked and valid but for the residual scheme (scheme.py).

    The file has a function ``get_config()`` that changes and returns ``resjax.config.default()``. If it has variants it
    takes the variant's name (None = none), and a tuple ``VARIANTS`` lists the names. In its place may stand the folder of
    a run, or its config.json: then it is that run's configuration.

    Args:
      spec: 'FILE[:variant]'.
      overrides: pairs of a field's path and its value, as text or in the field's type; the later of two for one path wins.
      change: what is done to the file's configuration before the overrides, as if the file did it.
      finish: what is done after them, before the configuration is checked.

    Raises:
      Refused: the file is missing or faulty, a variant, field or value is wrong, or two contradict one another.
    """
    path, variant = split(spec)
    given = [(find(field), value) for field, value in overrides]
    config = _from_file(path, variant)
    if change is not None:
        change(config)
    config._log.level = FLAG
    for field, value in given:
        assign(config, field.path, field.parse(value) if isinstance(value, str) else value)
    if finish is not None:
        finish(config)
    config = config.copy_and_resolve_references()
    validate(config)
    return config


def from_file(spec: str, function: str, missing: Any = None) -> Any:
    """What another function of a config file returns, of a generator all of it; ``missing`` where there is none.

    It takes the variant's name, as ``get_config`` does, or nothing.

    Raises:
      Refused: the file is missing or faulty, or has no such variant.
    """
    path, variant = split(spec)
    if kept.place(path) is not None:
        return missing
    module = execute(path, WHAT)
    if not callable(found := getattr(module, function, None)):
        return missing
    try:
        made = found(*_arguments(module, found, path, variant) if inspect.signature(found).parameters else ())
        return list(made) if inspect.isgenerator(made) else made
    except Exception as error:
        raise told(error, path, WHAT) from None


def variants(spec: str) -> tuple[str, ...]:
    """The variants that a config file lists."""
    path, _ = split(spec)
    return () if kept.place(path) is not None else tuple(getattr(execute(path, WHAT), "VARIANTS", ()))


def _from_file(path: str, variant: str | None) -> Section:
    if (earlier := kept.place(path)) is not None:
        if variant is not None:
            raise Refused(f"--config is '{path}:{variant}', but a run has no variants; leave ':{variant}' out")
        return kept.fields(earlier)
    module = execute(path, WHAT)
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        raise Refused(f"{WHAT} '{path}' has no function get_config; it must return a changed resjax.config.default()")
    try:
        made = get_config(*_arguments(module, get_config, path, variant))
    except Exception as error:
        raise told(error, path, WHAT) from None
    if isinstance(made, Mapping | ConfigDict):
        return _checked(made, path)
    raise Refused(
        f"get_config of '{path}' returns {type(made).__name__}; it must return a changed resjax.config.default()"
    )


def _arguments(module: ModuleType, get_config: Any, path: str, variant: str | None) -> tuple[str | None, ...]:
    parameters = inspect.signature(get_config).parameters.values()
    if variant is None:
        return (None,) if any(one.default is one.empty for one in parameters) else ()
    if (variants := getattr(module, "VARIANTS", None)) is not None and variant not in variants:
        raise not_one_of(f"the variant of '{path}'", variant, variants)
    if not parameters:
        raise Refused(f"'{path}' has no variant '{variant}', and no others: its get_config takes no argument")
    return (variant,)


def _checked(made: Mapping | ConfigDict, path: str) -> Section:
    """What the file returned; where it was not built on :func:`default`, as if it had been."""
    if isinstance(made, Section) and made._path == "":
        return made
    config = default()
    try:
        for field, value in flat(made).items():
            if value != find(field).default:
                assign(config, field, value)
    except Refused as error:
        raise Refused(f"{WHAT} '{path}': {error}") from None
    return config
