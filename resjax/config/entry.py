"""Which entry does residual.name mean? One of the catalogue, in a form, of the user's own file, or several joined."""

import hashlib
import re
from functools import lru_cache

from ml_collections import ConfigDict

from resjax.config.compose import composed
from resjax.config.pyfile import execute, read
from resjax.errors import Refused, nearest, not_one_of
from resjax.residual import CATALOGUE, Scheme
from resjax.residual.entries import FORMS
from resjax.residual.entries.streams import GROUPS, STREAMS

WHAT = "the file of residual.name"
FILE_SCHEME = re.compile(r".*\.py:\w+")


def entry(name: str, form: str | None = None, streams: int | None = None, groups: int | None = None) -> Scheme:
    """The scheme called ``name``: of the catalogue, 'FILE.py:NAME', or several joined by '+'; see :func:`composed`.

    Raises:
      Refused: there is none, or it has no such form, streams or groups.
    """
    base, *more = _joined(name)
    made = _one(base)
    if form is not None:
        options = FORMS.get(base, {})
        if not options:
            raise Refused(
                f"residual.form is '{form}', but '{base}' has one form only; these have more: {_with_forms()}"
            )
        if form not in options:
            raise not_one_of(f"residual.form of '{base}'", form, options)
        made = options[form]
    if streams is not None:
        if base not in STREAMS:
            raise Refused(
                f"residual.streams is {streams}, which has no effect: '{base}' is none of {', '.join(STREAMS)}"
            )
        try:
            made = STREAMS[base](form, streams)
        except ValueError as error:
            raise Refused(f"residual.streams is {streams}: {error}") from None
    if groups is not None:
        if base not in GROUPS or form != "block":
            raise Refused(
                f"residual.groups is {groups}, which has no effect: only attnres with residual.form=block has groups"
            )
        made = GROUPS[base](groups)
    return composed(made, [_one(other) for other in more], name)


def _joined(name: str) -> list[str]:
    """The schemes that a name joins by '+'; a file's path may have one too."""
    found, piece = [], ""
    for part in name.split("+"):
        piece = f"{piece}+{part}" if piece else part
        if piece in CATALOGUE or FILE_SCHEME.fullmatch(piece):
            found.append(piece)
            piece = ""
    return [*found, *piece.split("+")] if piece or not found else found


def entry_of(config: ConfigDict) -> Scheme:
    residual = config.residual
    return entry(residual.name, residual.form, residual.streams, residual.groups)


def _with_forms() -> str:
    return ", ".join(f"{name} ({', '.join(forms)})" for name, forms in FORMS.items())


def _one(name: str) -> Scheme:
    if name in CATALOGUE:
        return CATALOGUE[name]
    path, colon, wanted = name.rpartition(":")
    if path.endswith(".py") or name.endswith(".py"):
        return _from_file(path, wanted) if colon else _from_file(name, "")
    raise not_one_of("residual.name", name, CATALOGUE)


def _from_file(path: str, wanted: str) -> Scheme:
    schemes = _schemes(path, read(path, WHAT))
    if not schemes:
        raise Refused(f"{WHAT}, '{path}', has no resjax.residual.Scheme at its top level")
    if wanted not in schemes:
        listed = ", ".join(f"{path}:{name}" for name in schemes)
        raise Refused(f"residual.name is '{path}:{wanted}', which is none of {listed}{nearest(wanted, schemes)}")
    return schemes[wanted]


@lru_cache(maxsize=32)
def _schemes(path: str, source: bytes) -> dict[str, Scheme]:
    """Cached by content: a file executed twice gives rules that are equal but not the same, so schemes that differ."""
    return {name: value for name, value in vars(execute(path, WHAT)).items() if isinstance(value, Scheme)}


def source(config: ConfigDict) -> dict[str, str] | None:
    """The user's own files, as stored with a run: path, sha256 and text (of several, joined); None without any."""
    paths = [one.rpartition(":")[0] for one in _joined(config.residual.name) if one not in CATALOGUE]
    if not paths:
        return None
    contents = [read(path, WHAT) for path in dict.fromkeys(paths)]
    return {
        "path": "+".join(dict.fromkeys(paths)),
        "sha256": hashlib.sha256(b"\0".join(contents)).hexdigest(),
        "text": "\n".join(content.decode("utf-8", "replace") for content in contents),
    }
