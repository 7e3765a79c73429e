"""Hostile chat templates end with an error in time; the next conversation is rendered."""

from __future__ import annotations

import time

import pytest

from ridgeline.engine.tokenization.chat import Chat, JinjaTemplate
from ridgeline.engine.tokenization.template_process import ProcessTemplate, RenderLimits
from ridgeline.errors import BadInput, BadModel

GOOD = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ bos }}"
LIMITS = RenderLimits(timeout_s=1.0, max_memory_bytes=512 << 20, max_output_chars=1 << 20)

BOMBS = {
    "endless loop": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "power": "{% set a=9 %}{% set b=9**9 %}{% if a**b %}x{% endif %}",
    "repeated text": "{{ 'a'*5000000000 }}",
    "doubled text": (
        "{% set n = namespace(t='aaaaaaaaaa') %}{% for i in range(60) %}"
        "{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}"
    ),
    "repeated list": "{% set x = [0]*900000000 %}{{ x|length }}",
    "padding": "{{ 'x'.center(5000000000) }}",
    "long output": "{{ 'a'*2000000 }}",
    "assertion": "{{ 'x'|truncate(-1) }}",
}


def chat(text: str = "") -> Chat:
    return Chat([{"role": "user", "content": text}])


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=list(BOMBS))
def test_bomb_ends_with_an_error_in_time(bomb: str) -> None:
    source = "{% if messages[0].content == 'bomb' %}" + bomb + "{% else %}" + GOOD + "{% endif %}"
    template = ProcessTemplate({"default": source}, {"bos": "<s>"}, LIMITS)
    began_s = time.monotonic()
    with pytest.raises((BadInput, BadModel)):
        template.render(chat("bomb"))
    assert time.monotonic() - began_s < 30
    assert template.render(chat("hello")) == "<user>hello<s>"


def test_process_renders_what_this_process_renders() -> None:
    sources, names = {"default": GOOD}, {"bos": "<s>"}
    conversation = Chat(
        [{"role": "user", "content": "héllo \U0001f600 \ud800"}], variables={"x": [1, None]}
    )
    expected = JinjaTemplate(sources, names).render(conversation)
    assert ProcessTemplate(sources, names).render(conversation) == expected


def test_a_process_that_died_unused_refuses_no_conversation() -> None:
    template = ProcessTemplate({"default": GOOD}, {"bos": "<s>"})
    template.render(chat("a"))
    assert template._process is not None
    template._process.kill()
    template._process.wait()
    assert template.render(chat("hello")) == "<user>hello<s>"


def test_process_reports_the_errors_of_the_template() -> None:
    refusing = ProcessTemplate({"default": "{{ raise_exception('roles must alternate') }}"}, {})
    with pytest.raises(BadInput, match="roles must alternate"):
        refusing.render(chat())
    for source in ("{% if %}", "{% break %}"):
        with pytest.raises(BadModel, match="not valid Jinja"):
            ProcessTemplate({"default": source}, {}).render(chat())
    with pytest.raises(BadInput, match="not JSON"):
        refusing.render(Chat([{"role": "user", "content": object()}]))
