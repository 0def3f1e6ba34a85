"""Fields about the chat template, by vLLM's names."""

from __future__ import annotations

from typing import Any

from skim.rendering import Rendering
from skim.server.protocol import Body


class TemplateFields(Body):
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def rendering(self) -> Rendering:
        """The options of the template. A message that is continued needs no generation prompt."""
        continued = bool(self.continue_final_message)
        begun = self.add_generation_prompt
        return Rendering(
            not continued if begun is None else begun, continued, self.chat_template_kwargs or {}
        )
