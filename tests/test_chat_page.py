"""The chat page of `penstock serve`, in a real browser."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromium
import pytest
import served
from served import Served

KEY = "a-secret"
ATTACK = "<img src=x onerror=alert(1)><script>alert(2)</script>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = served.write_model(tmp_path_factory.mktemp("models") / "tiny")
    with Served(folder, "--name", "a <b>model</b> & more", key=KEY) as opened:
        yield opened
        assert opened.log == ""


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Browser]:
    opened = chromium.Browser(chromium.required())
    yield opened
    opened.close()


@pytest.fixture
def page(browser: chromium.Browser, server: Served) -> Iterator[chromium.Browser]:
    """The page, opened, with the key; nothing may go wrong in it, and nothing else be asked for."""
    browser.problems.clear()
    browser.requests.clear()
    browser.view(1000, 700)
    browser.open(server.url + "/")
    browser.ask(f"document.querySelector('#key').value = {json.dumps(KEY)}")
    yield browser
    assert browser.problems == []
    asked = {f"{server.url}/", f"{server.url}/v1/chat/completions", "about:blank", "data:,"}
    assert set(browser.requests) <= asked


def texts(page: chromium.Browser, kind: str) -> list[str]:
    return list(page.ask(f"[...document.querySelectorAll('.message.{kind}')].map(each => each.textContent)"))


def wait_for(page: chromium.Browser, expression: str) -> Any:
    """Wait until an expression is true in the page."""
    end = time.monotonic() + served.PATIENCE
    while not (value := page.ask(expression)):
        assert time.monotonic() < end, page.ask("document.body.innerText")
        time.sleep(0.02)
    return value


IDLE = "document.querySelector('#stop').hidden"


def say(page: chromium.Browser, text: str) -> None:
    """Write a message and send it, without the mouse."""
    assert page.ask("document.activeElement.id") == "text"
    page.write(text)
    page.press("Enter")


def test_a_conversation_by_the_keyboard(page: chromium.Browser, server: Served) -> None:
    page.ask("document.querySelector('#tokens').value = 20; document.querySelector('#temperature').value = 0")
    page.ask("document.querySelector('#system').value = 'be kind'")
    say(page, f"hello {ATTACK}")
    wait_for(page, IDLE)
    say(page, "and you?")
    wait_for(page, IDLE)
    first, second = texts(page, "assistant")
    assert texts(page, "user") == [f"hello {ATTACK}", "and you?"]
    said = [("system", "be kind"), ("user", f"hello {ATTACK}"), ("assistant", first), ("user", "and you?")]
    messages: list[Any] = [{"role": role, "content": content} for role, content in said]
    for count, shown in ((2, first), (4, second)):
        wanted = server.client().chat.completions.create(
            model=server.name, messages=messages[:count], max_tokens=20, temperature=0
        )
        assert shown == wanted.choices[0].message.content
    assert page.ask("document.querySelectorAll('#log img, #log script').length") == 0
    assert page.ask("document.querySelector('h1').textContent") == server.name
    page.click("#new")
    assert texts(page, "user") == []
    assert page.ask("document.activeElement.id") == "text"


@pytest.mark.parametrize("by", ["Escape", "#stop"])
def test_an_answer_is_stopped_and_gives_back_its_pages(
    page: chromium.Browser, server: Served, by: str
) -> None:
    page.ask("document.querySelector('#tokens').value = 3000")
    say(page, "tell me a long story")
    wait_for(page, "document.querySelector('.assistant')?.textContent.length > 3")
    assert not page.ask(IDLE)
    assert page.ask("document.querySelector('#log').getAttribute('aria-busy')") == "true"
    page.press(by) if by == "Escape" else page.click(by)
    wait_for(page, IDLE)
    (kept,) = texts(page, "assistant")
    assert len(kept) < 3000
    figures = server.wait_until(lambda figures: figures["sequences_running"] == 0)
    assert figures["pages_used"] == 0
    say(page, "go on")
    page.press("Escape")
    wait_for(page, IDLE)


def test_what_goes_wrong_is_shown_and_the_question_kept(page: chromium.Browser) -> None:
    page.ask("document.querySelector('#key').value = 'wrong'")
    say(page, "hello")
    (problem,) = wait_for(page, "[...document.querySelectorAll('.error')].map(each => each.textContent)")
    assert "API key" in problem
    assert page.ask("document.querySelector('.error').getAttribute('role')") == "alert"
    assert page.ask("document.querySelector('#text').value") == "hello"
    assert len(page.problems) == 1, "the browser itself tells of a status of 401"
    page.problems.clear()


@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_page_can_be_read_on_a_phone(page: chromium.Browser, dark: bool, tmp_path: Path) -> None:
    page.view(390, 844, phone=True, dark=dark)
    page.ask("document.querySelector('#tokens').value = 60")
    say(page, "a word " * 40 + "x" * 300)
    wait_for(page, IDLE)
    page.ask("document.querySelector('details').open = true")
    assert page.ask("document.scrollingElement.scrollWidth") <= 390
    assert page.ask("innerWidth") == 390
    assert page.ask("document.querySelector('#text').getBoundingClientRect().bottom") <= 844
    contrast, where = page.least_contrast("h1, button, label, summary, .message, .hint")
    assert contrast >= 4.5, where
    names = "[...document.querySelectorAll('input, textarea')].map(each => each.labels.length)"
    assert all(page.ask(names)), "every field has a label"
    image = tmp_path / "page.png"
    page.screenshot(image)
    assert image.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_model_without_a_template_continues_a_text(browser: chromium.Browser, tmp_path: Path) -> None:
    server = Served(served.write_model(tmp_path / "bare", template=""))
    browser.problems.clear()
    browser.open(server.url + "/")
    assert "no chat template" in browser.ask("document.querySelector('#log').innerText")
    assert browser.ask("document.querySelector('#system-label').hidden")
    browser.ask(
        "document.querySelector('#tokens').value = 8; document.querySelector('#temperature').value = 0"
    )
    say(browser, "once upon")
    wait_for(browser, IDLE)
    wanted = server.client().completions.create(model="bare", prompt="once upon", max_tokens=8, temperature=0)
    assert texts(browser, "assistant") == [wanted.choices[0].text]
    status, tree, _ = server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
    assert status == 400
    assert "no chat template" in tree["error"]["message"]
    assert browser.problems == []
    server.close()
