"""instructor against a running server. Run by hand: python instructor_client.py URL

Checked with instructor 1.17.0 (Python 3.11). The client is no dependency of the project: install it elsewhere.
"""

from __future__ import annotations

from typing import Any

import instructor
from client_checks import AnyObject, Checks, Person
from openai import OpenAI

checks = Checks("instructor", "openai")
ASKED = [{"role": "user", "content": 'Say {"name": "Ada", "age": 36} as JSON, and nothing else.'}]


def create(mode: instructor.Mode, kind: Any, **more: Any) -> Any:
    client = instructor.from_openai(OpenAI(base_url=checks.base_url, api_key="none", max_retries=0), mode=mode)
    found = client.chat.completions.create(
        model=checks.model, messages=ASKED, response_model=kind, temperature=0, max_tokens=96, max_retries=0, **more
    )
    assert isinstance(found, kind if isinstance(kind, type) else list), found
    return found


def partial() -> Any:
    client = instructor.from_openai(OpenAI(base_url=checks.base_url, api_key="none"), mode=instructor.Mode.TOOLS)
    *_, last = client.chat.completions.create_partial(
        model=checks.model, messages=ASKED, response_model=Person, temperature=0, max_tokens=96
    )
    return Person.model_validate(last.model_dump())


for name in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"):
    checks.check(f"Mode.{name}", lambda name=name: create(instructor.Mode[name], Person))
checks.check("Mode.JSON", lambda: create(instructor.Mode.JSON, AnyObject))
checks.check("create_partial, streamed", partial)
checks.finish()
