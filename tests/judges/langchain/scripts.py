"""What a model says to the questions of LangChain's suite that a small one cannot answer."""

from __future__ import annotations

import json

JOKE = json.dumps({"setup": "Why do cats purr?", "punchline": "Because it is warm 🐈"}, ensure_ascii=False)


def _call(name: str, **arguments: str) -> str:
    return f'<tool_call>\n{json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)}\n</tool_call>'


SCRIPTS = {
    "Tell me a joke about cats.": JOKE,
    "tools: Tell me a joke about cats.": _call("Joke", **json.loads(JOKE)),
    "Give me a joke about cats, include the punchline.": JOKE,
    "Give me the setup to a joke about cats, no punchline.": '{"setup": "Why do cats purr?", "punchline": null}',
    "Tell me a joke about cats. Return the result as a JSON with 'setup' and 'punchline' keys. Return nothing other than JSON.":
        JOKE,
    "What is the weather in San Francisco, CA?": _call("get_weather", location="San Francisco, CA"),
    "It's sunny.": "The sun shines on San Francisco.",
    "Create a customer named '你好啊集团' (Hello Group) - a Chinese technology company":
        _call("unicode_customer", customer_name="你好啊集团", description="A Chinese technology company"),
    "Create a customer named 'こんにちは株式会社' (Hello Corporation) - a Japanese company":
        _call("unicode_customer", customer_name="こんにちは株式会社", description="A Japanese company"),
}
