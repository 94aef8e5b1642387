"""Chat templates: equal to transformers', and harmless."""

from __future__ import annotations

import time
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from headrace._common.errors import TemplateError
from headrace_router.text import template as template_module
from headrace_router.text.template import ChatTemplate
from tests.fakes.text_models import CHATML

LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}
{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}
{% set system_message = false %}{% endif %}
{% for message in loop_messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant') }}
    {% endif %}
    {% if loop.index0 == 0 and system_message is not false %}
        {% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
    {% else %}{% set content = message['content'] %}{% endif %}
    {% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}{{ ' ' + content | trim + ' ' + eos_token }}{% endif %}
{% endfor %}"""
TOOLS = """{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- set ns = namespace(count=0) %}
{%- for m in messages recursive %}
  {%- set ns.count = ns.count + 1 %}
  {%- if m.role == 'system' %}{% continue %}{% endif %}
  {%- generation %}{{ m.content | upper }}{% endgeneration %}
  {{- '%s-%d' % (m.role, ns.count * 2) }}{{ '<&>' | tojson }}{{ m | tojson }}
  {%- if ns.count > 3 %}{% break %}{% endif %}
{%- endfor %}
{%- macro show(x, n=2) %}[{{ x * n }}]{% endmacro %}{{ show('-', 3) }}{{ dict(a=1) | tojson }}{{ 2 ** 5 }}"""
STRFTIME = "{{ strftime_now('%Y') }}{% for k, v in {'b': 1, 'a': [1, 2]}.items() | sort %}{{ k }}{{ v }}{% endfor %}"

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "be <b>rief</b>"}, {"role": "user", "content": " a\n"},
     {"role": "assistant", "content": "é"}, {"role": "user", "content": "c"}],
]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("source", [CHATML, LLAMA2, TOOLS, STRFTIME])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_equal_to_transformers(source: str, chat: list[dict[str, Any]], add_generation_prompt: bool) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    rendered = render_jinja_template(
        [chat], tools=tools, chat_template=source, add_generation_prompt=add_generation_prompt, **special
    )
    expected = rendered[0][0]
    assert ChatTemplate(source, special).render(chat, add_generation_prompt, tools=tools) == expected


def test_the_words_of_a_refusing_template_are_passed_on() -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        ChatTemplate(LLAMA2, {"bos_token": "", "eos_token": ""}).render(CHATS[0] * 2)


@pytest.mark.parametrize("source", [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{% set n = namespace(_x=1) %}",
])
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(TemplateError, match="may not"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("source", [
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "{{ 'x' * 99999999999 }}",
    "{{ 99 ** 99999999 }}",
    "{{ ['x'] * 99999999999 }}",
])
def test_endless_templates_end(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "MAX_STEPS", 20_000)
    start = time.perf_counter()
    with pytest.raises(TemplateError):
        ChatTemplate(source, {}).render([])
    assert time.perf_counter() - start < 2


def test_a_template_that_does_not_compile() -> None:
    with pytest.raises(TemplateError, match="compiled"):
        ChatTemplate("{% if", {})


def test_internals_of_a_failure_do_not_show() -> None:
    with pytest.raises(TemplateError, match="TypeError") as caught:
        ChatTemplate("{{ 1 + 'secret' }}", {}).render([])
    assert "secret" not in str(caught.value)
