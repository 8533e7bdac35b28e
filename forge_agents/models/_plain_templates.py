"""Decides whether a chat template is simple enough that it can neither loop for long nor build huge values.

Most published templates are. Their cost is at most the size of the conversation times the size of the template, because
the rules below allow no nested loop over more than the item of the outer loop, no growing variables, no functions of
the template's own and only operations that take linear time.
"""

from __future__ import annotations

import functools

import jinja2
from jinja2 import nodes

from forge_agents.models._chat_template_worker import environment

_MAX_CHARS = 1 << 14
_ALLOWED = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Assign, nodes.Scope, nodes.Break),
    *(nodes.Continue, nodes.Name, nodes.NSRef, nodes.Const, nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Compare),
    *(nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Add, nodes.Sub, nodes.Neg, nodes.Mod, nodes.Concat),
    *(nodes.CondExpr, nodes.Test, nodes.Filter, nodes.Call, nodes.Keyword),
)
_FILTERS = ("capitalize", "count", "first", "last", "length", "lower", "string", "tojson", "trim", "upper")
_METHODS = ("endswith", "get", "lower", "lstrip", "rstrip", "split", "startswith", "strip", "upper")
_FUNCTIONS = ("namespace", "raise_exception")


@functools.lru_cache(maxsize=64)
def is_plain(template: str) -> bool:
    """Whether any small conversation renders in a moment. False for a template with an error."""
    if len(template) > _MAX_CHARS:
        return False
    try:
        tree = environment().parse(template)
        assigned = {getattr(node.target, "name", "") for node in tree.find_all(nodes.Assign)}
        # two namespaces could hold each other many times over
        holders = sum(getattr(node.node, "name", "") == "namespace" for node in tree.find_all(nodes.Call))
        linear = holders < 2 and all(map(_is_linear, tree.find_all(nodes.Node)))
        return linear and _loops_over_parts(tree, "", assigned)
    except (jinja2.TemplateError, RecursionError):
        return False


def _is_linear(node: nodes.Node) -> bool:
    """Whether a node takes linear time and stores no value that is larger than the conversation."""
    if type(node) not in _ALLOWED:  # not a subclass
        return False
    if isinstance(node, nodes.Filter):
        return node.name in _FILTERS and not (node.args or node.kwargs or node.dyn_args or node.dyn_kwargs)
    if isinstance(node, nodes.Call):
        names, function = (_METHODS, node.node) if isinstance(node.node, nodes.Getattr) else (_FUNCTIONS, node.node)
        name = getattr(function, "attr", "") or getattr(function, "name", "")
        return name in names and not (node.dyn_args or node.dyn_kwargs)
    if isinstance(node, nodes.Mod):  # of a number, because a text may be a format with a width
        left, right = node.left, node.right
        counts = isinstance(left, nodes.Getattr) and isinstance(left.node, nodes.Name) and left.node.name == "loop"
        return counts and isinstance(right, nodes.Const) and type(right.value) is int
    if isinstance(node, nodes.Assign):
        grows = any(True for _ in nodes.Tuple([node.node], "load").find_all((nodes.Add, nodes.Concat)))
        return not grows and getattr(node.target, "name", "loop") != "loop"
    return not (isinstance(node, nodes.For) and node.recursive)


def _loops_over_parts(node: nodes.Node, item: str, assigned: set[str]) -> bool:
    """Whether each loop inside another one runs over a part of the `item` of that loop, and makes no namespaces."""
    for child in node.iter_child_nodes():
        inner = item
        if isinstance(child, nodes.For):
            source = child.iter
            while isinstance(source, nodes.Getattr | nodes.Getitem):
                source = source.node
            if not (isinstance(source, nodes.Name) and isinstance(child.target, nodes.Name)):
                return False
            if item and (source.name != item or item in assigned):
                return False
            inner = child.target.name
        elif item and isinstance(child, nodes.Call) and getattr(child.node, "name", "") == "namespace":
            return False
        if not _loops_over_parts(child, inner, assigned):
            return False
    return True
