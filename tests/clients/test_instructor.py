"""`instructor`: typed replies on the openai client."""

from __future__ import annotations

from typing import Any

import instructor
import openai
import pytest
from pydantic import BaseModel, field_validator

from skim import LLM
from tests.live import NAME
from tests.scripted import scripted, tool_call

ASK: list[Any] = [{"role": "user", "content": "Anna is 30 and Ben is 41."}]
MODES = [instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA]


class Person(BaseModel):
    name: str
    age: int


class Upper(Person):
    @field_validator("name")
    @classmethod
    def check(cls, name: str) -> str:
        if not name.isupper():
            raise ValueError("name must be upper case")
        return name


@pytest.fixture(params=MODES, ids=lambda mode: mode.value)
def mode(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def client(base_url: str, mode: Any) -> Any:
    raw = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    return instructor.from_openai(raw, mode=mode)


def reply(mode: Any, kind: str, **fields: Any) -> str:
    if mode is instructor.Mode.TOOLS:
        return tool_call(kind, **fields)
    return tool_call("x", **fields).partition('"arguments": ')[2].removesuffix("}\n</tool_call>")


def test_extraction(client: Any, mode: Any, llm: LLM) -> None:
    """Extraction: a reply becomes a pydantic object, by tools, JSON mode and JSON schema."""
    with scripted(llm, reply(mode, "Person", name="Anna", age=30)):
        found = client.chat.completions.create(model=NAME, messages=ASK, response_model=Person)
    assert isinstance(found, Person)
    assert found.model_dump() == {"name": "Anna", "age": 30}


def test_retry(client: Any, mode: Any, llm: LLM) -> None:
    """Retry: a reply that fails validation is sent back with the error, and the next one is taken."""
    wrong, right = (reply(mode, "Upper", name=name, age=30) for name in ("Anna", "ANNA"))
    with scripted(llm, wrong, right) as prompts:
        found = client.chat.completions.create(model=NAME, messages=ASK, response_model=Upper, max_retries=2)
    assert found.model_dump() == {"name": "ANNA", "age": 30}
    assert "name must be upper case" in prompts[1]


def test_partial(client: Any, mode: Any, llm: LLM) -> None:
    """Partial: a stream gives growing objects, and the last is complete."""
    with scripted(llm, reply(mode, "PartialPerson", name="Anna", age=30)):
        seen = list(client.chat.completions.create_partial(model=NAME, messages=ASK, response_model=Person))
    assert len({one.model_dump_json() for one in seen}) > 1
    assert (seen[-1].name, seen[-1].age) == ("Anna", 30)


def test_iterable(client: Any, mode: Any, llm: LLM) -> None:
    """Iterable: a stream gives one object after the other."""
    people = [{"name": "Anna", "age": 30}, {"name": "Ben", "age": 41}]
    with scripted(llm, reply(mode, "IterablePerson", tasks=people)):
        found = list(client.chat.completions.create_iterable(model=NAME, messages=ASK, response_model=Person))
    assert [one.name for one in found] == ["Anna", "Ben"]


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_the_model_itself(client: Any) -> None:
    """Extraction: grammars make the default model itself follow the schema."""
    found = client.chat.completions.create(
        model=NAME, messages=ASK, response_model=Person, max_tokens=200, temperature=0, max_retries=0
    )
    assert isinstance(found, Person)
