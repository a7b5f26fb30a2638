"""A daemon with the HTTP front, and the official packages' clients of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from anthropic import Anthropic
from openai import OpenAI

from daemons import EXE
from fronts import Front
from trellis import Client


@pytest.fixture(scope="session")
def front() -> Iterator[Front]:
    """A front on loopback, which no test ends."""
    assert EXE.is_file(), f"{EXE} is missing: TRELLIS_EXE names a daemon to be tested against"
    front = Front(is_on_loopback=True)
    yield front
    front.close()


@pytest.fixture(scope="session")
def socket_front() -> Iterator[Front]:
    """A front on a Unix socket, which no test ends."""
    front = Front(is_on_loopback=False)
    yield front
    front.close()


@pytest.fixture
def environment(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables by which both packages find the front."""
    for api, path in (("OPENAI", "/v1"), ("ANTHROPIC", "")):
        monkeypatch.setenv(f"{api}_BASE_URL", front.url + path)
        monkeypatch.setenv(f"{api}_API_KEY", front.token)


@pytest.fixture
def openai(front: Front) -> Iterator[OpenAI]:
    """A client of the package."""
    with OpenAI(base_url=f"{front.url}/v1", api_key=front.token, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def anthropic(front: Front) -> Iterator[Anthropic]:
    """A client of the package."""
    with Anthropic(base_url=front.url, api_key=front.token, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def trellis(front: Front) -> Iterator[Client]:
    """A client of the same daemon that knows nothing of HTTP."""
    with Client.connect(front.socket) as client:
        yield client
