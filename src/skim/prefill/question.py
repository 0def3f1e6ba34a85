"""Finds the question of a conversation, wherever it stands, by the layout of its texts.

Instructions and questions are short: whole messages and parts, text beside tagged or fenced blocks, and
paragraphs, lines or sentences at the edges of a long text. The rest is material. Among the short texts, the
sentences that ask are the question. Knows nothing of tokens or templates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from skim.prefill.layout import Edge, between, blocks_of, edge_of
from skim.prefill.phrases import Saying, goes_on, is_label, saying_of, sentences, trimmed
from skim.prefill.scoring.words import stem, words_of

# Sizes in tokens. Texts are measured in characters, and `chars_per_token` converts.
SHORT = 256  # most of a unit of instructions or questions
FREE = 1024  # most of all text around material that is instructions; more is material too
_WHOLE = 100  # most of a unit at an edge whose statements belong to its question
_HEADING = 64  # most of a first paragraph that is kept, whatever it says
_STANDS_OUT = 4  # a last paragraph this many times shorter than the one before it stands out
_FEW = 6  # short texts in a message that may each ask; of more, only the first, the last and labelled ones
_UNITS = 12  # units at an edge that are looked at
_PASSED = 2  # of these, units that neither ask nor tell how to answer
_QUOTES = "\"'\u201d\u2019\u00bb\u201c"  # the last ends quotes in German
_REFERENCES = frozenset(
    words_of("it its he him his she her they them their this these those former latter same one ones")
)
_CONTINUATIONS = frozenset(words_of("and but or also then"))
_FEW_WORDS = 4


class Place(IntEnum):
    """Degree to which a sentence is set off from material."""

    SENTENCE = 1  # at the edge of a long line
    EDGE = 2  # in a paragraph or line at the edge of a long text
    SET_OFF = 3  # in a short message or part, beside a block, or labelled


@dataclass(frozen=True)
class Said:
    """A sentence outside the material. Sentences with the same `unit` belong together."""

    chars: range
    saying: Saying
    place: Place
    unit: int


@dataclass(frozen=True)
class Survey:
    """The short texts of one message."""

    said: tuple[Said, ...] = ()  # in order
    kept: tuple[range, ...] = ()  # characters of the texts that are set off
    edges: tuple[range, ...] = ()  # characters at the edges of long texts, up to the last known sentence
    stands_out: range | None = None  # a short last paragraph that neither asks nor tells how to answer
    is_short: bool = False  # the message as a whole is short
    leans: bool = False  # it has few content words, and cannot be understood without the earlier question

    def moved(self, by: int) -> Survey:
        """The same for a text that begins `by` characters later in another one."""
        out = None if self.stands_out is None else _moved(self.stands_out, by)
        said = tuple(replace(one, chars=_moved(one.chars, by), unit=one.unit + by) for one in self.said)
        kept, edges = (tuple(_moved(one, by) for one in ranges) for ranges in (self.kept, self.edges))
        return Survey(said, kept, edges, out, self.is_short, self.leans)

    def asking(self, least: Saying = Saying.WORDS, place: Place = Place.SENTENCE) -> tuple[Said, ...]:
        """Sentences of units that ask, without those that tell how to answer."""
        units = {one.unit for one in self.said if one.saying >= least and one.place >= place}
        return tuple(one for one in self.said if one.unit in units and one.saying is not Saying.MANNER)

    def plain(self) -> tuple[Said, ...]:
        """Sentences that are set off, and neither ask nor tell how to answer."""
        return tuple(o for o in self.said if o.place is Place.SET_OFF and o.saying is Saying.PLAIN)


@dataclass(frozen=True)
class Question:
    """The sentences of a question in the last user message, in the system message and in an earlier one.

    `kept` has other characters to keep. Edges of a message whose question is set off are material.
    """

    own: tuple[Said, ...] = ()
    system: tuple[Said, ...] = ()
    earlier: tuple[Said, ...] = ()
    kept: tuple[range, ...] = ()


def choose(own: Survey, system: Survey, earlier: Survey) -> Question:
    """The question, given surveys of the last user message, the system message and an earlier user message.

    Sentences that are set off beat those at the edges of material. Without any, the system message or the
    earlier user message may ask. If nothing asks, a short text that is set off is the question.
    """
    told = system.kept + system.edges
    if found := own.asking(place=Place.SET_OFF):
        before = earlier.asking() if own.leans else ()
        return Question(found, earlier=before, kept=told + own.kept)
    return replace(_less_clear(own, system, earlier), kept=told + own.kept + own.edges)


def _less_clear(own: Survey, system: Survey, earlier: Survey) -> Question:
    """The question if no sentence that is set off asks. A short earlier message may have asked about this."""
    before = earlier.asking() if own.leans or (earlier.is_short and not own.is_short) else ()
    plain = own.plain()
    at_edges = own.asking(place=Place.EDGE) or (() if plain else own.asking())
    if plain or at_edges:
        both = tuple(sorted({*plain, *at_edges}, key=lambda one: one.chars.start))
        return Question(both, system.asking(Saying.MARK), before)
    if told := system.asking():
        return Question(system=told)
    if before := earlier.asking():
        return Question(earlier=before)
    if manner := tuple(one for one in own.said if one.place is Place.SET_OFF):
        return Question(manner)
    if own.stands_out is not None:
        return Question((Said(own.stands_out, Saying.PLAIN, Place.EDGE, 0),))
    return Question()


def survey(text: str, parts: Sequence[range] = (), *, chars_per_token: float = 4.0) -> Survey:
    """The short texts of a message; `parts` are the places of its content parts, if it has several."""
    places = [one for one in (trimmed(text, part) for part in parts or [range(len(text))]) if one]
    surveyor = _Surveyor(text, chars_per_token)
    if sum(map(len, places)) <= surveyor.chars(SHORT):
        for place in places:
            surveyor.add_short(place)
        leans = _leans(" ".join(text[one.start : one.stop] for one in places))
        return replace(surveyor.result(), is_short=True, leans=leans)
    outer = {places[0], places[-1]}
    has_material = any(len(place) > surveyor.chars(FREE) for place in places)
    most = {place: surveyor.chars(FREE if place in outer and has_material else SHORT) for place in places}
    short = [place for place in places if len(places) > 1 and len(place) <= most[place]]
    surveyor.add_all_short(short, outer)
    for place in sorted({*places} - {*short}, key=lambda place: place.start):
        surveyor.add_long(place)
    return surveyor.result()


class _Surveyor:
    """Collects the sentences of one text."""

    def __init__(self, text: str, chars_per_token: float) -> None:
        self._text = text
        self._chars_per_token = chars_per_token
        self._said: dict[int, Said] = {}  # by start
        self._kept: list[range] = []
        self._edges: list[range] = []
        self._units = 0
        self._stands_out: range | None = None

    def chars(self, tokens: int) -> int:
        """About how many characters this many tokens have."""
        return int(tokens * self._chars_per_token)

    def result(self) -> Survey:
        said = tuple(self._said[start] for start in sorted(self._said))
        return Survey(said, tuple(self._kept), tuple(self._edges), self._stands_out)

    def add_all_short(self, places: Sequence[range], outer: set[range]) -> None:
        """Add short texts. If there are many, they are material, except the outer and the labelled ones."""
        many = len(places) > _FEW or sum(map(len, places)) > self.chars(FREE)
        for place in places:
            if not many or place in outer or self._is_labelled(place):
                self.add_short(place)

    def add_short(self, place: range, *, labelled: bool = False) -> None:
        """Keep a text and add its sentences. If it is very short, its statements belong to its question."""
        self._kept.append(place)
        together = len(place) <= self.chars(SHORT)
        self._units += 1
        for chars, saying in self._sentences(place):
            if labelled and saying is not Saying.MANNER:
                saying = Saying.LABEL
            self._add(chars, saying, Place.SET_OFF, together)

    def add_long(self, place: range) -> None:
        """Add the text around blocks, or at the edges if that is long."""
        text, short, most = self._text, self.chars(SHORT), self.chars(FREE)
        blocks = blocks_of(text, place, short)
        if sum(map(len, between(place, blocks))) > most:
            blocks = blocks_of(text, place, short, fences=False)  # a document with fences in it
        asking = [block for block in blocks if block.asks and len(block.inside) <= most][-_FEW:]
        for block in asking:
            self.add_short(block.inside, labelled=True)
        kept = [*asking, *(block for block in blocks if block.tag == "tools")]
        self._kept += [block.place for block in kept]
        free = [one for one in (trimmed(text, gap) for gap in between(place, blocks)) if one]
        outer = {*free[:1], *free[-1:]}
        if sum(map(len, free)) <= min(most, len(place) // 2):
            self.add_all_short(free, outer)
            return
        for gap in sorted({*free[:_FEW], *free[-_FEW:]}, key=lambda gap: gap.start):
            if blocks and len(gap) <= short:
                self.add_short(gap)
            else:
                self._add_edges(gap, is_last=gap.stop == place.stop)

    def _add_edges(self, place: range, *, is_last: bool) -> None:
        trailing = edge_of(self._text, place, self.chars(SHORT), leading=False)
        asks = self._add_edge(place, trailing, leading=False, may_lead=True)
        leading = edge_of(self._text, place, self.chars(SHORT), leading=True)
        self._add_edge(place, leading, leading=True, may_lead=not asks)
        if is_last and trailing.kind == "paragraph" and trailing.units:
            last, *more = trailing.units
            if len(last) <= self.chars(_HEADING) and (not more or len(more[0]) >= _STANDS_OUT * len(last)):
                self._stands_out = last

    def _add_edge(self, place: range, edge: Edge, *, leading: bool, may_lead: bool) -> bool:
        """Add the sentences of the units that ask, from the outermost inwards. True if any does.

        Units that tell how to answer are passed, and a few others. After the first unit that asks, only
        units that ask follow, up to the length of a short text. With `may_lead`, labelled sentences count as
        set off.
        """
        at = Place.SENTENCE if edge.kind == "sentence" else Place.EDGE
        inner: range | None = None  # the innermost unit that asks or tells how to answer
        asks, set_off, passed, left = False, False, 0, self.chars(SHORT)
        for unit in self._with_labels(edge.units[:_UNITS], leading):
            left -= len(unit)
            if left < 0 and inner is not None:
                break
            found = self._sentences(unit, speech=True)
            sayings = [saying for _, saying in found]
            if self._unit_asks(unit, sayings):
                self._units += 1
                whole = len(unit) <= self.chars(_WHOLE)
                for chars, saying in found:
                    if saying.asks or (whole and saying is Saying.PLAIN):
                        labelled = saying is Saying.LABEL and may_lead
                        set_off = set_off or labelled
                        self._add(chars, saying, Place.SET_OFF if labelled else at, whole)
                asks = True
                inner = unit if whole else _known(found)
            elif all(saying is Saying.MANNER for saying in sayings):
                inner = unit
            elif asks or at is Place.SENTENCE or passed == _PASSED:
                break
            else:
                passed += 1
        kept = self._kept if set_off else self._edges
        if inner is not None:
            kept.append(range(place.start, inner.stop) if leading else range(inner.start, place.stop))
        elif leading and at is Place.EDGE and edge.units and len(edge.units[0]) <= self.chars(_HEADING):
            kept.append(edge.units[0])
        return asks

    def _unit_asks(self, unit: range, sayings: Sequence[Saying]) -> bool:
        """True if a sentence asks; of a long unit, the first or the last, for the others tell a story."""
        own = [saying for saying in sayings if saying is not Saying.MANNER]
        if len(unit) > self.chars(_WHOLE):
            own = [*own[:1], *own[-1:]]
        return any(saying.asks for saying in own)

    def _with_labels(self, units: Sequence[range], leading: bool) -> list[range]:
        """Join each unit that is only a label with the next unit of the text."""
        joined: list[range] = []
        label: range | None = None
        for unit in units if leading else reversed(units):
            if is_label(self._text[unit.start : unit.stop]) and label is None:
                label = unit
                continue
            joined.append(unit if label is None else range(label.start, unit.stop))
            label = None
        if label is not None:
            joined.append(label)
        return joined if leading else joined[::-1]

    def _sentences(self, place: range, *, speech: bool = False) -> list[tuple[range, Saying]]:
        """The sentences of a text. A label alone is also that of the next sentence that asks or states.

        With `speech`, a sentence that ends in quotes does not ask: someone in a story does. Nor does a line
        of wrapped text that begins inside a sentence, unless it has a question mark.
        """
        found: list[tuple[range, Saying]] = []
        labelled = False
        for chars in sentences(self._text, place):
            own = self._text[chars.start : chars.stop]
            saying = Saying.PLAIN if speech and own[-1] in _QUOTES else saying_of(own)
            if speech and saying in (Saying.MANNER, Saying.WORDS) and goes_on(self._text, chars.start):
                saying = Saying.PLAIN
            if labelled and saying is not Saying.MANNER:
                saying, labelled = Saying.LABEL, False
            labelled = labelled or is_label(own)
            found.append((chars, saying))
        return found

    def _is_labelled(self, place: range) -> bool:
        return len(place) <= self.chars(SHORT) and any(
            saying is Saying.LABEL for _, saying in self._sentences(place)
        )

    def _add(self, chars: range, saying: Saying, place: Place, together: bool) -> None:
        if not together:
            self._units += 1
        self._said.setdefault(chars.start, Said(chars, saying, place, self._units))


def _known(found: Sequence[tuple[range, Saying]]) -> range:
    """The characters from the first to the last sentence that is not plain."""
    known = [chars for chars, saying in found if saying is not Saying.PLAIN]
    return range(known[0].start, known[-1].stop)


def _moved(chars: range, by: int) -> range:
    return range(chars.start + by, chars.stop + by)


def _leans(text: str) -> bool:
    """True for a question such as `And in Bergen?`, or `When was it sold?`"""
    words = words_of(text)
    content = sum(1 for word in words if stem(word))
    if content < 3 and (len(words) <= _FEW_WORDS or words[0] in _CONTINUATIONS or words[1] == "about"):
        return True
    return content < 6 and not _REFERENCES.isdisjoint(words)
