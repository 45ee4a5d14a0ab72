"""What can be set? The text of --config_help."""

import textwrap

from resjax.config.field import show
from resjax.config.schema import FIELDS, SECTIONS

WIDTH = 118
HEADER = """\
Fields of a configuration. Set one with --config.FIELD=VALUE, or in a config file with config.FIELD = VALUE.
Each line: field, type, default, meaning. A field whose default is None is optional: None (or none) unsets it again.
"""


def help_text() -> str:
    """Every field with type, default and meaning, by section."""
    parts = [HEADER]
    for section in ("", *SECTIONS):
        fields = [field for field in FIELDS.values() if field.section == section]
        if section:
            parts.append(f"{section}: {SECTIONS[section]}\n")
        for field in fields:
            head = f"  {field.path}  [{field.type_text()}]  default {show(field.default)}"
            body = textwrap.fill(field.help, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
            parts.append(f"{head}\n{body}\n")
    return "\n".join(parts)
