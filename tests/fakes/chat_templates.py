"""Chat templates in the manner of the model families people serve. Written for tests: the structure is theirs, the words
are ours. Each says what its family's templates are known for.
"""

from __future__ import annotations

CHATML = """{# roles as headers, a default system message #}
{%- for turn in messages -%}
  {%- if loop.first and turn['role'] != 'system' -%}
    {{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
  {%- endif -%}
  {{ '<|im_start|>' + turn['role'] + '\\n' + turn['content'] + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

LLAMA3 = """{# headers, the date, the start token written by the template, tools in the first user turn #}
{{- bos_token }}
{%- if tools is not none and tools %}{% set in_user = true %}{% else %}{% set in_user = false %}{% endif %}
{%- if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set lead = messages[0]['content'] | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set lead = '' %}
    {%- set rest = messages %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + date_string + '\\n\\n' + lead + '<|eot_id|>' }}
{%- for turn in rest %}
    {%- if turn.role not in ['ipython', 'tool'] and 'tool_calls' not in turn %}
        {{- '<|start_header_id|>' + turn['role'] + '<|end_header_id|>\\n\\n' }}
        {%- if in_user and turn.role == 'user' %}
            {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
            {%- set in_user = false %}
        {%- endif %}
        {{- turn['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in turn %}
        {%- if turn.tool_calls | length != 1 %}{{- raise_exception('One call at a time, please') }}{%- endif %}
        {%- set call = turn.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if turn.content is mapping or turn.content is iterable and turn.content is not string %}
            {{- turn.content | tojson }}
        {%- else %}{{- turn.content }}{%- endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

MISTRAL = """{# alternation is checked with a namespace, tools stand before the last user turn, ids of calls have nine signs #}
{%- if messages[0]['role'] == 'system' %}{% set lead = messages[0]['content'] %}{% set turns = messages[1:] %}
{%- else %}{% set turns = messages %}{% endif %}
{%- set users = turns | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(next=0) %}
{%- for turn in turns %}
  {%- if turn.role in ('user', 'assistant') and not turn.tool_calls %}
    {%- if (turn.role == 'user') != (ns.next % 2 == 0) %}
      {{- raise_exception('After the optional system message, roles must take turns') }}
    {%- endif %}
    {%- set ns.next = ns.next + 1 %}
  {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for turn in turns %}
  {%- if turn.role == 'user' %}
    {%- if tools and turn == users[-1] %}
      {{- '[AVAILABLE_TOOLS] [' }}
      {%- for tool in tools %}
        {{- '{' }}{% for key, value in tool.function.items() if key != 'strict' %}
        {{- '"' + key + '": ' + value | tojson }}{% if not loop.last %}{{- ', ' }}{% endif %}
        {%- endfor %}{{- '}' }}{% if not loop.last %}{{- ', ' }}{% endif %}
      {%- endfor %}
      {{- '][/AVAILABLE_TOOLS]' }}
    {%- endif %}
    {{- '[INST] ' + (lead + '\\n\\n' if loop.last and lead is defined else '') + turn.content + '[/INST]' }}
  {%- elif turn.tool_calls %}
    {{- '[TOOL_CALLS] [' }}
    {%- for call in turn.tool_calls %}
      {%- if not call.id is defined or call.id | length != 9 %}{{- raise_exception('Ids have 9 signs') }}{%- endif %}
      {{- call.function | tojson | replace('}', ', "id": "' ~ call.id ~ '"}') }}
    {%- endfor %}
    {{- ']' + eos_token }}
  {%- elif turn.role == 'assistant' %}{{- ' ' + turn.content | trim + eos_token }}
  {%- elif turn.role in ['tool', 'tool_results'] %}
    {{- '[TOOL_RESULTS] {"content": ' + turn.content | string + '}[/TOOL_RESULTS]' }}
  {%- else %}{{- raise_exception('No such role: ' + turn.role) }}
  {%- endif %}
{%- endfor %}"""

QWEN3 = """{# thinking: an own added token, kept in the last round only; a look backwards; tool results share a turn #}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last_query=messages | length - 1) %}
{%- for turn in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.searching and turn.role == 'user' and turn.content is string and not (
        turn.content.startswith('<tool_response>') and turn.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}{%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for turn in messages %}
    {%- set content = turn.content if turn.content is string else '' %}
    {%- if turn.role == 'user' or (turn.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + turn.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif turn.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if turn.reasoning_content is string %}{%- set thought = turn.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}
        {%- for call in turn.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif turn.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

GEMMA = """{# parts and texts, the assistant is called model, the system message joins the first user turn #}
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set lead = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}{%- set lead = messages[0]['content'][0]['text'] + '\\n\\n' -%}{%- endif -%}
    {%- set turns = messages[1:] -%}
{%- else -%}{%- set lead = '' -%}{%- set turns = messages -%}{%- endif -%}
{%- for turn in turns -%}
    {%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Turns of user and assistant must alternate') }}
    {%- endif -%}
    {%- set who = 'model' if turn['role'] == 'assistant' else turn['role'] -%}
    {{ '<start_of_turn>' + who + '\\n' + (lead if loop.first else '') }}
    {%- if turn['content'] is string -%}{{ turn['content'] | trim }}
    {%- elif turn['content'] is iterable -%}
        {%- for part in turn['content'] -%}
            {%- if part['type'] == 'image' -%}{{ '<start_of_image>' }}
            {%- elif part['type'] == 'text' -%}{{ part['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{ raise_exception('What is this content?') }}{%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""

PHI = """{# a control token put together from a role, and what trains marked by generation #}
{% for turn in messages %}
{% if turn['role'] == 'system' and turn['content'] %}{{ '<|system|>\\n' + turn['content'] + '<|end|>\\n' }}
{%- elif turn['role'] == 'assistant' %}{{ '<|assistant|>\\n' }}{% generation %}{{ turn['content'] + '<|end|>' }}
{%- endgeneration %}{{ '\\n' }}
{%- else %}{{ '<|' + turn['role'] + '|>\\n' + turn['content'] + '<|end|>\\n' }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

FALCON = """{# plain words instead of control tokens #}
{% for turn in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}
{% if turn['role'] == 'system' %}{{ turn['content'].strip() }}
{%- elif turn['role'] == 'user' %}{{ 'User: ' + turn['content'].strip().replace('\\r\\n', '\\n').replace('\\n\\n', '\\n') }}
{%- elif turn['role'] == 'assistant' %}{{ 'Falcon: ' + turn['content'] }}{% endif %}
{% endfor %}{% if add_generation_prompt %}{{ '\\n' + 'Falcon:' }}{% endif %}"""

ZEPHYR = """{# white space around blocks counts #}
{% for turn in messages %}
{% if turn['role'] == 'user' %}
{{ '<|user|>\\n' + turn['content'] + eos_token }}
{% elif turn['role'] == 'system' %}
{{ '<|system|>\\n' + turn['content'] + eos_token }}
{% elif turn['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + turn['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

DEEPSEEK = """{# wide signs in control tokens, thoughts are cut out, flags in a namespace, the system message collected first #}
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% set ns = namespace(first=true, in_tool=false, lead='') %}
{%- for turn in messages %}{% if turn['role'] == 'system' %}
  {%- if ns.first %}{% set ns.lead = ns.lead + turn['content'] %}{% set ns.first = false %}
  {%- else %}{% set ns.lead = ns.lead + '\\n\\n' + turn['content'] %}{% endif %}
{%- endif %}{% endfor %}
{{- bos_token }}{{ ns.lead }}
{%- for turn in messages %}
  {%- if turn['role'] == 'user' %}{% set ns.in_tool = false %}{{ '<\uff5cUser\uff5c>' + turn['content'] }}
  {%- elif turn['role'] == 'assistant' and turn['tool_calls'] is defined and turn['tool_calls'] is not none %}
    {%- for call in turn['tool_calls'] %}
      {%- if loop.first %}{{ '<\uff5cAssistant\uff5c><\uff5ctool\u2581calls\u2581begin\uff5c>' }}
      {%- else %}{{ '\\n' }}{% endif %}
      {{- call['function']['name'] + '\\n```json\\n' + (call['function']['arguments'] | tojson) + '\\n```' }}
    {%- endfor %}
    {{- '<\uff5cend\u2581of\u2581sentence\uff5c>' }}
  {%- elif turn['role'] == 'assistant' %}
    {%- set content = turn['content'] %}
    {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
    {%- if ns.in_tool %}{{ '<\uff5ctool\u2581outputs\u2581end\uff5c>' }}{% set ns.in_tool = false %}{% endif %}
    {{- '<\uff5cAssistant\uff5c>' + content + '<\uff5cend\u2581of\u2581sentence\uff5c>' }}
  {%- elif turn['role'] == 'tool' %}
    {%- if not ns.in_tool %}{{ '<\uff5ctool\u2581outputs\u2581begin\uff5c>' }}{% set ns.in_tool = true %}{% endif %}
    {{- turn['content'] }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.in_tool %}{{ '<\uff5cAssistant\uff5c><think>\\n' }}{% endif %}"""

COMMAND_R = """{# macros that describe tools as code, documents, dict methods, break #}
{%- macro kind(schema) %}
  {%- set types = {'string': 'str', 'integer': 'int', 'array': 'List'} %}
  {{- types[schema.type] if schema.type in types else schema.type }}
{%- endmacro %}
{%- macro describe(tool) %}
  {{- 'def ' + tool.name + '(' }}
  {%- for name, schema in (tool.parameters.properties or {}).items() %}
    {{- ', ' if not loop.first }}{{ name }}: {% if name not in (tool.parameters.required or []) -%}
    {{ 'Optional[' + kind(schema) + '] = None' }}{%- else %}{{ kind(schema) }}{% endif %}
  {%- endfor %}
  {{- ') -> List[Dict]:\\n    \"\"\"' }}{{ tool.description | default('nothing known', true) }}{{ '\"\"\"\\n    pass' }}
{%- endmacro %}
{{- bos_token }}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>
{%- if tools %}## Tools
{% for tool in tools %}```python
{{ describe(tool.function) }}
```{{ '\\n\\n' if not loop.last }}{% endfor %}
{%- endif %}
{%- if documents %}{{ '<results>' }}
{%- for document in documents %}{{ '\\nDocument: ' ~ loop.index0 }}
{%- for key, value in document.items() %}{{ '\\n' ~ key ~ ': ' ~ value }}{%- endfor %}
{%- if loop.index > 4 %}{%- break %}{%- endif %}
{%- endfor %}{{ '</results>' }}
{%- endif %}<|END_OF_TURN_TOKEN|>
{%- for turn in messages %}
  {%- if turn.role == 'system' %}{%- continue %}{%- endif %}
  {{- '<|START_OF_TURN_TOKEN|>' }}{{ '<|USER_TOKEN|>' if turn.role == 'user' else '<|CHATBOT_TOKEN|>' }}
  {{- turn.content }}<|END_OF_TURN_TOKEN|>
{%- endfor %}
{%- if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"""

VISION = """{# takes nothing but parts #}
{% for turn in messages %}{{ turn.role | capitalize }}{{ ':' }}
{%- for part in turn.content %}{% if part.type == 'text' %}{{ ' ' + part.text }}{% endif %}{% endfor %}<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""

FAMILIES = {
    "chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "qwen3": QWEN3, "gemma": GEMMA, "phi": PHI, "falcon": FALCON,
    "zephyr": ZEPHYR, "deepseek": DEEPSEEK, "command-r": COMMAND_R, "vision": VISION,
}
SPECIALS = (
    "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "[INST]",
    "[/INST]", "[TOOL_CALLS]", "<start_of_turn>", "<end_of_turn>", "<|end|>", "<|user|>", "<|system|>", "<|assistant|>",
    "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|START_OF_TURN_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>",
)
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "\n\n")
