"""OpenAI's Responses API: a translation into a chat request, and of the chat reply back."""
