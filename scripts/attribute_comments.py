"""Gives the reference pages the text behind `#:`, which this package writes beside attributes, as their docstring."""

from __future__ import annotations

import re
from typing import Any

import griffe

_COMMENT = re.compile(r"#:\s*(.*)")


class AttributeComments(griffe.Extension):
    """Looks for `#: text` on the line of an attribute, or on the lines right above it."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring is not None or attr.lineno is None or attr.parent is None:
            return
        lines = attr.lines_collection[attr.filepath]
        last = lines[(attr.endlineno or attr.lineno) - 1]
        if match := _COMMENT.search(last):
            text = match[1]
        else:
            above: list[str] = []
            number = attr.lineno - 2
            while number >= 0 and (match := _COMMENT.fullmatch(lines[number].strip())):
                above.insert(0, match[1])
                number -= 1
            text = " ".join(above)
        if text:
            attr.docstring = griffe.Docstring(text[0].upper() + text[1:], parent=attr, lineno=attr.lineno)
