"""Chat templates: equal to transformers', and harmless."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from headrace._common.errors import TemplateError
from headrace_router.text import template_limits
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
    "{% for i in range(9999) if range(9999) | map('string') | map('upper') | join == 'x' %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x=['ab']) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=99) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "{{ '%99999999999d' % 1 }}", "{{ '{:99999999999}'.format(1) }}", "{{ '%*d' % (99999999, 1) }}",
    "{{ 'x'.center(99999999999) }}", "{{ 'x' | center(9999999999) }}", "{{ '{:{}}'.format(1, 99999999) }}",
    "{{ [1] | tojson(indent=99999999999) }}", "{{ 'x\n' | indent(9999999999) }}", "{{ [1] | batch(9999999999, 1) | list }}",
    "{{ ('x' * 999999).replace('x', 'x' * 999999) }}", "{{ ('x' * 999999) | replace('x', 'x' * 999999) }}",
    "{{ 'x'.join(['y' * 999999] * 999999) }}", "{{ (['y' * 9999999] * 99) | join }}",
    "{% set b = 'y' * 9999999 %}{% set x %}{% for i in range(999) %}{{ b }}{% endfor %}{% endset %}", "{{ lipsum(n=99999) }}",
    "{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}",
    "{{ ['x' * 999999] * 999999 }}", "{{ ['x' * 999999] * 999999 ~ '' }}", "{{ (['x' * 999999] * 999999) | string }}",
    "{{ ('{0[0]}' * 99999).format(['x' * 999999]) }}", "{{ ('%s' * 999) % (('x' * 999999,) * 999) }}",
    "{{ ('%(a)s' * 99999) % {'a': 'x' * 999999} }}", "{{ ('{a}' * 99999).format_map({'a': 'x' * 999999}) }}",
])
def test_endless_templates_end(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_STEPS", 20_000)
    with pytest.raises(TemplateError):
        ChatTemplate(source, {}).render([])


def test_long_messages_are_no_reason_to_stop() -> None:
    source = (
        "{% for m in messages %}{{ '%s: %s' % (m.role, m.content) }}{{ '{}: {}'.format(m.role, m.content) }}"
        "{{ '%s' | format(m.content) }}{{ m.role + ': ' + m.content | trim }}{{ m.content ~ ' ' ~ loop.index }}"
        "{{ m | tojson(indent=4) }}{{ [m.role, m.content] | join(': ') }}{{ m.content.split('x')[0] }}"
        "{{ m.content.replace('x', 'yy') }}{{ 1700000000 | string }}{{ '{}'.format(1700000000) }}"
        "{% set ns = namespace(n=1700000000) %}{{ ns.n }}{% endfor %}"
    )
    chat = [{"role": "user", "content": "x" * 500_000}, {"role": "assistant", "content": "word " * 50_000}]
    expected = render_jinja_template([chat], chat_template=source)[0][0]
    assert ChatTemplate(source, {}).render(chat) == expected


def test_variables_have_any_names() -> None:
    source = "{{ self_ }}{{ messages | length }}{{ add_generation_prompt }}{{ context }}{{ tools }}"
    more = {"self": 1, "messages": 2, "add_generation_prompt": 3, "context": 4, "self_": 5, "tools": 6, "a-b": 7, "": 8}
    assert ChatTemplate(source, {}).render([], True, **more) == "50True46"


def test_a_template_that_does_not_compile() -> None:
    with pytest.raises(TemplateError, match="compiled"):
        ChatTemplate("{% if", {})


def test_half_a_character_is_no_text() -> None:
    with pytest.raises(TemplateError, match="UnicodeEncodeError"):
        ChatTemplate("{{ '\\ud83d' }}", {}).render([])


def test_internals_of_a_failure_do_not_show() -> None:
    with pytest.raises(TemplateError, match="TypeError") as caught:
        ChatTemplate("{{ 1 + 'secret' }}", {}).render([])
    assert "secret" not in str(caught.value)
