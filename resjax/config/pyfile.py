"""How is a Python file that the user names executed, and how are its faults told in one sentence?"""

import difflib
import hashlib
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

from resjax.errors import Refused


def read(path: str, what: str) -> bytes:
    """The file's bytes.

    Raises:
      Refused: it is not there (a near one is named), is a folder, or cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise Refused(f"{what} '{path}' does not exist{_near(path)}") from None
    except IsADirectoryError:
        raise Refused(f"{what} '{path}' is a folder; give a Python file in it{_listed(path)}") from None
    except (OSError, ValueError) as error:
        raise Refused(f"{what} '{path}' cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _listed(folder: str) -> str:
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".py"))
    except OSError:
        names = []
    return f", such as {', '.join(names[:8])}" if names else ""


def _near(path: str) -> str:
    folder, name = os.path.split(path)
    try:
        names = [one for one in os.listdir(folder or ".") if one.endswith(".py")]
    except OSError:
        return ""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6) or [one for one in names if one == f"{name}.py"]
    return f"; did you mean '{os.path.join(folder, close[0])}'?" if close else _listed(folder or ".")


def execute(path: str, what: str) -> ModuleType:
    """The module that the file at ``path`` is, executed afresh; nothing is written beside it.

    Raises:
      Refused: it cannot be read, is no valid Python, or raises; with the line.
    """
    source = read(path, what)
    module = ModuleType(f"resjax_file_{hashlib.sha256(os.path.abspath(path).encode()).hexdigest()[:12]}")
    module.__file__ = os.path.abspath(path)
    sys.modules[module.__name__] = module  # dataclasses and pickle look a class's module up there
    try:
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    except SyntaxError as error:
        where = f", line {error.lineno}" if error.lineno else ""
        raise Refused(f"{what} '{path}'{where} is no valid Python: {error.msg}") from None
    except Exception as error:
        raise told(error, path, what) from None
    return module


def told(error: Exception, path: str, what: str) -> Refused:
    """An exception out of the file's code as a refusal that names the last line of the file that led to it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    where = f"{what} '{path}'" + (f", line {lines[-1]}" if lines else "")
    # Attribute errors of a configuration already are a sentence; of others the type says more than the message alone.
    plain = isinstance(error, Refused) or (isinstance(error, AttributeError) and "there is no field" in str(error))
    return Refused(f"{where}: {error}" if plain else f"{where}: {type(error).__name__}: {error}")
