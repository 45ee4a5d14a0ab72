"""Which folder does a run write to, and may a run go on in the folder of an earlier one?"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from ml_collections import ConfigDict

from resjax.config import kept
from resjax.config.field import show
from resjax.config.load import split
from resjax.config.schema import FIELDS, find
from resjax.config.tree import flat

ROOT = "runs"
LONGEST = 120  # characters of a folder's name; file systems take 255 bytes
SAFE = "+-._"
MAY_DIFFER = ("mesh.", "health.", "train.save_every", "train.keep", "train.log_every")


def default_folder(spec: str, overrides: Iterable[tuple[str, str]] = ()) -> str:
    """``runs/<config>[-variant][,FIELD=VALUE...]`` for a config file's 'FILE[:variant]' and flags.

    The same settings in another order or spelling give the same name, other settings another: fields stand in the order
    of the schema, by their last name where that is unique; a value is written as the field has it, with all but
    letters, digits and ``+-._`` as %XX. A name that is too long, or that differs from another in the case of letters
    only, ends in a hash of the whole.
    """
    path, variant = split(spec)
    values: dict[str, Any] = {}
    for field, text in overrides:
        values[field] = find(field).parse(text)
    name = quote(kept.run_name(path), safe=SAFE) + (f"-{quote(variant, safe=SAFE)}" if variant else "")
    settings = "".join(f",{_short(path)}={quote(_text(values[path]), safe=SAFE)}" for path in FIELDS if path in values)
    whole = name + settings
    if len(whole) > LONGEST or any(one != one.lower() for one in map(_text, values.values())):
        digest = hashlib.sha256(whole.encode()).hexdigest()[:12]
        whole = f"{whole[: LONGEST - 13].rstrip('%,=')}-{digest}"
    return os.path.join(ROOT, whole)


def _short(path: str) -> str:
    leaf = FIELDS[path].leaf
    return leaf if sum(field.leaf == leaf for field in FIELDS.values()) == 1 else path


def _text(value: Any) -> str:
    """A value as text, different for different values of a field; empty where it is unset."""
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case float():
            return repr(value).removesuffix(".0")
        case tuple():
            return "+".join(value) or "none"
    return str(value)


def differences(old: Mapping[str, Any], new: ConfigDict) -> list[str]:
    """What forbids going on in a folder, one line a field; empty where nothing does.

    Every field counts but those of the mesh, of the health record, and how often is saved, kept and logged.
    ``train.eval_every`` and ``train.eval_batches`` count: they change the evaluation losses that the folder holds.
    ``train.steps`` may grow where the learning rate of the steps done does not depend on it. Compare what
    :func:`resjax.config.validate.resolve` gives on both sides.

    Args:
      old: the fields of the folder, nested, as :func:`resjax.config.tree.to_dict` gives them; one that is missing
        (written by an earlier version) is at its default.
      new: the configuration to go on with.
    """
    before: dict[str, Any] = {path: field.default for path, field in FIELDS.items()} | flat(old)
    after: dict[str, Any] = flat(new)
    found = []
    for path in before:
        was, now = _stored(before[path]), after.get(path)
        if was == now or path.startswith(MAY_DIFFER):
            continue
        if path not in FIELDS:
            found.append(f"{path} was {show(was)}, and this version has no such field")
        elif path == "train.steps" and now > was:
            if reason := _end_matters(new):
                found.append(f"train.steps was {was}, is now {now}, and {reason}")
        else:
            found.append(f"{path} was {show(was)}, is now {show(now)}")
    return found


def _stored(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _end_matters(config: ConfigDict) -> str:
    """Why more steps would change the learning rate of the steps already done; empty if they would not."""
    from resjax.train.schedule import depends_on_steps  # loads JAX, and only a run that grows needs it

    optimizer = config.optimizer
    if depends_on_steps(optimizer.schedule, 0):
        return f"optimizer.schedule '{optimizer.schedule}' depends on it (constant and inverse_sqrt do not)"
    if depends_on_steps(optimizer.schedule, optimizer.warmup):
        share = "10 %" if optimizer.warmup is None else f"{optimizer.warmup:.0%}"
        return f"optimizer.warmup is {share} of it (a number of steps would not depend on it)"
    return ""
