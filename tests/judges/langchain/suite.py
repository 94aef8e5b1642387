"""LangChain's standard tests of a chat model, on ChatOpenAI pointed at the server."""

import os
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestHeadrace(ChatModelIntegrationTests):
    """What the default model's template can do is asked for; tools and images are not."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "base_url": f"{os.environ['JUDGE_URL']}/v1", "api_key": "-", "model": os.environ["JUDGE_MODEL"],
            "max_tokens": 64, "temperature": 0, "stream_usage": True,
        }

    @property
    def has_tool_calling(self) -> bool:
        return os.environ.get("JUDGE_TOOLS") == "1"

    @property
    def has_structured_output(self) -> bool:
        return os.environ.get("JUDGE_TOOLS") == "1"

    @property
    def supports_image_inputs(self) -> bool:
        return False
