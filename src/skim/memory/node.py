"""Nodes of the prefix tree, and walks over them."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from skim.memory.groups import ABSENT

if TYPE_CHECKING:
    from skim.memory.prefix import Namespace

Edge = tuple[int, ...]


class Node:
    """A block of tokens of a prefix, and its blocks in the pool."""

    __slots__ = (
        "blocks",
        "children",
        "depth",
        "edge",
        "edges",
        "kept",
        "leaf_entry",
        "link",
        "namespace",
        "parent",
        "resumed_at",
        "used_at",
        "window_entry",
    )

    def __init__(self, edge: Edge, groups: int, parent: Node | None, namespace: Namespace) -> None:
        self.edge = edge
        self.blocks = [ABSENT] * groups  # by group
        self.parent = parent
        self.namespace = namespace
        self.depth: int = parent.depth + 1 if parent is not None else 0  # blocks up to its end
        self.children: dict[Edge, Node] = {}
        self.edges: list[Edge] = []  # the children's edges, sorted: the best partial match is a neighbour
        self.used_at = 0
        self.resumed_at = 0  # when a sequence last began or ended within a window of it
        self.leaf_entry = self.window_entry = 0  # in the order of eviction
        self.link: str | None = None  # of the checkpoint segment that ends here, once it is known
        self.kept: str | None = None  # the checkpoint file that holds it

    @property
    def is_whole(self) -> bool:
        return ABSENT not in self.blocks


def path_to(node: Node) -> list[Node]:
    """The path to a node, from the root's child."""
    path = [node]
    while (parent := path[-1].parent) is not None and parent.depth:
        path.append(parent)
    return path[::-1]


def closest_child(node: Node, tokens: Edge) -> tuple[Node | None, int]:
    """The child with the longest common prefix, which is a neighbour of `tokens` in sorted order."""
    at = bisect_left(node.edges, tokens)
    best, length = None, 0
    for edge in node.edges[max(0, at - 1) : at + 1]:
        shared = next((i for i, (a, b) in enumerate(zip(edge, tokens, strict=False)) if a != b), len(tokens))
        if shared > length:
            best, length = node.children[edge], shared
    return best, length


def descendants(node: Node) -> list[Node]:
    found: list[Node] = []
    stack = list(node.children.values())
    while stack:
        child = stack.pop()
        found.append(child)
        stack.extend(child.children.values())
    return found
