"""The settings of the router process."""

from __future__ import annotations

from dataclasses import dataclass

from headrace._common.logs import LEVELS
from headrace._common.options import option
from headrace_router.tenants import CLASSES
from headrace_router.text.normalize import MODES
from headrace_router.text.reasoning import PARSERS as REASONING_PARSERS
from headrace_router.text.tools.formats import PARSERS as TOOL_PARSERS

STORES = ("redis://", "rediss://", "unix://")  # how the address of a broker's server begins


@dataclass(frozen=True)
class RouterSettings:
    """What the router is started with."""

    model_folder: str = option("", "folder with config and tokenizer, as the launcher resolves it", env=None)
    model_id: str = option("", "name under which the model is served")
    model_sha: str | None = option(None, "commit of the model's revision, shown in /info", env=None)
    shard_target: str = option(
        "", "gRPC address of the leading shard: unix:PATH or HOST:PORT", env="HEADRACE_SHARD_TARGET",
    )
    hostname: str = option("127.0.0.1", "address to listen on", env="HEADRACE_HOSTNAME")
    port: int = option(3000, "HTTP port", flags=("-p",), minimum=0)
    api_key: str | None = option(None, "clients must send it as `Authorization: Bearer KEY`")
    api_keys_file: str | None = option(
        None, "TOML file with API keys of several tenants and their limits; read again when it changes",
        env="HEADRACE_API_KEYS_FILE",
    )
    cors_allow_origin: tuple[str, ...] = option(
        (), "origin whose pages may call the API, as https://example.org; all if none is given"
    )
    client_timeout: float = option(
        30.0, "seconds that a client may take to send a request's head, or to go on reading or writing",
        env="HEADRACE_CLIENT_TIMEOUT", minimum=0.1,
    )
    workload: str = option(
        "chat", "what to tune for, and the class of requests that name none", env="HEADRACE_WORKLOAD", choices=CLASSES
    )
    max_queue_size: int | None = option(
        None, "requests that may wait for a place in the batch, more are refused with 503; the workload's if not given",
        env="HEADRACE_MAX_QUEUE_SIZE", minimum=1,
    )
    max_queue_tokens: int | None = option(
        None, "tokens that waiting requests may take together, prompt and output; the workload's if not given",
        env="HEADRACE_MAX_QUEUE_TOKENS", minimum=1,
    )
    itl_target_ms: int | None = option(
        None, "milliseconds that steps should take while streams run, 0: any; the workload's if not given",
        env="HEADRACE_ITL_TARGET_MS", minimum=0,
    )
    max_concurrent_requests: int = option(128, "requests in the service at once; more are refused with 429", minimum=1)
    max_best_of: int = option(2, "largest `best_of`", minimum=1)
    max_stop_sequences: int = option(4, "most stop strings of a request", minimum=0)
    max_top_n_tokens: int = option(5, "largest `top_n_tokens`", minimum=0)
    max_input_tokens: int | None = option(
        None, "longest prompt, in tokens; one less than --max-total-tokens if not given", minimum=1,
    )
    max_total_tokens: int | None = option(
        None, "longest prompt plus output, in tokens; the model's own if not given", minimum=2,
    )
    max_step_tokens: int | None = option(
        None, "token budget of one step; the workload's if not given, and never more than the shard's",
        env="HEADRACE_MAX_STEP_TOKENS", minimum=1,
    )
    max_batch_size: int | None = option(
        None, "requests that run at once; the shard's own limit if not given", minimum=1,
    )
    max_client_batch_size: int = option(4, "most prompts in one /v1/completions call", minimum=1)
    payload_limit: int = option(2_000_000, "largest request body, in bytes", minimum=1)
    validation_workers: int = option(2, "tokenizer threads", minimum=1)
    normalize: str = option(
        "none", "what is done to text before it is tokenized; nfc: Unicode NFC, LF line breaks, no outer white space",
        env="HEADRACE_NORMALIZE", choices=MODES,
    )
    tokenizer_config_path: str | None = option(
        None, "file with the chat template to use: tokenizer_config.json or .jinja",
    )
    tool_call_parser: str = option(
        "auto", "format in which the model writes tool calls; auto: that of its chat template",
        env="HEADRACE_TOOL_CALL_PARSER", choices=TOOL_PARSERS,
    )
    reasoning_parser: str = option(
        "auto", "tags around what the model thinks before it answers; auto: those of its chat template; none: all is answer",
        env="HEADRACE_REASONING_PARSER", choices=REASONING_PARSERS,
    )
    disable_grammar_support: bool = option(False, "refuse what needs a grammar: forms of the output, calls that must be made")
    graceful_termination_timeout: float = option(
        90.0, "seconds that running requests get to finish at SIGTERM", flags=("-g",), minimum=0,
    )
    shard_restarts: bool = option(
        False, "the shard comes back when it dies: its requests wait and resume, instead of failing", env=None
    )
    role: str = option(
        "all", "all: run requests on shards of this machine; gateway: on workers that dial in, without shards",
        env="HEADRACE_ROLE", choices=("all", "gateway"),
    )
    gateway: str | None = option(
        None, "URL of the gateway to work for, as wss://example.org", env="HEADRACE_GATEWAY",
    )
    worker_token_file: str | None = option(
        None, "file with the token that workers show; a gateway writes the first one there",
        env="HEADRACE_WORKER_TOKEN_FILE",
    )
    allow_open_workers: bool = option(
        False, "let strangers register as workers; they get only requests whose callers allow it",
        env="HEADRACE_ALLOW_OPEN_WORKERS",
    )
    slots: int | None = option(
        None, "requests that a worker takes at once; --max-batch-size if not given", env="HEADRACE_SLOTS", minimum=1
    )
    pause_above_load: float | None = option(None, "as `headrace worker` has it", env=None, minimum=0)
    worker_socket: str = option("", "control socket of a worker, as the launcher makes it", env=None)
    insecure: bool = option(False, "as `headrace worker` has it", env=None)
    broker: str = option(
        "memory://", "where a gateway keeps its requests: memory://; embedded: a Valkey server of its own, on disk; redis://, "
        "rediss:// or unix:// of a Redis or Valkey server, which several gateways may share", env="HEADRACE_BROKER",
    )
    max_queue_time: float = option(
        60.0, "seconds that a gateway's request may wait for a worker", env="HEADRACE_MAX_QUEUE_TIME", minimum=0.1
    )
    max_run_time: float = option(
        600.0, "seconds from a gateway's first worker for a request to its end", env="HEADRACE_MAX_RUN_TIME", minimum=1
    )
    stall_timeout: float = option(
        10.0, "seconds between two tokens after which another worker goes on", env="HEADRACE_STALL_TIMEOUT", minimum=0.1
    )
    no_worker_wait: float = option(
        10.0, "seconds without a worker that could serve it, after which a gateway refuses a request",
        env="HEADRACE_NO_WORKER_WAIT", minimum=0,
    )
    disconnect_grace: float = option(
        10.0, "seconds that a gateway's stream goes on without its client, who may come back for it; 0: it ends at once",
        env="HEADRACE_DISCONNECT_GRACE", minimum=0,
    )
    log_level: str = option("info", "least level that is logged", choices=LEVELS)
    json_output: bool = option(False, "log JSON lines")


