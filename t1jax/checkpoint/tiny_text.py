"""Text of the tiny model: what its tokenizer is trained on, and its chat template.

Knows nothing of tokenizers or models. Small enough to train on in a second: shell sessions, code,
and the shipped tasks with their solutions, because that is what an agent reads and writes.
"""

from collections.abc import Iterator

from sandbox.tasks.draw import Split
from sandbox.tasks.families import FAMILIES
from sandbox.tasks.make import drafts_of

CORPUS = r"""
You are given a task in a Linux container. Work in the terminal until the task is done, then stop.
Write a script that counts the words of every file in the directory and prints the largest count.
Fix the failing test without changing the test itself. Do not remove files that you did not create.
Read the log, find the first error and write its line number to /app/answer.txt.
The answer must be a single number on a line of its own. Check your work before you finish.
Install nothing from the network. All tools that you need are already installed in the image.
First I will look at the files that are there. Then I will run the tests to see which of them fail.
The error says that the file does not exist, so the path in the configuration must be wrong.
That worked. The last step is to verify the result and to remove the temporary directory.
I should not guess the output; I will run the command again and read what it prints.

$ ls -la
total 24
drwxr-xr-x 4 root root 4096 Jan  1 00:00 .
drwxr-xr-x 1 root root 4096 Jan  1 00:00 ..
-rw-r--r-- 1 root root  512 Jan  1 00:00 README.md
-rw-r--r-- 1 root root 1024 Jan  1 00:00 main.py
drwxr-xr-x 2 root root 4096 Jan  1 00:00 src
drwxr-xr-x 2 root root 4096 Jan  1 00:00 tests
$ cat README.md
# Example
Run `make test` to run the tests and `make build` to build the program.
$ pwd
/app
$ grep -rn "TODO" src | head -n 5
src/parser.py:12:    # TODO: handle empty input
src/parser.py:40:    # TODO: report the line number
$ find . -name "*.py" -type f | wc -l
7
$ python3 main.py --input data.csv --output result.json
Traceback (most recent call last):
  File "/app/main.py", line 14, in <module>
    main()
  File "/app/main.py", line 9, in main
    with open(path, encoding="utf-8") as stream:
FileNotFoundError: [Errno 2] No such file or directory: 'data.csv'
$ mkdir -p /tmp/work && cd /tmp/work && touch notes.txt
$ echo "hello world" > notes.txt && cat notes.txt
hello world
$ wc -l < notes.txt
1
$ sed -i 's/hello/goodbye/' notes.txt && tail -n 1 notes.txt
goodbye world
$ awk '{ total += $2 } END { print total }' sizes.txt
1048576
$ for name in a b c; do echo "$name" >> names.txt; done; sort -r names.txt | uniq -c
      1 c
      1 b
      1 a
$ git status --short
 M src/parser.py
?? notes.txt
$ git add -A && git commit -m "Handle empty input" && git log --oneline | head -n 3
$ chmod +x run.sh && ./run.sh; echo "exit status $?"
exit status 0
$ tar -czf archive.tar.gz src tests && du -h archive.tar.gz
12K     archive.tar.gz
$ ps aux | grep python3 | grep -v grep
$ kill -TERM 4242 && sleep 1
$ curl -s http://localhost:8080/health
{"status": "ok", "version": "1.2.3", "uptime": 3600}
$ pytest -q tests/test_parser.py
..F                                                                      [100%]
=================================== FAILURES ===================================
    def test_an_empty_line_is_skipped():
>       assert parse("\n") == []
E       AssertionError: assert [''] == []
1 failed, 2 passed in 0.05s
bash: command not found: pyhton3
cat: /etc/shadow: Permission denied
make: *** [Makefile:7: build] Error 2

import json
import os
import sys
from pathlib import Path


def parse(text: str) -> list[str]:
    '''Splits text into lines and skips the empty ones.'''
    lines = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        lines.append(line)
    return lines


class Counter:
    def __init__(self, names):
        self.names = dict.fromkeys(names, 0)

    def add(self, name, value=1):
        if name not in self.names:
            raise KeyError(f"unknown name {name!r}; expected one of {sorted(self.names)}")
        self.names[name] += value
        return self.names[name]


def main() -> int:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("input.txt")
    result = {"path": str(path), "lines": len(parse(path.read_text()))}
    print(json.dumps(result, indent=2))
    return 0 if result["lines"] > 0 else 1


if __name__ == "__main__":
    sys.exit(main())

#!/bin/bash
set -euo pipefail
for file in "$@"; do
    if [ -f "$file" ]; then
        count=$(wc -w < "$file")
        echo "$file: $count words"
    else
        echo "$file is not a file" >&2
        exit 1
    fi
done

#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv) {
    int total = 0;
    for (int i = 1; i < argc; i++) {
        total += atoi(argv[i]);
    }
    printf("%d\n", total);
    return 0;
}

SELECT name, COUNT(*) AS total FROM orders WHERE price > 100 GROUP BY name ORDER BY total DESC;
{"name": "run", "arguments": {"command": "ls -la /app", "timeout": 30}}
{"role": "user", "content": "Which file is the largest?"}
{"role": "assistant", "content": "The largest file is data.bin with 1048576 bytes."}

The quick brown fox jumps over the lazy dog. 0 1 2 3 4 5 6 7 8 9 10 11 12 100 256 1000 1024 4096
Größe: naïve café, “quotes” – and … symbols → ✓ 你好，世界 Привет мир こんにちは
"""

