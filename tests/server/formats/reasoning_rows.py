"""Replies with reasoning as each family writes them. One row a reasoning format."""

from __future__ import annotations

from dataclasses import dataclass

Case = tuple[str, str, str, str]


@dataclass(frozen=True)
class Row:
    replies: dict[str, Case]
    """End of the prompt, text, reasoning, content."""
    pieces: tuple[str, ...]


def tagged(opening: str, closing: str, *, always: bool) -> Row:
    thought = "Hm, 2 + 2?\n\nIt's 4 <b>, 漢 😀."
    replies = {
        "opened by the reply": ("A:", f"{opening}\n{thought}\n{closing}\n\nFour.\n", thought, "Four.\n"),
        "opened by the prompt": (f"A: {opening}\n", f"{thought}\n{closing}\n\nFour.", thought, "Four."),
        "opened by both": (f"A:{opening}", f"\n{opening}{thought}{closing}Four.", thought, "Four."),
        "closed by the prompt": (f"A: {opening}\n\n{closing}\n\n", "Four.\n", "", "Four.\n"),
        "tags in the text of a closed one": (
            f"A: {closing}",
            f"{opening}a{closing}b",
            "",
            f"{opening}a{closing}b",
        ),
        "an empty one": ("A:", f"{opening}\n\n{closing}\n\nFour.", "", "Four."),
        "a tag in the content": (
            "A:",
            f"{opening}a{closing}b {opening}c{closing}",
            "a",
            f"b {opening}c{closing}",
        ),
        "cut": ("A:", f"{opening}\n{thought}\n", thought, ""),
        "cut in the closing tag": ("A:", f"{opening}a{closing[:-2]}", f"a{closing[:-2]}", ""),
        "almost closed": ("A:", f"{opening}a {closing[:-2]} b{closing}c", f"a {closing[:-2]} b", "c"),
        "nothing": ("A:", "", "", ""),
        "nothing of the thought": (f"A:{opening}", "", "", ""),
    }
    if always:
        replies |= {
            "never opened": ("A:", f"{thought}{closing}Four.", thought, "Four."),
            "never closed": ("A:", f" {thought} ", thought, ""),
        }
    else:
        replies |= {
            "none": ("A:", " Four.\n", "", " Four.\n"),
            "blank": ("A:", " \n", "", " \n"),
            "later": ("A:", f"Four. {opening}a{closing}", "", f"Four. {opening}a{closing}"),
            "never opened": ("A:", f"a{closing}b", "", f"a{closing}b"),
            "cut in the opening tag": ("A:", f" {opening[:-1]}", "", f" {opening[:-1]}"),
            "almost opened": ("A:", f"{opening[:-1]} a", "", f"{opening[:-1]} a"),
        }
    return Row(replies, (opening, closing, opening[:-1], closing[:2], " ", "\n", "<", "["))


ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
HARMONY = Row(
    {
        "both": (
            "",
            f"{ANALYSIS}2 + 2 <b> 😀{NEXT}{FINAL}Four, <i>vier</i>.\n",
            "2 + 2 <b> 😀",
            "Four, <i>vier</i>.\n",
        ),
        "with its end": ("", f"{ANALYSIS}Hm{NEXT}{FINAL}Four.<|return|>", "Hm", "Four."),
        "only an answer": ("", f"{FINAL}Four.", "", "Four."),
        "a preamble": (
            "",
            f"{ANALYSIS}Hm{NEXT}<|channel|>commentary<|message|>I'll look.{NEXT}{FINAL}Four.",
            "Hm",
            "I'll look.\nFour.",
        ),
        "two thoughts": ("", f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}c", "a\nb", "c"),
        "without headers": ("", "Four.\n", "", "Four.\n"),
        "a call is passed on": ("", f"{ANALYSIS}Hm{NEXT}{CALL}", "Hm", f"<|start|>assistant{CALL}"),
        "a call after the role": (
            "",
            " to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
            "",
            " to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
        ),
        "a call, then an answer": (
            "",
            f"<|channel|>commentary to=functions.f<|message|>{{}}<|start|>assistant{FINAL}Done.",
            "",
            "<|channel|>commentary to=functions.f<|message|>{}<|call|>Done.",
        ),
        "no end between": ("", f"{ANALYSIS}Hm{FINAL}Four.", "Hm", "Four."),
        "cut in the thought": ("", f"{ANALYSIS}Hm <|en", "Hm <|en", ""),
        "cut in the header": ("", "<|channel|>anal", "", "<|channel|>anal"),
        "an unknown header": ("", "<|channel|>news<|message|>Hi", "", "<|channel|>news<|message|>Hi"),
        "text with a tag": ("", "a<|end|>b", "", "a<|end|>b"),
        "nothing": ("", "", "", ""),
    },
    (
        "<|channel|>",
        "analysis",
        "final",
        "commentary",
        " to=functions.f",
        "<|message|>",
        "<|end|>",
        "<|start|>assistant",
        "<|call|>",
        "<|",
    ),
)

ROWS = {
    "think": tagged("<think>", "</think>", always=False),
    "deepseek_r1": tagged("<think>", "</think>", always=True),
    "mistral": tagged("[THINK]", "[/THINK]", always=False),
    "gpt_oss": HARMONY,
}
