"""Chat templates: rendered as jinja2's sandbox renders them, and with an end whatever they do."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Sequence
from typing import Any, Final

import jinja2.ext
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from estream_loader import open_package
from estream_runtime.chat import MAX_LENGTH, ChatTemplate, chat_template_of
from estream_spec.constants import SectionType
from estream_spec.errors import LinkError, TrapError
from fixtures.packages import Draft, Section

TOKENS: Final[dict[str, Any]] = {"bos_token": "<s>", "eos_token": "</s>"}
USER: Final = [{"role": "user", "content": ' Hi <b>&é "q"</b>\n'}]
SYSTEM: Final = [{"role": "system", "content": "Be brief. "}, *USER]
TURNS: Final = [
    *USER,
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHo"},
    {"role": "user", "content": "2+2?"},
]
CALLS: Final = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "look_up", "arguments": {"city": "Köln", "days": [1, 2.5, None, True]}}}],
    },
    {"role": "tool", "content": "rain"},
]
TOOLS: Final = [{"type": "function", "function": {"name": "look_up", "parameters": {"a": "é<"}}}]
TEMPLATES: Final = {
    "turns": """{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] | trim }}
    {% if loop.last and not add_generation_prompt %}{{ eos_token }}{% endif %}
{% endfor %}
  {% if add_generation_prompt %}