@dataclass(frozen=True)
class LendingSettings:
    """What `headrace worker` has beside the flags of `headrace serve`."""

    insecure: bool = option(False, "use ws:// beyond this machine: the token can be read on the way", env=None)
    pause_above_load: float | None = option(
        None, "load of the machine, as uptime shows for the last minute, above which no new requests are taken",
        env="HEADRACE_PAUSE_ABOVE_LOAD", minimum=0,
    )
    upstream: str | None = option(
        None, "URL of a running server to lend, as http://127.0.0.1:8080: Headrace, TGI, vLLM, llama.cpp; no model is loaded",
        env="HEADRACE_UPSTREAM",
    )
    upstream_api: str = option(
        "auto", "API of the upstream; auto: TGI's where it has one, else OpenAI's completions", env="HEADRACE_UPSTREAM_API",
        choices=("auto", "tgi", "openai"),
    )
    upstream_api_key: str | None = option(None, "key that the upstream wants", env="HEADRACE_UPSTREAM_API_KEY")


def broker_problem(url: str) -> str | None:
    """Why a router cannot use a broker; None if it can."""
    if url == "memory://" or url.startswith(STORES):
        return None
    return f"--broker {url.partition('://')[0]}... must be memory://, embedded, {', '.join(STORES)} and an address"
