"""Python sources that models wrote."""

from __future__ import annotations

import ast
import warnings
from typing import Literal, cast, overload

_NAME = "<answer>"
warnings.filterwarnings("ignore", module=_NAME)  # otherwise Python prints a line for each odd number or escape


@overload
def parse_source(source: str, mode: Literal["exec"] = "exec") -> ast.Module: ...
@overload
def parse_source(source: str, mode: Literal["eval"]) -> ast.Expression: ...
def parse_source(source: str, mode: Literal["exec", "eval"] = "exec") -> ast.Module | ast.Expression:
    """Return the syntax tree of a source, without warnings. Raises the errors of `ast.parse`.

    Of deeply nested sources, Python 3.11 sometimes loses count and raises SystemError, here RecursionError.
    """
    try:
        return cast("ast.Module | ast.Expression", ast.parse(source, _NAME, mode))
    except SystemError as error:
        raise RecursionError(str(error)) from error
