"""Decides whether a chat template is simple enough that it can neither loop for long nor build huge values.

Most published templates are. Their cost is at most the size of the conversation times the size of the template, because
the rules below allow no nested loop over more than the item of the outer loop, no growing variables, no functions of
the template's own, only operations that take linear time, and in loops few uses of values other than the loop's item.
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
_MAX_OUTER_USES = 32
"""Maximum number of uses, in a loop, of values that do not belong to its item. Each may be as large as the
conversation, and a loop may run once for each letter of a message."""
_MAX_OUTER_USES_OF_PARTS = 2
"""The same in a loop over anything but the messages."""


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
        lean = all(_uses_its_item(loop, tree) for loop in tree.find_all(nodes.For))
        return linear and lean and _lists_stay_lists(tree) and _loops_over_parts(tree, "", assigned)
    except (jinja2.TemplateError, RecursionError):
        return False


def _is_linear(node: nodes.Node) -> bool:
    """Whether a node takes linear time and stores no value that is larger than the conversation."""
    if type(node) not in _ALLOWED:  # not a subclass
        return False
    if isinstance(node, nodes.Filter):
        if node.name == "tojson" and any(inner.name == "tojson" for inner in node.find_all(nodes.Filter)):
            return False  # each one doubles the backslashes
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
        value = nodes.Tuple([node.node], "load")
        grows = any(True for _ in value.find_all((nodes.Add, nodes.Concat)))
        grows |= any(inner.name == "tojson" for inner in value.find_all(nodes.Filter))
        return not grows and getattr(node.target, "name", "loop") not in ("loop", "messages")
    return not (isinstance(node, nodes.For) and node.recursive)


def _lists_stay_lists(tree: nodes.Template) -> bool:
    """Whether no list of parts and no namespace becomes text, which would double its backslashes each time."""
    held = {id(node.node) for node in tree.find_all(nodes.Getattr)}
    picked = {id(node.node) for node in tree.find_all(nodes.Getitem) if not isinstance(node.arg, nodes.Slice)}
    picked |= {id(node.node) for node in tree.find_all(nodes.Filter) if node.name in ("first", "last", "length")}
    for call in tree.find_all(nodes.Call):
        if getattr(call.node, "attr", "") == "split" and id(call) not in picked:
            return False
    makers = {id(call) for call in tree.find_all(nodes.Call) if getattr(call.node, "name", "") == "namespace"}
    stored = {id(each.node): getattr(each.target, "name", "") for each in tree.find_all(nodes.Assign)}
    if not makers <= stored.keys():
        return False
    namespaces = {stored[maker] for maker in makers}
    loads = [name for name in tree.find_all(nodes.Name) if name.ctx == "load"]
    return all(id(name) in held for name in loads if name.name in namespaces)


def _uses_its_item(loop: nodes.For, tree: nodes.Template) -> bool:
    """Whether the body of a loop uses few values other than its item, and parts and copies of it."""
    body = nodes.Tuple([*loop.body, *loop.else_, *([loop.test] if loop.test else [])], "load")
    of_item = {getattr(each.target, "name", "") for each in (loop, *body.find_all(nodes.For))}
    if of_item & {"loop", "messages", "tools", "documents"}:
        return False
    values: dict[str, list[nodes.Node]] = {}
    for each in tree.find_all(nodes.Assign):
        values.setdefault(getattr(each.target, "name", ""), []).append(each.node)
    for name, assigned in values.items():  # in the order of the template
        is_copy = all({*of_item, "loop", name}.issuperset(_names(value)) for value in assigned)
        of_item = of_item | {name} if is_copy else of_item - {name}
    uses = [name for name in _names(body) if name not in {*of_item, "loop"}]
    source = loop.iter
    if isinstance(source, nodes.Getitem) and isinstance(source.arg, nodes.Slice):
        source = source.node
    is_conversation = isinstance(source, nodes.Name) and source.name == "messages"
    return len(uses) <= (_MAX_OUTER_USES if is_conversation else _MAX_OUTER_USES_OF_PARTS)


def _names(node: nodes.Node) -> list[str]:
    """The variables that an expression or a part of a template reads."""
    return [name.name for name in nodes.Tuple([node], "load").find_all(nodes.Name) if name.ctx == "load"]


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
