"""The format of the keys file, and what is said of a file that is not of it."""

from __future__ import annotations

import hashlib

import pytest

from headrace._common.errors import StartupError
from headrace_router.keys_file import parse
from headrace_router.tenants import CLASSES, Quota, digest


def test_a_whole_file() -> None:
    hashed = hashlib.sha256(b"sk-2").hexdigest()
    table = parse(f"""
        [tenants.acme]
        keys = ["sk-1", "sha256:{hashed}"]
        classes = ["agent", "document"]
        requests_per_minute = 60
        tokens_per_minute = 100_000
        max_concurrent_requests = 8
        weight = 2
        cache_salt = "shared"

        [tenants."b.c"]
        keys = ["sk-3"]
    """.encode(), "f")
    assert set(table) == {digest("sk-1"), digest("sk-2"), digest("sk-3")}
    acme, other = table[digest("sk-1")], table[digest("sk-3")]
    assert table[digest("sk-2")] is acme
    assert (acme.name, acme.workload, acme.classes) == ("acme", "agent", ("agent", "document"))
    assert (acme.quota, acme.cache_salt) == (Quota(60, 100_000, 8), "shared")
    assert (acme.weight, other.weight) == (2.0, 1.0)
    assert (other.name, other.classes, other.quota, other.cache_salt) == ("b.c", CLASSES, Quota(), "b.c")


@pytest.mark.parametrize(("text", "words"), [
    ("", ["no [tenants.NAME] table"]),
    ("tenants = 1", ["no [tenants.NAME] table"]),
    ("[tenants.a]\nkeys = [\n\"k\"\n\n= 3", ["line 5"]),
    ("x = 1", ["line 1", "only [tenants.NAME]"]),
    ("[tenants.a]\nkeys = ['k']\nrpm = 3", ["line 3", "[tenants.a] rpm", "unknown"]),
    ("[tenants.a]\nkeys = ['k']\n\nrequests_per_minute = 'x'", ["line 4", "[tenants.a] requests_per_minute", "int"]),
    ("[tenants.a]\nkeys = ['k']\ntokens_per_minute = 0", ["line 3", "[tenants.a] tokens_per_minute", ">= 1"]),
    ("[tenants.a]\nkeys = ['k']\nweight = 0", ["line 3", "[tenants.a] weight", "> 0"]),
    ("[tenants.a]\nkeys = ['k']\nweight = nan", ["line 3", "[tenants.a] weight"]),
    ("[tenants.a]\nkeys = []", ["line 2", "[tenants.a] keys"]),
    ("[tenants.a]\nclasses = ['chat']", ["line 1", "[tenants.a] keys", "missing"]),
    ("[tenants.a]\nkeys = ['k']\nclasses = ['chat', 'x']", ["line 3", "classes", "chat, agent, document"]),
    ("[tenants.'a b']\nkeys = ['k']", ["line 1", "[tenants.a b]", "name"]),
    ("[tenants.a]\nkeys = ['k']\n[tenants.b]\n# c\nkeys = ['k']", ["line 5", "[tenants.b] keys", "tenant a too"]),
    ("[tenants.a]\nkeys = ['sha256:secret']", ["line 2", "[tenants.a] keys", "64 hexadecimal digits"]),
    ("[tenants.a]\nkeys = ['secret key']", ["line 2", "[tenants.a] keys", "without spaces"]),
    ("[tenants.a]\nkeys = ['']", ["[tenants.a] keys", "not empty"]),
    ("[tenants]\na = 1", ["[tenants.a]", "object"]),
])
def test_what_is_wrong_is_named(text: str, words: list[str]) -> None:
    with pytest.raises(StartupError) as caught:
        parse(text.encode(), "keys.toml")
    message = str(caught.value)
    assert message.startswith("--api-keys-file keys.toml: ")
    assert all(word in message for word in words), message
    assert "secret" not in message


def test_bytes_that_are_no_text() -> None:
    with pytest.raises(StartupError, match="not UTF-8, at byte 2"):
        parse(b"ab\xff", "f")