# What surrounds every turn; between tags, as the agent's own text has them.
FRAME = """\
system
user
assistant
<function=bash>
<parameter=command>
{command}
</parameter>
</function>
<function=submit>
</function>
"""
TASKS = 720  # a second's work; four of each family and level up to the third


def corpus() -> Iterator[str]:
    """The lines that a tokenizer learns from: sessions and code, and shipped tasks with solutions.

    Only tasks for training: a tokenizer that knew the test split's names would favour them.
    """
    yield from CORPUS.splitlines(keepends=True)
    for draft in drafts_of(Split.train, 0, TASKS, (1, 2, 3), tuple(FAMILIES)):
        turn = FRAME.format(command="\n".join(draft.commands))
        yield from (draft.instruction + turn).splitlines(keepends=True)


# Text only; renders what the published template renders for text. Compared with it by hand.
CHAT_TEMPLATE = r"""{%- if not messages %}
    {{- raise_exception('No messages provided.') }}
{%- endif %}
{%- set system = '' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content|trim %}
{%- endif %}
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n\nYou have access to the following functions:\n\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple lines\n</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within <tool_call></tool_call> XML tags\n- Required parameters MUST be specified\n- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT after\n- If there is no function call available, answer the question like normal with your current knowledge and do not tell the user about function calls\n</IMPORTANT>' }}
    {{- ('\n\n' + system if system else '') + '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + system + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set content = message.content|trim %}
        {%- if not (content.startswith('<tool_response>') and content.endswith('</tool_response>')) %}
            {%- set ns.last_query = loop.index0 %}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if ns.last_query < 0 %}
    {{- raise_exception('No user query found in messages.') }}
{%- endif %}
{%- for message in messages %}
    {%- set content = (message.content or '')|trim %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}
            {{- raise_exception('System message must be at the beginning.') }}
        {%- endif %}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last_query %}
            {{- '<think>\n' + reasoning|trim + '\n</think>\n\n' }}
        {%- endif %}
        {{- content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '' if loop.first and not content|trim else '\n\n' if loop.first else '\n' }}
            {{- '<tool_call>\n<function=' + tool_call.name + '>\n' }}
            {%- for name, value in (tool_call.arguments or {})|items %}
                {%- set structured = value is mapping or (value is sequence and value is not string) %}
                {{- '<parameter=' + name + '>\n' }}
                {{- value | tojson | safe if structured else value | string }}
                {{- '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- else %}
        {{- raise_exception('Unexpected message role.') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {{- '<think>\n\n</think>\n\n' if enable_thinking is defined and enable_thinking is false else '<think>\n' }}
{%- endif %}"""  # noqa: E501
