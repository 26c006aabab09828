# ruff: noqa: E501 - templates are quoted as they are written
"""Chat templates: the same text as Transformers, and nothing a hostile one can do."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from specexport.runtime.chat import ChatTemplate, Limits
from specexport.runtime.errors import BundleError, SpecExportError, UsageError

CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou are helpful<|im_end|>\\n' }}
{%- endif %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA = """{{- bos_token }}
{%- if tools is defined and tools is not none %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one call only") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {%- for arg_name, arg_val in call.arguments | items %}
            {{- arg_name + '="' + arg_val + '"' }}{%- if not loop.last %}{{- ", " }}{%- endif %}
        {%- endfor %}
    {%- else %}
        {%- if message.content is mapping or (message.content is iterable and message.content is not string) %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
    {%- endif %}
{%- endfor %}"""

GEMMA = """{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}{%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set first_user_prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- endif -%}{{ '<end_of_turn>\\n' }}
{%- endfor -%}{%- if add_generation_prompt -%}{{'<start_of_turn>model\\n'}}{%- endif -%}"""

QWEN = """{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" and '</think>' in content %}
        {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {{- message.role ~ ': (' ~ reasoning ~ ') ' ~ content.split('</think>')[-1].lstrip('\\n') ~ ns.last_query_index }}
    {%- else %}{{- '<|im_start|>' ~ message.role ~ '\\n' ~ content.replace('a', '<b>') }}{%- endif %}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"""

ODDS = """{%- macro shout(x, times=2) -%}{% for i in range(times) %}{{ x | upper }}{{ i }} {% endfor %}{%- endmacro -%}
    {{ shout('hi') }}{{ none }}{{ undefined_thing }}{{ 1.5 }}{{ [1, 'a', (2,), {'k': none}] }}
{% generation %}
  written {{ messages | map(attribute='role') | join('/') }}
{% endgeneration %}
{% for message in messages if message.role != 'system' %}{% if loop.index > 2 %}{% break %}{% endif %}{{ loop.index }}{{ loop.previtem.role if loop.previtem }}{% else %}none{% endfor %}
{% set text %}block {{ 2 ** 3 }}{% endset %}{{ text ~ 3 * 'x' }}{{ 'a,b' | replace(',', ';') | indent(2, true) }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=true) }}
{% filter lower %}ABC{% endfilter %}{% macro box(t) %}[{{ t }}{{ caller() }}]{% endmacro %}{% call box('q') %}in {{ 1 }}{% endcall %}{% set a, b = 1, [2, 3] %}{{ a }}{{ b[1] }}{{ '-'.join(['x', 'y']) }}
{% for key, value in {'x': 1, 'y': 2} | dictsort(reverse=true) %}{{ key }}={{ value }}{% if not loop.last %}, {% endif %}{% endfor %}
{% for n in [[1, [2]], [3]] recursive %}{% if n is iterable %}({{ loop(n) }}){% else %}{{ n }}{% endif %}{% endfor %}
{{ messages[0].content[:2] }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 'x' in ['x', 'y'] }}{{ 'tail' | default('d') }}
"""

CHAT = [
    {"role": "user", "content": " Is <b> & 'c' \"banana\"? é👍 "},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes {{ 7 * 7 }} {% if %}"},
    {"role": "user", "content": "Why?\n"},
]
SYSTEM = [{"role": "system", "content": "Be brief."}, *CHAT]
PARTS = [{"role": "user", "content": [{"type": "text", "text": " one "}, {"type": "text", "text": "two"}]}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"type": "object"}}}]
TOOL_CHAT = [
    *CHAT,
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "1", "b": "2"}}}]},
    {"role": "tool", "content": {"x": ["<y>"]}},
]


@pytest.fixture(scope="module")
def peer() -> Any:
    import transformers

    backend = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize(
    ("source", "messages", "options"),
    [
        (CHATML, CHAT, {}),
        (CHATML, SYSTEM, {"add_generation_prompt": False}),
        (LLAMA, SYSTEM, {"date_string": "26 Jul 2024"}),
        (LLAMA, TOOL_CHAT, {"tools": TOOLS, "date_string": "today"}),
        (GEMMA, CHAT, {}),
        (GEMMA, SYSTEM, {}),
        (GEMMA, PARTS, {}),
        (QWEN, CHAT, {"enable_thinking": False}),
        (QWEN, SYSTEM, {"enable_thinking": True}),
        (ODDS, SYSTEM, {}),
        (ODDS, [SYSTEM[0]], {}),
    ],
)
def test_agrees_with_transformers(
    peer: Any, source: str, messages: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    given = {"add_generation_prompt": True, **options}
    theirs = peer.apply_chat_template(messages, chat_template=source, tokenize=False, **given)
    ours = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **given)
    assert ours == theirs
    assert len(ours) > 20


def test_the_clock_is_injected() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d %H') }}", clock=lambda: datetime(2024, 7, 26, 5))
    assert template.render([]) == "2024-07-26 05"


def test_refusal_of_the_template_is_the_callers_error() -> None:
    with pytest.raises(UsageError, match="refuses the messages: Conversation roles must alternate"):
        ChatTemplate(GEMMA, {"bos_token": ""}).render([CHAT[0], CHAT[0]])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}",
        "{{ ''['__class__']['__base__'] }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['time'] }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ self.__init__.__globals__ }}",
        "{{ self._TemplateReference__context.environment.call }}",
        "{% set f = ''.format %}{{ f }}{{ '{0.__class__}'.format(1) }}",
        "{{ '{a.__class__}'.format_map({'a': 1}) }}",
        "{{ messages.append(1) }}",
        "{% include 'x' %}",
        "{% import 'x' as y %}",
    ],
)
def test_nothing_escapes_the_sandbox(source: str) -> None:
    with pytest.raises(SpecExportError) as error:
        result = ChatTemplate(source).render([{"role": "user", "content": "x"}])
        assert "class" not in result and "Template" not in result and not result.strip(), result
        raise SpecExportError("rendered to nothing")  # an undefined value is as good as a refusal
    assert "\n" not in str(error.value)


BOMBS = {
    "range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "macro recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "macro tree": "{% macro m(n) %}{% if n %}{% set a = m(n-1) %}{% set b = m(n-1) %}{% endif %}{% endmacro %}{{ m(60) }}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "doubling ~": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling +": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling block": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
    "doubling macro": "{% macro d(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = d(n.x) %}{% endfor %}",
    "doubling list": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "doubling dict": "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}{{ n.x|tojson }}",
    "doubling namespace": "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = [namespace(a=n.x), n.x, n.x] %}{% endfor %}",
    "times": "{{ 'a' * 10**9 }}",
    "times list": "{{ ([0] * 10**9)|length }}",
    "times nested": "{% set x = [['a' * 1000] * 1000] * 1000 %}{{ x }}",
    "power": "{{ 2 ** (10**9) }}",
    "squaring": "{% set n = namespace(x=99) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "replace": "{% set x = 'a' * 1000000 %}{{ x.replace('a', x) }}",
    "replace filter": "{% set x = 'a' * 1000000 %}{{ x|replace('a', x) }}",
    "replace by name": "{% set x = 'a' * 1000000 %}{{ x|replace(old='a', new=x) }}",
    "join": "{% set x = 'a' * 1000000 %}{{ x.join(x) }}",
    "join filter": "{% set x = 'a' * 1000000 %}{{ x|join(x) }}",
    "join list": "{% set x = 'a' * 1000000 %}{{ x.join(range(100000)|list) }}",
    "indent": "{{ 'a\\nb'|indent(10**9) }}",
    "tojson indent": "{{ [1]|tojson(indent=10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "center": "{{ 'a'|center(10**9) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "output": "{% for i in range(90000) %}" + "x" * 200 + "{% endfor %}",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_are_defused(bomb: str) -> None:
    limits = Limits(max_steps=200_000)
    with pytest.raises(BundleError) as error:
        ChatTemplate(BOMBS[bomb], limits=limits).render([{"role": "user", "content": "x"}])
    assert "\n" not in str(error.value)
    assert "seconds" not in str(error.value)  # the clock is the last resort: every bomb here is counted


def test_memory_stays_small_under_attack() -> None:
    import tracemalloc

    tracemalloc.start()
    for bomb in (
        "times",
        "times nested",
        "doubling ~",
        "doubling list",
        "replace",
        "join",
        "join filter",
        "indent",
        "ljust",
    ):
        with pytest.raises(BundleError):
            ChatTemplate(BOMBS[bomb], limits=Limits(max_steps=200_000)).render([])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 300_000_000


def test_the_clock_stops_what_the_counts_do_not() -> None:
    source = "{% for i in range(90000) %}{% endfor %}"
    with pytest.raises(BundleError, match=r"0\.0 seconds"):
        ChatTemplate(source, limits=Limits(max_seconds=0.0)).render([])
    assert ChatTemplate(source).render([]) == ""


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if %}", "line 1"),
        ("a\n{% for x in y %}", "line 2"),
        ("{{ x | nofilter }}", "nofilter"),
        ("x" * 300_000, "300000"),
    ],
)
def test_bad_templates_are_refused_when_loaded(source: str, words: str) -> None:
    with pytest.raises(BundleError) as error:
        ChatTemplate(source)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_keys_give_one_line() -> None:
    with pytest.raises(SpecExportError, match="keys of the messages") as error:
        ChatTemplate("{{ messages[0]['nope']['deeper'] }}").render([{"role": "user"}])
    assert "\n" not in str(error.value)


def test_long_conversations_fit_the_default_limits() -> None:
    chat = [{"role": "user" if i % 2 == 0 else "assistant", "content": "word " * 100} for i in range(1000)]
    for source in (CHATML, GEMMA, QWEN):
        assert len(ChatTemplate(source, {"bos_token": "<s>"}).render(chat)) > 400_000
