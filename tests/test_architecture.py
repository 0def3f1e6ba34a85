"""Every identifier that docs/architecture.md names exists in the source."""

from __future__ import annotations

import ast
import re

import pytest

from tests.paths import ROOT, SOURCE

DOCUMENT = ROOT / "docs" / "architecture.md"
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
FOREIGN = {"call_soon_threadsafe", "GGUF_CONFIG_MAPPING"}  # of asyncio and transformers
FOREIGN_PACKAGES = {"scipy", "torch", "transformers", "gguf"}
SUFFIXES = {"py", "c", "h", "md"}


class Names:
    """Names that the source defines, the members of its classes, and its one-word strings."""

    def __init__(self) -> None:
        self.defined: set[str] = set()
        self.members: dict[str, set[str]] = {}
        self.words: set[str] = set()
        bases: dict[str, list[str]] = {}
        for file in sorted(SOURCE.rglob("*.py")):
            self.defined |= {file.stem, file.parent.name}
            for node in ast.walk(ast.parse(file.read_text())):
                self.defined.update(defined_by(node))
                match node:
                    case ast.ClassDef(name=name):
                        own = {found for part in ast.walk(node) for found in defined_by(part)}
                        self.members.setdefault(name, set()).update(own)
                        bases[name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
                    case ast.Constant(value=str(text)) if re.fullmatch(r"\w+", text):
                        self.words.add(text)
        for name, parents in bases.items():
            for parent in parents:
                self.members[name] |= self.members.get(parent, set())

    def knows(self, identifier: str) -> bool:
        first, *rest = identifier.split(".")
        if first in FOREIGN_PACKAGES or (rest and rest[-1] in SUFFIXES):
            return True
        known = first in self.defined | self.words | FOREIGN
        return known and all(part in self.members.get(first, set()) for part in rest)


def defined_by(node: ast.AST) -> list[str]:
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return [name]
        case ast.arg(arg=name) | ast.keyword(arg=str(name)):
            return [name]
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return [name]
    return []


NAMES = Names()


def test_every_identifier_in_the_architecture_exists() -> None:
    prose = FENCE.sub("", DOCUMENT.read_text())
    found = set(re.findall(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)`", prose))
    assert len(found) > 80
    assert [identifier for identifier in sorted(found) if not NAMES.knows(identifier)] == []


def test_every_name_in_the_request_diagram_exists() -> None:
    diagram = DOCUMENT.read_text().split("## A request's life")[1].split("```")[1]
    found = set(re.findall(r"\b[A-Z]\w+(?:\.\w+)+", diagram)) | set(
        re.findall(r"\b[A-Z]\w*[a-z][A-Z]\w*", diagram)
    )
    assert len(found) > 10
    assert [identifier for identifier in sorted(found) if not NAMES.knows(identifier)] == []


@pytest.mark.parametrize("identifier", ["KVPool.slots_of", "Flight", "CudaMetadata.upload"])
def test_unknown_identifiers_are_found(identifier: str) -> None:
    assert not NAMES.knows(identifier)


def test_the_glossary_has_words_of_the_documents_for_users() -> None:
    glossary = DOCUMENT.read_text().split("## Glossary")[1].split("\n## ")[0]
    words = {word for row in re.findall(r"^\| (.*?) \|", glossary, re.MULTILINE) for word in row.split(", ")}
    assert words >= {"*scale*", "*middle*", "*restore*", "*margin*", "*parked*"}


@pytest.mark.parametrize("document", ["README.md", "docs/reference.md", "docs/server.md"])
def test_prefixes_are_restored_and_weights_dequantized(document: str) -> None:
    sentences = re.split(r"(?<=[.:|])\s", (ROOT / document).read_text())
    found = [one for one in sentences if re.search(r"\brestor", one, re.IGNORECASE)]
    assert [one for one in found if re.search(r"weight|dtype|codes|GGUF|Q4", one)] == []
