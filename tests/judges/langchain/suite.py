"""LangChain's standard tests of a chat model, on ChatOpenAI pointed at the server."""

import os
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestHeadrace(ChatModelIntegrationTests):
    """Everything that a model of text can do is asked for."""

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
    def model_override_value(self) -> str:
        return os.environ["JUDGE_MODEL"]

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supports_image_inputs(self) -> bool:
        return False