<|assistant|>
{% endif %}
""",
    "alternating": """{%- if messages[0].role == 'system' %}{%- set first = messages[0].content %}
    {%- set rest = messages[1:] %}{%- else %}{%- set rest = messages %}{%- endif %}
{{- bos_token }}
{%- for message in rest %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('take turns') }}{%- endif %}
    {{- '[INST] ' ~ (first ~ '\\n\\n' if loop.first and first is defined else '') ~ message.content ~ ' [/INST]' }}
{%- endfor %}""",
    "thinking": """{%- set notes = namespace(last=-1, open=true) %}
{%- for message in messages[::-1] %}
    {%- if notes.open and message.role == 'user' and message.content is string %}
        {%- set notes.open = false %}{%- set notes.last = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if '</think>' in content and loop.index0 < notes.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n').replace('o', '0') %}
    {%- endif %}
    {{- '<' ~ message.role ~ '>' ~ content ~ '\\n' }}
    {%- for call in message.tool_calls or [] %}
        {{- '{"name": "%s", "arguments": ' % call.function.name ~ (call.function.arguments | tojson(indent=2)) ~ '}' }}
    {%- endfor %}
{%- endfor %}
{%- if tools %}{{ tools | map('tojson') | join('\\n') }}{% endif %}
{%- if add_generation_prompt and not (enable_thinking is defined and enable_thinking is false) %}<think>{% endif %}""",
    "macros": """   {% macro show(value, depth=0) -%}
   {% if value is mapping %}{% for key, each in value | dictsort %}{{ '  ' * depth }}{{ key }}:
{{ show(each, depth + 1) }}{% endfor %}
   {% elif value is iterable and value is not string %}{% for each in value %}- {{ show(each, depth + 1) }}{% endfor %}
   {% else %}{{ value | string | upper }} {{ caller() if caller else '' }}
   {% endif %}
   {%- endmacro %}
{% for message in messages if message.role != 'tool' %}
  {{ show(message) }}{{ loop.cycle('a', 'b') }}{{ loop.revindex }}{{ loop.length }}{{ loop.changed(message.role) }}
  {% if loop.index == 2 %}{% break %}{% endif %}
{% else %}none{% endfor %}
{% set text %}{{ messages | map(attribute='role') | list }}
 {{ messages | map('first') | join }}{% endset %}
{{ text | indent(4) }} {{ '%s|%5d' | format('a', 3) }} {{ '{:>5}{x}'.format('z', x=1) }} {{ [3, 1] | sort | sum }}
{{ messages | selectattr('role', 'in', ['user']) | list | tojson }}
{{ dict(a=1).items() | list }} {{ 2 ** 8 }} {{ -3 % 5 }}
{{ missing }}{{ none }}{{ messages[0] | tojson(sort_keys=true, ensure_ascii=true, separators=(',', ':')) }}
{{ 'x' in 'xy' }}{% call show(1) %}called{% endcall %}{% filter upper %}{{ bos_token }}{% endfilter %}
{{ ''.join(['a', 'b']) * 3 }}{{ (1, 2) }}
{% for a in [1, [2, 3]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}
{{ range(3) | list }}{{ 7 // 2 }}""",
}
"""What published templates do, in few lines."""
HOSTILE: Final = (
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "{% set r = range(100000) %}{% for a in r %}{% for b in r if false %}{% endfor %}{% endfor %}",
    "{% for a in range(10 ** 9) %}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for a in [0] recursive %}{{ loop([0]) }}{% endfor %}",
    "{{ 'a' * 1000000000 }}",
    "{{ [0] * 1000000000 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x=(1,)) %}{% for i in range(99) %}{% set n.x = (n.x, n.x) %}{% endfor %}{{ {n.x: 1} }}",
    "{% set n = namespace(x={}) %}{% for i in range(99) %}{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}{{ n.x | e }}",
    "{% set n = namespace() %}{% set n.x = n %}{{ n }}",
    "{% set n = namespace(__class__=1) %}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ 'a'.center(1000000000) }}",
    "{{ 'a' | center(1000000000) }}",
    "{{ 'a\n' | indent(1000000000) }}",
    "{{ [1] | tojson(indent=1000000000) }}",
    "{{ 1.5 | round(1000000000, 'ceil') }}",
    "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "{{ ('b' * 100000).join('a' * 100000) }}",
    "{{ ('a' * 100000) | join('b' * 100000) }}",
    "{{ (('b' * 100000,) * 100000) | join }}",
    "{{ [[1]] | sum(start=[]) }}",
    "{{ (range(100000) | list) | sort | unique | list }}",
    "{{ range(100000) | groupby('real') | list }}",
    "{% set l = range(100000) | list %}{% for i in l %}{% if -1 in l %}{% endif %}{{ l | select | first }}{% endfor %}",
    "{% set l = range(100000) | list %}{% for i in l %}{{ l.count(-1) }}{% endfor %}",
    "{% set l = 'a' * 1000000 %}{% for i in range(100000) %}{{ l.count('b') }}{{ l[:-1] == l }}{% endfor %}",
    "{% for i in range(100000) %}" + "A" * 100000 + "{% endfor %}",
    "{% for i in range(100000) %}{% set x %}" + "A" * 100000 + "{% endset %}{% endfor %}",
    "{{ strftime_now('%1000000000d') }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% for a in [1] %}" * 40 + "{% endfor %}" * 40,
    "{% set x = [-1000000000] | map('-spend') | list %}{% for a in range(90000) %}{% for b in range(60) %}"
    "{% set y = 1 %}{% endfor %}{% endfor %}",
    "{{ 5 | round(-3000000) }}",
    "{{ ('a' * 200000).rfind('ab' + 'a' * 100000) }}",
    "{{ ('a' * 200000).rsplit(sep='ab' + 'a' * 100000) }}",
    "{% set l = 'a' * 7000 + 'b' + 'a' * 7000 %}{% set s = 'a' * 29000 %}{% for i in range(999) %}"
    "{% if l in s %}{% endif %}{% endfor %}",
    "{{ ['a' * 200000] | select('in', ('b' + 'a' * 100000) * 3) | list }}",
    "{{ 1 in [1] in [[1]] }}",
    "{{ ('a' * 200000).strip('b' * 100000 + 'a') }}",
    "{{ ('a' * 200000) | trim('b' * 100000 + 'a') }}",
    "{% set s = 'a' * 1500000 %}{% for i in range(1000) %}{% if s is lower %}{% endif %}{% endfor %}",
    "{{ '%1000000000d' is odd }}",
    "{{ '%1000000000d' is divisibleby(7) }}",
    "{{ (range(100000) | list) | map(attribute='a.' * 10000, default='') | list }}",
    "{% set s = 'A' * 1000000 %}{{ range(900) | list | tojson(separators=(s, s)) }}",
    "{{ ('a' * 1000) | replace(old='a', new='B' * 1000000) }}",
    "{{ ('1' * 1000) | replace(1, 'B' * 1000000) }}",
    "{{ ('&' * 1000 | safe).replace('&', [1] * 100000) }}",
    "{{ range(90000) | join([10 ** 1200] * 9000) }}",
    "{{ [10 ** 1200] * 200000 }}",
    "{{ ('\n' * 3000000) | indent(100, blank=true) }}",
    "{{ 1 }}" * 9000,
    "{{ a < b }}" * 6000,
    "{% set x = 'a' * 1000000 %}{{ x" + " ~ x" * 4000 + " }}",
    "{% set t = (1,) * 100000 %}{% set d = {} %}{% for i in range(90000) %}{% if d[t] %}{% endif %}{% endfor %}",
    "{{ [{}] * 100000 | map(attribute=(1,) * 100000) | list }}",
    "{{ ([{}] * 9000) | sort(false, false, (1,) * 100000) }}",
    "{% macro m() %}{{ varargs[0] }}{% endmacro %}{% set l = [1] * 100000 %}{% for i in range(90000) %}"
    "{{ m(*l) }}{% endfor %}",
    "{% for a in range(90000) %}{% for b in range(9) %}" + "{% set y = a.b %}" * 2000 + "{% endfor %}{% endfor %}",
    "{% macro m() %}" + "{% set y = a.b %}" * 1000 + "{% endmacro %}{% for b in range(90000) %}{{ m() }}{% endfor %}",
    "{{ strftime_now('%p' * 1000000) }}",
    "{{ lipsum(n=100000) }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ dict.fromkeys(range(9)) }}",
    "{% include 'passwords' %}",
    "a" * (MAX_LENGTH + 1),
)


def plain(text: str, messages: Sequence[Any], **variables: Any) -> str:
    """What jinja2's own sandbox renders, set up as transformers does."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )

    def to_json(value: object, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = lambda message: 1 / 0
    return environment.from_string(text).render(messages=messages, documents=None, **variables)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", [USER, SYSTEM, TURNS, CALLS], ids=["user", "system", "turns", "calls"])
def test_it_renders_what_jinja_renders(name: str, messages: list[dict[str, Any]]) -> None:
    for tools in (None, TOOLS):
        for options in ({}, {"enable_thinking": False}):
            given: dict[str, Any] = {"add_generation_prompt": tools is None, "tools": tools, **options, **TOKENS}
            template = ChatTemplate(TEMPLATES[name])
            try:
                expected = plain(TEMPLATES[name], messages, **given)
            except ZeroDivisionError:
                with pytest.raises(TrapError, match="does not take the conversation: take turns"):
                    template.render(messages, **given)
            else:
                assert template.render(messages, **given) == expected


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_template_ends_in_one_error(text: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((TrapError, LinkError)) as caught:
        ChatTemplate(text).render(USER)
    assert caught.value.message.startswith("the chat template")
    # Far above what is measured, some MiB, and far below what these would take without a limit.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 19


def test_a_long_conversation_is_no_hostile_one() -> None:
    messages = [{"role": role, "content": "x" * 1000} for role in ("user", "assistant")] * 500
    text = ChatTemplate(TEMPLATES["thinking"]).render(messages)
    assert text.count("x" * 1000) == 1000


def test_each_rendering_has_its_own_steps() -> None:
    template = ChatTemplate("{% for a in range(n) %}{% endfor %}{{ n }}")
    for _ in range(7):
        assert template.render(USER, n=90_000) == "90000"
    with pytest.raises(TrapError, match="more than 500,000 steps"):
        ChatTemplate("{% for a in range(99999) %}{{ a }}{{ a }}{{ a }}{% endfor %}").render(USER)


def test_tokens_and_variables_are_there_for_the_template() -> None:
    template = ChatTemplate("{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ mood }}{{ tools is none }}")
    assert template.render(USER, mood="fair", **TOKENS) == "<s></s>fairTrue"


def test_the_time_is_that_here() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(USER) in {str(time.localtime().tm_year + n) for n in (0, -1)}


def test_what_a_model_wrote_may_be_marked() -> None:
    template = ChatTemplate(
        "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{{ messages[0].role }}{% endgeneration %}{{ a }}"
    )
    assert template.render(USER) == "2user1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% if %}", "the chat template cannot be used: Expected an expression, got 'end of statement block' (line 1)"),
        ("\n{{ a | nope }}", "the chat template cannot be used: No filter named 'nope' (line 2)"),
        (
            "{% set bos_token = '<s>' %}{% set eos_token = '' %}\n{{ 1 }}\n{{ a | nope }}",
            "the chat template cannot be used: No filter named 'nope' (line 2)",
        ),
        ("{{ a.b.c }}", "the chat template cannot be rendered: 'a' is undefined"),
        ("{{ 1 / 0 }}", "the chat template cannot be rendered: ZeroDivisionError: division by zero"),
        ("{{ raise_exception('no system') }}", "the chat template does not take the conversation: no system"),
        (
            "{{ [1].pop() }}",
            "the chat template cannot be rendered: access to attribute 'pop' of 'list' object is unsafe",
        ),
        ("{{ raise_exception('no' * 100000) }}", "the chat template does not take the conversation: nono"),
        ("{{ 'a'.zfill(9) }}", "the chat template calls str.zfill, which it may not"),
        (
            "{{ {1: x} | tojson }}",
            "the chat template cannot be rendered: TypeError: Object of type Undefined is not JSON",
        ),
    ],
)
def test_what_is_wrong_is_said(text: str, message: str) -> None:
    with pytest.raises((TrapError, LinkError)) as caught:
        ChatTemplate(text).render(USER)
    assert caught.value.message.startswith(message)
    assert len(caught.value.message) < 1100


def test_the_template_of_a_package() -> None:
    draft = Draft()
    with open_package(draft.seal()) as package, pytest.raises(LinkError, match="the package has no chat template"):
        chat_template_of(package)
    draft.sections.insert(-1, Section(SectionType.CHAT_TEMPLATE, "{{ messages[0].content }}é".encode()))
    with open_package(draft.seal()) as package:
        assert chat_template_of(package).render(USER) == f"{USER[0]['content']}é"
